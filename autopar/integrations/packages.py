"""Imports of packages that are optional."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from autopar.errors import MissingPackageError

__all__ = ["optional"]


def optional(name: str, install: str) -> Any:
    """The module `name`.

    Raises:
        MissingPackageError: it is not installed; ``pip install {install}`` does that.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"this integration needs {name!r}, and {error.name!r} is not installed: pip install {install}"
        ) from error
