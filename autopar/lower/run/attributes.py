"""Attributes that a model's forward reads and a script may set: with other values the model is traced again."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, cast

from torch import nn

from autopar.errors import ModelError
from autopar.objects.attribute_contents import Contents, contents_of, has_contents, has_only_values, is_compared
from autopar.objects.attribute_owners import attribute_owners, attributes_of, is_plain, joined

__all__ = ["THAWED", "Attributes", "Settings", "settings_text"]

Settings = tuple[tuple[str, str, Any], ...]
"""What differs from when the model was parallelized: path of a module or config, attribute, value (of containers their
`Contents`).
"""

THAWED = "requires_grad"
"""The attribute of the whole model that is the names of parameters which were frozen, and no longer are."""
_MODE = "training"
_NEVER = frozenset(vars(nn.Module()).keys() - {_MODE})


@dataclass(frozen=True)
class _Other:
    """A value that a trace can't be made with."""

    text: str


@dataclass
class Attributes:
    """The attributes of a parallel module, its submodules and their configs that are plain values, containers, tensors
    or functions.

    Among them are the modes of submodules.  The mode of the whole module is part of a call, and submodules are expected
    to be in it; in the mode in which the model was parallelized, in those that they had then.

    Attributes:
        root: the parallel module.
        before: path of the owner (`attribute_owners`) -> attributes as they were when the model was parallelized,
            `Contents` of those that can be written to.
        watched: those that some program was made with: path -> names.
        frozen: names of parameters to which the first program sends no gradients.
    """

    root: nn.Module
    before: Mapping[str, Mapping[str, Any]]
    watched: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    frozen: tuple[str, ...] = ()

    @classmethod
    def of(cls, root: nn.Module, like: Attributes | None = None, frozen: Iterable[str] = ()) -> Attributes:
        """As they are now, or were in the module that `root` is a copy of."""
        if like is not None:
            return cls(root, like.before, dict(like.watched), like.frozen)
        before = {
            path: {name: _kept(x) for name, x in vars(owner).items() if name not in _NEVER and _is_kept(x)}
            for path, owner in attribute_owners(root).items()
        }
        return cls(root, before, frozen=tuple(frozen))

    def follow(self, original: Attributes) -> None:
        """Know those that a copy has of its own, where the original's are as they were."""
        self.before = {
            path: {
                name: _kept(self._now(path)[name])
                if isinstance(known, Contents)
                and name in self._now(path)
                and _is_equal(original._now(path).get(name), known)
                else known
                for name, known in before.items()
            }
            for path, before in original.before.items()
        }

    @property
    def names(self) -> Iterable[tuple[str, str]]:
        """All of them, as `watch` takes them."""
        return ((path, name) for path, names in self.before.items() for name in names)

    def watch(self, reads: Iterable[tuple[str, str]]) -> None:
        """Programs were made with these."""
        names: dict[str, list[str]] = {}
        for path, name in sorted(reads):
            if name in self.before.get(path, {}):
                names.setdefault(path, []).append(name)
        self.watched = {path: tuple(some) for path, some in names.items()}

    def changed(self, *, everywhere: bool = False) -> Settings:
        """Those with other values than before, of those that programs were made with, or of all that can be used."""
        # No `get_parameter`: torch.func.functional_call puts other tensors in their places.
        thawed = tuple(name for name in self.frozen if attrgetter(name)(self.root).requires_grad)
        changed: list[tuple[str, str, Any]] = [("", THAWED, thawed)] if thawed else []
        for path, names in (self.before if everywhere else self.watched).items():
            own, before = self._now(path), self.before[path]
            for name in names:
                value, known = own.get(name), self._mode_before(path) if name == _MODE else before[name]
                if value is not known and not _is_equal(value, known):
                    changed.append((path, name, _setting(value, known)))
        kept = changed if not everywhere else [each for each in changed if not isinstance(each[2], _Other)]
        return tuple(sorted(kept, key=lambda each: each[:2]))

    @cached_property
    def _modules(self) -> dict[str, dict[str, Any]]:
        """Path -> attributes of each module, which stay where they are; records may be replaced."""
        named = cast("Iterable[tuple[str, nn.Module]]", nn.Module.named_modules(self.root))
        return {path: vars(module) for path, module in named}

    def _now(self, path: str) -> dict[str, Any]:
        return self._modules[path] if path in self._modules else attributes_of(self.root, path)

    def _mode_before(self, path: str) -> bool:
        """The mode of a submodule, as the whole module's is now."""
        now = self.root.training
        return bool(self.before[path][_MODE]) if now == self.before[""][_MODE] else now

    @contextmanager
    def kept(self) -> Generator[None]:
        """Inside, what is set or written to leaves those that programs were made with as they were, after it.

        For what one rank does alone: else it would have to plan again, alone.
        """
        owned = [(self._now(path), name) for path, names in self.watched.items() for name in names]
        before = [(own, name, own[name]) for own, name in owned if name in own]
        for own, name, value in before:
            if is_compared(value) and has_only_values(value):
                own[name] = copy.deepcopy(value)
        try:
            yield
        finally:
            for own, name, value in before:
                own[name] = value

    def give(self, part: str, made: nn.Module) -> None:
        """Set those of `made`, which runs in place of the submodule `part`, as they are now."""
        for path, owner in attribute_owners(made).items():
            own = self._now(joined(part, path) if path else part)
            vars(owner).update({name: x for name, x in own.items() if name not in _NEVER and _is_settable(x)})

    def usable_settings(self) -> Settings:
        """Those of `changed`, with all of which a program can be made.

        Raises:
            ModelError: one that programs were made with is something that none can be made with now.
        """
        changed = self.changed()
        for path, name, value in changed:
            if isinstance(value, _Other):
                raise ModelError(
                    f"forward reads the attribute {joined(path, name)!r}, {value.text}. Only numbers, flags and text "
                    "may change, and lists, dicts and sets of these: pass it to the call, or register a tensor with "
                    "register_buffer before autopar.parallelize"
                )
        return changed


def settings_text(settings: Settings) -> str:
    """For people and for ranks to compare."""
    return ", ".join(
        f"{len(value)} parameters trained that were frozen ({value[0]}, ...)"
        if name == THAWED
        else f"{joined(path, name)} = {value!r}"
        for path, name, value in settings
    )


def _is_kept(value: Any) -> bool:
    return is_plain(value) or is_compared(value)


def _kept(value: Any) -> Any:
    return contents_of(value) if is_compared(value) else value


def _is_settable(value: Any) -> bool:
    return is_plain(value) or (is_compared(value) and has_only_values(value))


def _is_equal(value: Any, before: Any) -> bool:
    if isinstance(before, Contents):
        return has_contents(value, before)
    return value is before or (type(value) is type(before) and bool(value == before))


def _setting(value: Any, before: Any) -> Any:
    """What a program is made with for a value that changed."""
    if is_plain(value):
        return value
    now = contents_of(value, copies=True)
    if now.value is not None:
        return now
    if isinstance(before, Contents) and now.text == before.text:
        return _Other(f"{now.text} that was replaced or written to since the model was parallelized")
    return _Other(f"which was {before!r} when the model was parallelized and is {now.text} now")
