"""What a layer's local program is made of: local values, and instructions over them.

`local_program` derives one; prices, memory, plan checks and `lower` read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autopar.placement import Layout, Placement, Step
from autopar.program import Op, TensorType, Value
from autopar.step.layer.op_states import OpState

__all__ = [
    "InParts", "InPieces", "Instruction", "KeepInFirst", "LocalProgram", "LocalValue", "Reshard", "RunOp", "Single",
    "TakeMicrobatch",
]  # fmt: skip


class LocalValue(NamedTuple):
    """A value at one point of its way through a layer.

    `layout` places it on the layer's mesh, `time` on the axis of microbatches; `type` is what one device holds.
    """

    value: Value
    layout: Layout
    time: Placement
    type: TensorType


@dataclass(frozen=True, slots=True)
class TakeMicrobatch:
    """Take the running microbatch's slice (a view) of local value `source`, along the dim of `target`'s time."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class KeepInFirst:
    """Make a term of local value `source`, which all microbatches have: the first one keeps it, others have zeros."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Reshard:
    """Bring local value `source` to the layout of `target`, and its gradient back.

    Args:
        source: index in `LocalProgram.values`.
        target: likewise.
        steps: the movements, in forward order; not empty.
        tensor: the global type of one microbatch of the value.
        purpose: ``"copy"``, ``"operand"`` or ``"output"``.
        before: index of the op that it runs ahead of in forward; the number of ops behind the last one.
    """

    source: int
    target: int
    steps: tuple[Step, ...]
    tensor: TensorType
    purpose: str
    before: int


@dataclass(frozen=True, slots=True)
class RunOp:
    """Run the op of this index in the layer, or the special kernel of its options, on local values."""

    index: int
    op: Op
    state: OpState
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InPieces:
    """Run a move on one axis in pieces of rows, overlapped with the products that read its result or make its source.

    Forward, each piece that has arrived is multiplied while the next one travels, or travels while the next one is
    multiplied; so do gradients in backward, and the product for the gradient of the weight overlaps the last ones.

    Args:
        move: has one step.
        products: those that read its target, or the one that makes its source.
        dim: of the rows (of operand and result of each product) that is cut into pieces.
        count: into how many.
    """

    move: Reshard
    products: tuple[RunOp, ...]
    dim: int
    count: int

    @property
    def moves_first(self) -> bool:
        """Whether the products read what is moved; else they make it."""
        return self.move.target in self.products[0].operands

    @property
    def sharded_dim(self) -> int:
        """The dim that is sharded before or after the move; -1 if it is whole on both sides."""
        (step,) = self.move.steps
        return max(step.src.dim, step.dst.dim)

    @property
    def singles(self) -> tuple[Reshard | RunOp, ...]:
        """The move and the products, in order, as they would run whole."""
        return (self.move, *self.products) if self.moves_first else (*self.products, self.move)


Single = TakeMicrobatch | KeepInFirst | Reshard | RunOp


@dataclass(frozen=True, slots=True)
class InParts:
    """Run an op whose kernel runs in three parts (`autopar.ops.family.Kernel.parts`), with others between them.

    Args:
        run: the op.
        pauses: what runs between the first and the second part, and between the second and the third.
    """

    run: RunOp
    pauses: tuple[tuple[Single, ...], tuple[Single, ...]]

    @property
    def singles(self) -> tuple[Single, ...]:
        """All of them, in order, as they would run if the kernel ran at once in its second part."""
        return (*self.pauses[0], self.run, *self.pauses[1])


Instruction = Single | InPieces | InParts


@dataclass(frozen=True)
class LocalProgram:
    """A layer as one device runs it.

    Args:
        values: all local values; instructions name them by index.
        inputs: per input of the layer, the local value that arrives.
        state: likewise of the parameters, buffers and constants it reads: parameters in their copy layout.
        instructions: in forward order.
        outputs: per output of the layer, the local value that leaves.
    """

    values: tuple[LocalValue, ...]
    inputs: tuple[int, ...]
    state: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    @property
    def singles(self) -> Iterator[Single]:
        """The instructions, with what runs in pieces one by one."""
        for each in self.instructions:
            if isinstance(each, InPieces | InParts):
                yield from each.singles
            else:
                yield each

    @property
    def state_layouts(self) -> tuple[Layout, ...]:
        """The layouts in which the layer wants its state."""
        return tuple(self.values[index].layout for index in self.state)

    @property
    def output_times(self) -> tuple[Placement, ...]:
        """Per output, its placement on the axis of microbatches."""
        return tuple(self.values[index].time for index in self.outputs)
