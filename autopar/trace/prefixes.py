"""Whether a program on longer inputs gives what the same model gives on shorter ones, where both have entries.

A batch of 7 rows may then run as one of 8, a text of 37 tokens as one of 64.  Both calls are traced, and the two
programs are followed op by op.  Of each value it is known how the long one relates to the short one: it is equal, or it
has more entries along some dims, and begins with those of the short one.  What is beyond may be known, too: that labels
are ``ignore_index`` there, that a mask hides it, that it is zero.

What an op does to this follows from its factors (`Op.options`): it works slice by slice along a factor that it can be
split on without a kernel, so a longer factor gives longer results that begin alike.  A factor that is summed needs
zeros beyond.  A few ops that can't be split along a dim depend on what comes before only (causal attention, running
sums).  Anything else (batch norm, a mean over rows, a number that was computed from the size) is not followed, and what
is computed of it is unknown.  Entries beyond are taken to be finite numbers, as a mask multiplies them by zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.program import Op, Program, Ref
from autopar.trace.entries_beyond import looks_up
from autopar.trace.op_pairs import Fill, Longer, OpPair, Prefix
from autopar.trace.prefix_rules import follow
from autopar.trace.tracing import Traced

__all__ = ["LongerProgram", "NotAlikeError", "compare", "ignored_labels"]


class NotAlikeError(Exception):
    """It is not known that the longer program gives what the shorter one does; the text says where it is not."""


@dataclass(frozen=True)
class LongerProgram:
    """What is known of a program on longer inputs.

    Args:
        cuts: the outputs that are longer -> the dims along which they are, and how long the shorter ones are.
        last: the ops that take the last entry along a dim, which is another one in the longer program -> that dim.
    """

    cuts: Mapping[str, Mapping[int, int]]
    last: Mapping[str, int]


def ignored_labels(program: Program) -> dict[str, int]:
    """The inputs that are the targets of cross entropies, or become so by views and copies -> ``ignore_index``."""
    made_by = {name: op for _, op in _ops(program) for name in op.results}
    found: dict[str, int] = {}
    for _, op in _ops(program):
        pair = OpPair.of_one(op)
        name = pair.target
        while name in made_by and len(made_by[name].operands) == 1:
            name = made_by[name].operands[0]
        if name in program.inputs and isinstance(pair.ignore_index, int):
            found[name] = pair.ignore_index
    return found


def compare(short: Traced, long: Traced, fills: Mapping[str, Fill], *, has_copies: bool = False) -> LongerProgram:
    """What `long` gives, where it begins with the inputs of `short`.

    Args:
        short: a traced call.
        long: the same call with larger sizes.
        fills: inputs of `long` -> what they hold beyond those of `short`; else anything that `short` may hold, too.
        has_copies: what is beyond are whole rows that are copies of others, which look up nothing else than these.

    Raises:
        NotAlikeError: where it is not known that all outputs of `short`, and its updates of buffers, can be had.
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
    names: dict[str, str] = field(default_factory=dict[str, str])  # of values of `long`, those of `short`
    known: dict[str, Prefix | None] = field(default_factory=dict[str, "Prefix | None"])
    last: dict[str, int] = field(default_factory=dict[str, int])
    made_by: dict[str, Op] = field(default_factory=dict[str, Op])
    where: dict[str, str] = field(default_factory=dict[str, str])  # the op that made a value unknown

    def run(self) -> LongerProgram:
        short, long = self.short.program, self.long.program
        if len(short.inputs) != len(long.inputs) or len(short.outputs) != len(long.outputs):
            raise NotAlikeError("the calls have other inputs or outputs")
        for name, other in zip(long.inputs, short.inputs, strict=True):
            longer = Longer(self.fills.get(name), is_of_labels=name in self.fills)
            self._pair(name, other, dict.fromkeys(self._longer_dims(name, other), longer))
        steps, other_steps = list(_ops(long)), list(_ops(short))
        if len(steps) != len(other_steps):
            raise NotAlikeError(f"the model runs {len(other_steps)} ops on the one, {len(steps)} on the other")
        for (is_hoisted, op), (is_other_hoisted, other) in zip(steps, other_steps, strict=True):
            if op.target != other.target or is_hoisted != is_other_hoisted or len(op.results) != len(other.results):
                raise NotAlikeError(
                    f"{other.source}: the model runs {other.target} on the one, {op.target} on the other"
                )
            self._step(op, other)
        return LongerProgram(self._cuts(), self.last)

    def _cuts(self) -> dict[str, dict[int, int]]:
        short, long = self.short.program, self.long.program
        if short.loss and long.outputs.index(long.loss or long.outputs[0]) != short.outputs.index(short.loss):
            raise NotAlikeError("the loss is another output")
        cuts: dict[str, dict[int, int]] = {}
        for name, other in zip(long.outputs, short.outputs, strict=True):
            found = self._need(name, other)
            if any(longer.blocks > 1 for longer in found.values()):
                raise NotAlikeError(f"output {name} has rows and places in one dim")
            lengths = {dim: short.type_of(other).shape[dim] for dim in found}
            if lengths:
                cuts[name] = lengths
        buffers = {long.parameters[old]: new for old, new in long.updates.items()}
        others = {short.parameters[old]: new for old, new in short.updates.items()}
        if buffers.keys() != others.keys() or any(self._need(new, others[name]) for name, new in buffers.items()):
            raise NotAlikeError("a buffer is updated by what all rows have")
        return cuts

    def _need(self, name: str, other: str) -> Prefix:
        self._meet(name, other)
        known = self.known[name] if self.names[name] == other else None
        if known is None:
            raise NotAlikeError(self.where.get(name, f"{name} is another value"))
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
        found = follow(pair, is_known=not bad) if same else None
        self.made_by |= dict.fromkeys(op.results, op)
        if not self.has_copies:
            self._check_places(op)
        if pair.reads_out_of_range:
            raise NotAlikeError(f"{op.source}: {op.target} reads labels, which are {pair.reads_out_of_range} beyond")
        if pair.last is not None and found is not None:
            self.last[op.name] = pair.last
        for place, (name, its) in enumerate(zip(op.results, other.results, strict=True)):
            self.names[name], self.known[name] = its, None if found is None else found[place]
            if self.known[name] is None:
                self.where[name] = self.where.get(bad) or f"{op.source}: {op.target} may mix them"

    def _check_places(self, op: Op) -> None:
        """Raise NotAlikeError if `op` may look up what is not there, as positions behind the end of their table.

        Inputs go on with what they held; nothing is known of what else the model makes of places that are added.
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
                raise NotAlikeError(f"{op.source}: {op.target} may look up places behind the end")

    @staticmethod
    def _types(op: Op, other: Op) -> Iterator[tuple[str, str]]:
        return zip(op.operands, other.operands, strict=False)

    def _meet(self, name: str, other: str) -> None:
        """Know what a value is that no op makes: a parameter, a buffer, a constant."""
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
            raise NotAlikeError(f"{name} has another number of dims")
        return [dim for dim, (a, b) in enumerate(zip(shape, shorter, strict=True)) if a != b]


def _constant(long: Tensor, short: Tensor) -> Prefix | None:
    """How a longer constant begins, and what it holds beyond along each longer dim."""
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
