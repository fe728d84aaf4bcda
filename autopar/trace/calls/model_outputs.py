"""What a call of the model gives back: what `forward` returns, and the attributes that it sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import OutputError
from autopar.trace.calls.structure import Leaf, Structure, rebuild, walk

__all__ = ["AssignedAttribute", "ModelOutputs", "add_to"]


@dataclass(frozen=True)
class AssignedAttribute:
    """An attribute that `forward` sets (``self.aux_loss = ...``), or a list or dict that it adds to.

    Args:
        path: of the module.
        name: of the attribute.
        structure: of the value; its tensors have places in the program's outputs.
        is_added: the value is a list or dict, which is added to the one that the attribute is.
    """

    path: str
    name: str
    structure: Structure
    is_added: bool


@dataclass(frozen=True)
class ModelOutputs:
    """Rebuilds them from a program's outputs; a class so that a `Traced` can be compared and pickled with it.

    Args:
        returned: the structure of what `forward` returns, whose tensors come first.
        assigned: the attributes.
    """

    returned: Structure
    assigned: tuple[AssignedAttribute, ...] = ()

    def __call__(self, entries: Sequence[Any]) -> Any:
        """What `forward` returns, of one entry for each of the program's outputs.

        Raises:
            OutputError: there are more or fewer.
        """
        structures = (self.returned, *(each.structure for each in self.assigned))
        expected = sum(isinstance(end, Leaf) for structure in structures for end in walk(structure))
        if len(entries) != expected:
            raise OutputError(f"{len(entries)} entries for a program with {expected} outputs")
        return rebuild(self.returned, entries)

    def assign(self, root: nn.Module, entries: Sequence[Any]) -> None:
        """Set the attributes of `root` and its submodules."""
        for each in self.assigned:
            owner, value = root.get_submodule(each.path), rebuild(each.structure, entries)
            if each.is_added:
                add_to(getattr(owner, each.name), value)
            else:
                setattr(owner, each.name, value)


def add_to(container: Any, values: Any) -> None:
    """Add to a list what is in another, or to a dict."""
    add = getattr(container, "update", None) or container.extend
    add(values)
