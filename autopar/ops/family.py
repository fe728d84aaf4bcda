"""The record of a family of ops: all that autopar knows of them, wherever it is needed.

A record is data: factor rules as text, flags, and functions of one call.  What it leaves out is derived from the rule,
or is the most common case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autopar.ops.declaration import TensorPattern, parse
from autopar.ops.memory_order import PlaceResult, regrouped, same
from autopar.ops.work import Work, default_work
from autopar.program import Arg, KernelCollective, Op, TensorType

__all__ = ["Buffers", "Kernel", "OpCall", "OpFamily", "Rule", "Types", "argument", "aten", "packet_name"]

Types = tuple[TensorType, ...]

Rule = str | Callable[[Op, Types, Types], str | tuple[str, ...] | None]
"""A declaration (see `autopar.ops.declaration`), or a function that writes it for one call.

The function gets the op, its operands' and its results' types, and returns None for a call that it can't describe;
several declarations if the op splits in ways that give one dim different factors.
"""

Saves = tuple[tuple[int, ...], int]
"""What autograd keeps until backward: indices into operands, then results; further bytes."""


@dataclass(frozen=True)
class Kernel:
    """A special kernel: it runs an op on slices of a factor that plain local computation can't be split on.

    Args:
        collectives: what it communicates in one call, by the op and its operands' types.
        cuts_vocabulary: the factor is a vocabulary, or the classes of a classifier.
        uses_statistics: the op computes statistics of the whole batch, and could take a part of the batch for all of
            it where a user allows that.
        unit: the size of a slice divides by it.
        least: the size of a slice of a call is at least this.
        travelling: the operands whose slices travel round a ring: a device computes with one after the other, while the
            next one is under way (those of its collectives that are `is_ring`).
        is_on_one_axis: it runs on one axis only.
    """

    collectives: Callable[[Op, Types], tuple[KernelCollective, ...]] = lambda op, operands: ()
    cuts_vocabulary: bool = False
    uses_statistics: bool = False
    unit: int = 1
    least: Callable[[Op], int] = lambda op: 1
    travelling: tuple[int, ...] = ()
    is_on_one_axis: bool = False


@dataclass(frozen=True)
class Buffers:
    """Bytes that a call takes on one device in addition to its operands, its results and what autograd saves of them.

    Args:
        forward: while it runs.
        backward: while its backward runs.
        kept: from forward to backward, in place of the first operand.
    """

    forward: float = 0.0
    backward: float = 0.0
    kept: float = 0.0


@dataclass(frozen=True)
class RowProduct:
    """Which operands of a product are its rows and its matrix: each row of the result comes from one of the rows.

    Args:
        rows: index of the operand ``[..., k]`` of a result ``[..., n]``.
        matrix: of the matrix ``[k, n]``.
        added: of what is added to every row, -1 for none.
        transposed: the matrix is ``[n, k]``.
    """

    rows: int
    matrix: int
    added: int = -1
    transposed: bool = False


_NO_BUFFERS = Buffers()


class OpCall(NamedTuple):
    """A call of an op, with its local operands and results, that is made so many times, forward and backward."""

    op: Op
    operands: Types
    results: Types
    times: int


def _no_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    return _NO_BUFFERS


@dataclass(frozen=True)
class OpFamily:
    """What a family of ops is.

    Args:
        rules: by qualified name (``"aten.linear.default"``) how the op splits; None: no rule, trace tries what is
            legal.  An overload that no record names is taken for what another one of its packet is.
        size_args: positions of arguments that hold the (first) result's global shape; they become local.
        is_view: the result shares memory with the first operand.
        is_random: the op draws random numbers, or whether it does in this call.
        is_uninitialized: what is in the result is undefined.
        is_cheap: selective recomputation runs it again in backward instead of keeping its result.  Not so: what
            computes much per byte, and ops of other libraries, of which nothing is known.
        kernels: by name (of a function in ``lower.kernels``), the special kernels that the rules mention.
        function: name of a function in ``lower.kernels`` that computes the whole op, where none of torch's does.
        takes_generator: the function in ``lower.kernels`` takes the generator to draw from.
        count_work: what it computes and moves; by default every operand and result once, or nothing for a view.
        calls: of an op that runs others forward, and backward with them, which: its seconds are theirs, and its own
            backward's.
        calls_again: these run forward once without their backward, and in the op's backward once more with it.
        saves: what autograd keeps; by default what it is seen to keep.
        runs_plain: where no fast kernel takes the call, it runs as plain products, which keep what they are seen to.
        buffers: of a call, its local operands and results, which operands take gradients, and whether a special
            kernel runs it.
        num_differentiable: how many of the results, from the first on, can have a gradient; None for all.
        gradient: ``"own"``, ``"passed"``: operands of the result's size get the very gradient of the result, or
            ``"parts"``: operands get views of it.
        place: the memory format of the result; see `result_order`.
        may_copy: a view that becomes a copy where the operand's order in memory doesn't allow one.
        num_choices: of operands that index something: into how many, by the first operand's shape.
        row_dim: the dim of the first operand along which it works row by row.
        fuses: a compiler makes one kernel of it and of elementwise ops beside it; those always are.
        runs_apart: a compiler leaves it out of what it compiles.
        is_attention: results are [..., heads, queries, head size].
        row_products: by qualified name, of products that work row by row, if their matrix has two dims.
        count_arg: position of the argument that becomes the number of microbatches where each of them takes its own
            terms for the whole batch's sum; -1: there is none.
    """

    rules: Mapping[str, Rule | None] = field(hash=False)
    size_args: tuple[int, ...] = ()
    is_view: bool = False
    is_random: bool | Callable[[Op], bool] = False
    is_uninitialized: bool = False
    is_cheap: bool = True
    kernels: Mapping[str, Kernel] = field(default_factory=dict[str, Kernel], hash=False)
    function: str = ""
    takes_generator: bool = False
    count_work: Callable[[Op, Types, Types], Work] = default_work
    calls: Callable[[Op, Types, Types], Iterable[OpCall]] | None = None
    calls_again: bool = False
    saves: Callable[[Op, Types, Types], Saves] | None = None
    runs_plain: bool = False
    buffers: Callable[[Op, Types, Types, Sequence[bool], bool], Buffers] = _no_buffers
    num_differentiable: int | None = None
    gradient: str = "own"
    place: PlaceResult | None = None
    may_copy: bool = False
    num_choices: Callable[[Op, tuple[int, ...]], int] | None = None
    row_dim: Callable[[Op], int] = lambda op: -1
    fuses: bool = False
    runs_apart: bool = False
    is_attention: bool = False
    row_products: Mapping[str, RowProduct] = field(default_factory=dict[str, RowProduct], hash=False)
    count_arg: int = -1

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether every rule says that the op works element by element."""
        rules = self.rules.values()
        return bool(rules) and all(isinstance(rule, str) and _is_pointwise(rule) for rule in rules)

    @property
    def keeps_order(self) -> bool:
        """Whether a view of the family has the elements of its operand in the same order."""
        return self.place in (regrouped, same)

    def draws(self, op: Op) -> bool:
        """Whether this call of one of the family draws random numbers."""
        return self.is_random(op) if callable(self.is_random) else self.is_random


def _is_pointwise(rule: str) -> bool:
    declaration = parse(rule)
    patterns = [argument.pattern for argument in declaration.arguments] + list(declaration.results)
    return all(isinstance(pattern, TensorPattern) and pattern.dims == ("*",) for pattern in patterns)


def aten(table: Mapping[str, Rule | None]) -> dict[str, Rule | None]:
    """Rules of ATen's ops.  A key names one or more, ``"name"`` or ``"name.overload"``, blank-separated."""
    return {
        f"aten.{name if '.' in name else name + '.default'}": rule
        for names, rule in table.items()
        for name in names.split()
    }


def argument(op: Op, index: int, keyword: str, default: Arg = None) -> Arg:
    """The argument at position `index` of the schema, wherever it was given, or `default` if it was left out."""
    if index < len(op.args):
        return op.args[index]
    return dict(op.kwargs).get(keyword, default)


def packet_name(target: str) -> str:
    """An op's name without its overload: ``aten.add`` for ``aten.add.Tensor``."""
    return target.rsplit(".", 1)[0] if target.count(".") > 1 else target
