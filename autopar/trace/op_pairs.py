"""An op of a longer program and the one in its place in the shorter one; see `autopar.trace.prefixes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from autopar.ops.family import argument, packet_name
from autopar.program import Arg, Op, TensorType

__all__ = ["LABELS_OF", "Fill", "Longer", "OpPair", "Prefix", "Types"]

LABELS_OF = {"autopar.cross_entropy": 1, "autopar.cross_entropy_denominator": 0}
"""Losses -> which of their operands holds the labels."""

Fill = float | int | bool | None
"""What all entries of a longer value are that are beyond the shorter one along one dim alone; None: not known."""


class Longer(NamedTuple):
    """A dim that is longer: it is ``blocks`` times as long as a block, and each block begins with the shorter one's.

    There is more than one block where a view made one dim of rows and places.

    Args:
        fill: the number that all entries beyond are.
        blocks: the number of blocks.
        entries: what each slice beyond holds if it is not one number: a tensor of size 1 along this dim.
        is_of_labels: entries beyond are computed of labels that are ``ignore_index``, which may be no index.
    """

    fill: Fill = None
    blocks: int = 1
    entries: Tensor | None = None
    is_of_labels: bool = False


Prefix = Mapping[int, Longer]
"""The dims along which a value is longer; along all others it is as long as the shorter one."""

Types = tuple[TensorType, TensorType]


@dataclass
class OpPair:
    """An op of the longer program and the one in its place in the shorter one.

    Args:
        op: the former.
        other: the latter.
        states: of the operands of `op`.
        operands: the types of both ops' operands, the longer ones first.
        results: of their results.
        constants: those operands that are constants, of both.

    `last` is found: the dim along which the op takes the last entry; and `reads_out_of_range`: a fill that no index is.
    """

    op: Op
    other: Op
    states: Sequence[Prefix] = ()
    operands: Sequence[Types] = ()
    results: Sequence[Types] = ()
    constants: Sequence[tuple[Tensor | None, Tensor | None]] = ()
    last: int | None = None
    reads_out_of_range: Fill = None
    is_followed: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])  # operands' longer dims
    made: dict[tuple[int, int], Longer] = field(default_factory=dict[tuple[int, int], Longer])  # results' longer dims
    literals: set[int | str] = field(default_factory=set[int | str])  # arguments that may differ

    @classmethod
    def of_one(cls, op: Op) -> OpPair:
        """For an op alone."""
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
        """The label that counts for nothing."""
        return argument(self.op, 4 if self.op.target == "autopar.cross_entropy" else 2, "ignore_index", -100)

    def is_in_one(self) -> bool:
        """Whether all that is longer is so in one block."""
        return all(longer.blocks == 1 for state in self.states for longer in state.values())

    def longer(self) -> set[tuple[int, int]]:
        """Operands and their dims that are longer."""
        return {(place, dim) for place, state in enumerate(self.states) for dim in state}
