"""Buffers that forward makes when there are none: ``if self.mask is None: self.register_buffer("mask", ...)``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

__all__ = ["MadeBuffers"]


class MadeBuffers:
    """Those of `module`, and of the modules inside of it, that are made after this object.

    Attributes:
        before: by path and name, the buffers that were there.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
        self._tables: dict[str, dict[str, Tensor | None]] = {path: vars(part)["_buffers"] for path, part in modules}
        self._originals = {path: dict(table) for path, table in self._tables.items()}
        self.before = {
            (path, name): buffer
            for path, table in self._originals.items()
            for name, buffer in table.items()
            if buffer is not None
        }

    def made(self) -> dict[tuple[str, str], Tensor]:
        """Those that are there now, by path and name."""
        return {
            (path, name): buffer
            for path, table in self._tables.items()
            for name, buffer in table.items()
            if buffer is not None and self._originals[path].get(name) is None
        }

    def forget(self) -> None:
        """Take them out, so that forward makes them again."""
        for path, name in self.made():
            if name in self._originals[path]:
                self._tables[path][name] = None
            else:
                del self._tables[path][name]
