"""Parameters and buffers that modules hold a second time: ``self.weights = [self.up, self.down]``.

While a model is exported, torch has its own tensors in the modules' tables in place of parameters and buffers.  Those
in lists, dicts and functions stay, and an export takes them for constants.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from autopar.objects.attribute_owners import is_plain
from autopar.objects.references import redirect, refers
from autopar.trace.compat.module_trees import MODULE_TABLES

__all__ = ["HeldMembers"]


class HeldMembers:
    """Those of `module`, and of the modules inside of it, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        parts = [*module.modules()]
        self._places = {
            id(member): (table, name)
            for part in parts
            for table in _tables(part)
            for name, member in table.items()
            if member is not None
        }
        self._held = [
            (vars(part), name, value)
            for part in parts
            for name, value in vars(part).items()
            if name not in MODULE_TABLES and not is_plain(value) and refers(value, self._places)
        ]

    @contextmanager
    def exchanged(self) -> Generator[None]:
        """Inside, attributes hold what the tables of modules have now."""
        ids = {member: table[name] for member, (table, name) in self._places.items()}
        made = [(own, name, value, redirect(value, ids)) for own, name, value in self._held]
        for own, name, _, other in made:
            own[name] = other
        try:
            yield
        finally:
            for own, name, value, other in made:
                if own.get(name) is other:  # else forward has set it
                    own[name] = value


def _tables(module: nn.Module) -> Iterable[dict[str, Any]]:
    return cast("tuple[dict[str, Any], ...]", (vars(module)["_parameters"], vars(module)["_buffers"]))
