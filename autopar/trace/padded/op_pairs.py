"""An op of a padded program and its counterpart in the unpadded one; see `autopar.trace.padded.prefixes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from autopar.ops.family import argument, packet_name
from autopar.program import Arg, Op, TensorType

__all__ = ["LABELS_OF", "Fill", "Longer", "OpPair", "Prefix", "Types"]

LABELS_OF = {"autopar.cross_entropy": 1, "autopar.cross_entropy_denominator": 0}
"""Losses -> the index of the operand with the labels."""

Fill = float | int | bool | None
"""The number that all padding along one dim is; None: it is not one known number."""


class Longer(NamedTuple):
    """A padded dim: it consists of equal blocks, each of which starts with the entries of the shorter value's block.

    There are several blocks where a view has flattened rows and positions into one dim.

    Args:
        fill: the number that all padding is.
        blocks: the number of blocks.
        entries: what each slice of padding contains if it is not one number: a tensor of size 1 along this dim.
        is_of_labels: the padding is computed from labels that are ``ignore_index``, which may be out of range.
    """

    fill: Fill = None
    blocks: int = 1
    entries: Tensor | None = None
    is_of_labels: bool = False


Prefix = Mapping[int, Longer]
"""The padded dims of a value; all other dims have the size of the shorter value."""

Types = tuple[TensorType, TensorType]


@dataclass
class OpPair:
    """An op of the padded program and its counterpart in the unpadded one.

    Args:
        op: of the padded program.
        other: of the unpadded program.
        states: for each operand of `op`, its padded dims.
        operands: for each operand, its type in the padded and in the unpadded program.
        results: likewise for each result.
        constants: likewise the values of operands that are constants, else None.

    The rules of `padded.prefix_rules` fill in the rest.  `last`: the dim along which the op selects the last
    entry.  `reads_out_of_range`: padding that the op would use as an index, though it is none.
    """

    op: Op
    other: Op
    states: Sequence[Prefix] = ()
    operands: Sequence[Types] = ()
    results: Sequence[Types] = ()
    constants: Sequence[tuple[Tensor | None, Tensor | None]] = ()
    last: int | None = None
    reads_out_of_range: Fill = None
    is_followed: set[tuple[int, int]] = field(
        default_factory=set[tuple[int, int]]
    )  # padded dims of operands that a rule covers
    made: dict[tuple[int, int], Longer] = field(default_factory=dict[tuple[int, int], Longer])  # padded dims of results
    literals: set[int | str] = field(default_factory=set[int | str])  # arguments that are allowed to differ

    @classmethod
    def of_one(cls, op: Op) -> OpPair:
        """For a single op, with itself."""
        return cls(op, op)

    @property
    def kind(self) -> str:
        """The op without its overload."""
        return packet_name(self.op.target)

    @property
    def target(self) -> str:
        """The value with the labels, if the op is a cross entropy."""
        place = LABELS_OF.get(self.op.target)
        return "" if place is None else self.op.operands[place]

    @property
    def ignore_index(self) -> Arg:
        """The label that the loss ignores."""
        return argument(self.op, 4 if self.op.target == "autopar.cross_entropy" else 2, "ignore_index", -100)

    def is_in_one(self) -> bool:
        """Whether every padded dim is one block."""
        return all(longer.blocks == 1 for state in self.states for longer in state.values())

    def longer(self) -> set[tuple[int, int]]:
        """(operand, dim) of all padded dims."""
        return {(place, dim) for place, state in enumerate(self.states) for dim in state}
