"""Proves that a program traced on padded inputs computes, in its unpadded entries, what the unpadded call computes.

A batch of 7 rows may then run as one of 8, a text of 37 tokens as one of 64.  Both calls are traced, and the two
programs are compared op by op.  For each pair of values the analysis knows that they are equal, or that the longer one
has additional entries at the end of some dims and starts with the entries of the shorter one (the shorter value is its
prefix).  It may also know what the additional entries, the padding, contain: ``ignore_index`` in labels, zeros, or
numbers that a mask hides.

How an op propagates this follows from its factors (`Op.options`).  An op computes slice by slice along a factor that it
can be split on without a kernel, so a longer factor gives results that are longer and have the same prefix.  A factor
that is summed must be padded with zeros.  A few ops can't be split along a dim but depend only on earlier entries
(causal attention, cumulative sums).  After any other op (batch norm, a mean over rows, a number computed from a size)
the value is unknown, and so is everything computed from it.  Padding is assumed to be finite, because a mask
multiplies it by zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.program import Op, Program, Ref
from autopar.trace.padded.entries_beyond import looks_up
from autopar.trace.padded.op_pairs import Fill, Longer, OpPair, Prefix
from autopar.trace.padded.prefix_rules import follow
from autopar.trace.tracing import Traced

__all__ = ["LongerProgram", "PaddingError", "compare", "ignored_labels"]


class PaddingError(Exception):
    """The padded program is not proven to compute what the unpadded one computes; the message names the op."""


@dataclass(frozen=True)
class LongerProgram:
    """How to recover the results of the unpadded call from the padded program.

    Args:
        cuts: outputs that are padded -> for each padded dim, the size to cut it to.
        last: ops that select the last entry along a dim, which is padding in the padded program -> that dim.
    """

    cuts: Mapping[str, Mapping[int, int]]
    last: Mapping[str, int]


def ignored_labels(program: Program) -> dict[str, int]:
    """The inputs that are targets of a cross entropy, directly or through views and copies -> its ``ignore_index``."""
    made_by = {name: op for _, op in _ops(program) for name in op.results}
    ignored: dict[str, int] = {}
    for _, op in _ops(program):
        pair = OpPair.of_one(op)
        name = pair.target
        while name in made_by and len(made_by[name].operands) == 1:
            name = made_by[name].operands[0]
        if name in program.inputs and isinstance(pair.ignore_index, int):
            ignored[name] = pair.ignore_index
    return ignored


def compare(short: Traced, long: Traced, fills: Mapping[str, Fill], *, has_copies: bool = False) -> LongerProgram:
    """Prove that `long`, on the padded inputs of `short`, computes all outputs and buffer updates of `short`.

    Args:
        short: a traced call.
        long: the same call with larger sizes.
        fills: inputs of `long` -> the number they are padded with; other inputs are padded with valid values.
        has_copies: whether the padding is whole rows that repeat other rows, and so read no other entries of tables.

    Raises:
        PaddingError: an output or a buffer update can't be proven to be the same.
    """
    return _Comparison(short, long, fills, has_copies).run()


def _ops(program: Program) -> Iterator[tuple[bool, Op]]:
    yield from ((True, op) for op in program.hoisted)
    yield from ((False, op) for layer in program.layers for op in layer.ops)


@dataclass
class _Comparison:
    short: Traced
    long: Traced
    fills: Mapping[str, Fill]
    has_copies: bool
    names: dict[str, str] = field(default_factory=dict[str, str])  # values of `long` -> values of `short`
    known: dict[str, Prefix | None] = field(default_factory=dict[str, "Prefix | None"])
    last: dict[str, int] = field(default_factory=dict[str, int])
    made_by: dict[str, Op] = field(default_factory=dict[str, Op])
    where: dict[str, str] = field(default_factory=dict[str, str])  # unknown values -> the op that made them so

    def run(self) -> LongerProgram:
        short, long = self.short.program, self.long.program
        if len(short.inputs) != len(long.inputs) or len(short.outputs) != len(long.outputs):
            raise PaddingError("the two calls have different numbers of inputs or outputs")
        for name, other in zip(long.inputs, short.inputs, strict=True):
            longer = Longer(self.fills.get(name), is_of_labels=name in self.fills)
            self._pair(name, other, dict.fromkeys(self._longer_dims(name, other), longer))
        steps, other_steps = list(_ops(long)), list(_ops(short))
        if len(steps) != len(other_steps):
            raise PaddingError(f"the model runs {len(other_steps)} ops unpadded and {len(steps)} ops padded")
        for (is_hoisted, op), (is_other_hoisted, other) in zip(steps, other_steps, strict=True):
            if op.target != other.target or is_hoisted != is_other_hoisted or len(op.results) != len(other.results):
                raise PaddingError(f"{other.source}: the model runs {other.target} unpadded and {op.target} padded")
            self._step(op, other)
        return LongerProgram(self._cuts(), self.last)

    def _cuts(self) -> dict[str, dict[int, int]]:
        short, long = self.short.program, self.long.program
        if short.loss and long.outputs.index(long.loss or long.outputs[0]) != short.outputs.index(short.loss):
            raise PaddingError("the loss is a different output")
        cuts: dict[str, dict[int, int]] = {}
        for name, other in zip(long.outputs, short.outputs, strict=True):
            prefix = self._need(name, other)
            if any(longer.blocks > 1 for longer in prefix.values()):
                raise PaddingError(f"output {name} has rows and positions flattened into one dim")
            lengths = {dim: short.type_of(other).shape[dim] for dim in prefix}
            if lengths:
                cuts[name] = lengths
        buffers = {long.parameters[old]: new for old, new in long.updates.items()}
        others = {short.parameters[old]: new for old, new in short.updates.items()}
        if buffers.keys() != others.keys() or any(self._need(new, others[name]) for name, new in buffers.items()):
            raise PaddingError("a buffer update depends on the padding")
        return cuts

    def _need(self, name: str, other: str) -> Prefix:
        self._meet(name, other)
        known = self.known[name] if self.names[name] == other else None
        if known is None:
            raise PaddingError(self.where.get(name, f"{name} is a different value"))
        return known

    def _step(self, op: Op, other: Op) -> None:
        same = len(op.operands) == len(other.operands)
        for name, its in zip(op.operands, other.operands, strict=False):
            self._meet(name, its)
            same = same and self.names[name] == its
        bad = next((name for name in op.operands if self.known[name] is None), "")
        pair = OpPair(
            op, other, [self.known[name] or {} for name in op.operands],
            [(self.long.program.type_of(a), self.short.program.type_of(b)) for a, b in self._types(op, other)],
            [(self.long.program.type_of(a), self.short.program.type_of(b))
             for a, b in zip(op.results, other.results, strict=True)],
            [(self.long.constants.get(a), self.short.constants.get(b)) for a, b in self._types(op, other)],
        )  # fmt: skip
        results = follow(pair, is_known=not bad) if same else None
        self.made_by |= dict.fromkeys(op.results, op)
        if not self.has_copies:
            self._check_places(op)
        if pair.reads_out_of_range:
            raise PaddingError(
                f"{op.source}: {op.target} reads labels, which are padded with {pair.reads_out_of_range}"
            )
        if pair.last is not None and results is not None:
            self.last[op.name] = pair.last
        for place, (name, its) in enumerate(zip(op.results, other.results, strict=True)):
            self.names[name], self.known[name] = its, None if results is None else results[place]
            if self.known[name] is None:
                self.where[name] = self.where.get(bad) or f"{op.source}: {op.target} may mix padding with other entries"

    def _check_places(self, op: Op) -> None:
        """Raise PaddingError if padded indices of `op` may be out of range, such as positions past the end of a table.

        Inputs are padded with valid values; of indices that the model computes for padding nothing is known.
        """
        if op.target.startswith("autopar.") or not looks_up(op):
            return
        shape = self.long.program.type_of(op.operands[0]).shape
        indices = op.args[1] if op.target == "aten.index.Tensor" else op.args[1:2]
        pairs = zip(indices, shape, strict=False) if isinstance(indices, tuple) else ()
        sizes = {index.name: size for index, size in pairs if isinstance(index, Ref)}
        for name in op.operands[1:]:
            source = name
            while source in self.made_by and len(self.made_by[source].operands) == 1 and self.made_by[source].is_view:
                source = self.made_by[source].operands[0]
            constant = self.long.constants.get(name)
            if not self.known[name] or source in self.long.program.inputs:
                continue
            is_checked = op.target in ("aten.embedding.default", "aten.index.Tensor") and name in sizes
            if constant is None or not is_checked or not bool((constant < sizes[name]).all()):
                raise PaddingError(f"{op.source}: {op.target} may index past the end of its table")

    @staticmethod
    def _types(op: Op, other: Op) -> Iterator[tuple[str, str]]:
        return zip(op.operands, other.operands, strict=False)

    def _meet(self, name: str, other: str) -> None:
        """Record what is known of a value that no op computes: a parameter, a buffer, a constant."""
        if name in self.known:
            return
        short, long = self.short.program, self.long.program
        prefix: Prefix | None = None
        if name in self.long.constants and other in self.short.constants:
            prefix = _constant(self.long.constants[name], self.short.constants[other])
        elif name in long.parameters and long.parameters[name] == short.parameters.get(other):
            prefix = {} if long.type_of(name) == short.type_of(other) else None
        self._pair(name, other, prefix)

    def _pair(self, name: str, other: str, prefix: Prefix | None) -> None:
        short, long = self.short.program, self.long.program
        if long.type_of(name).dtype != short.type_of(other).dtype:
            prefix = None
        self.names[name], self.known[name] = other, prefix
        if prefix is None:
            self.where[name] = f"the constant or input {name} differs"

    def _longer_dims(self, name: str, other: str) -> list[int]:
        shape, shorter = self.long.program.type_of(name).shape, self.short.program.type_of(other).shape
        if len(shape) != len(shorter):
            raise PaddingError(f"{name} has a different number of dims")
        return [dim for dim, (a, b) in enumerate(zip(shape, shorter, strict=True)) if a != b]


def _constant(long: Tensor, short: Tensor) -> Prefix | None:
    """How a longer constant relates to a shorter one, and its padding along each longer dim; None: it differs."""
    if long.dim() != short.dim() or long.dtype != short.dtype or any(map(_is_less, long.shape, short.shape)):
        return None
    begin = tuple(map(slice, short.shape))
    if not torch.equal(long[begin], short):
        return None
    made: dict[int, Longer] = {}
    for dim, (size, length) in enumerate(zip(long.shape, short.shape, strict=True)):
        if size != length:
            beyond = long[(*begin[:dim], slice(length, None), *begin[dim + 1 :])]
            first = beyond.flatten()[:1]
            made[dim] = Longer(first.item() if first.numel() and bool((beyond == first).all()) else None)
    return made


def _is_less(a: int, b: int) -> bool:
    return a < b
