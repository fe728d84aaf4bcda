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
from autopar.objects.references import redirect

__all__ = ["HeldMembers"]

_TABLES = ("_parameters", "_buffers", "_modules")


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
        found = _Found(dict.fromkeys(self._places))
        self._held = [
            (vars(part), name, value)
            for part in parts
            for name, value in vars(part).items()
            if name not in _TABLES and not is_plain(value) and found.are_in(value)
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


class _Found(dict[int, None]):
    """The ids of members; that one was looked up is noted."""

    was_met = False

    def __contains__(self, key: object) -> bool:
        is_there = super().__contains__(key)
        self.was_met |= is_there
        return is_there

    def are_in(self, value: Any) -> bool:
        """Whether some are among what `redirect` replaces in `value`."""
        self.was_met = False
        redirect(value, self)
        return self.was_met


def _tables(module: nn.Module) -> Iterable[dict[str, Any]]:
    return cast("tuple[dict[str, Any], ...]", (vars(module)["_parameters"], vars(module)["_buffers"]))
