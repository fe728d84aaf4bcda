"""The record of a family of ops: everything that autopar knows about them.

A record is data: factor rules as text, flags, and functions of one call.  Fields that it leaves out are derived from
the rule, or have the most common value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autopar.ops.declaration import TensorPattern, parse
from autopar.ops.memory_order import PlaceResult, regrouped, same
from autopar.ops.work import Work, default_work
from autopar.program import Arg, KernelCollective, Op, Option, TensorType

__all__ = [
    "Buffers",
    "Kernel",
    "OpCall",
    "OpFamily",
    "Rule",
    "Types",
    "argument",
    "aten",
    "nothing_between",
    "packet_name",
]

Types = tuple[TensorType, ...]

Rule = str | Callable[[Op, Types, Types], str | tuple[str, ...] | None]
"""A declaration (see `autopar.ops.declaration`), or a function that writes it for one call.

The function gets the op, its operands' and its results' types.  It returns None for a call that it can't describe, and
several declarations if the op splits in ways that give one dim different factors.
"""

Saves = tuple[tuple[int, ...], int]
"""What autograd saves for backward: indices into operands, then results; and the number of other bytes."""


@dataclass(frozen=True)
class Kernel:
    """A special kernel: it runs an op on slices of a factor on which the op itself can't be split.

    Args:
        collectives: returns the collectives of one call, given the op and its operands' types.
        cuts_vocabulary: the factor is a vocabulary, or the classes of a classifier.
        uses_statistics: the op computes statistics of the whole batch; it could use statistics of a part of the batch
            instead where a user allows that.
        unit: the size of a slice is a multiple of it.
        least: returns the minimum size of a slice in a call, given the op and its operands' types.
        traveling: the operands whose slices travel round a ring: a device computes with one slice after another while
            it receives the next one (by those of its collectives that are `is_ring`).
        is_on_one_axis: it runs on one axis only.
        is_in_space: it splits images in space; where it does not run, its op may be cheap to run again.
        parts: the name of a generator function that runs it in three parts; in the pauses between these other ops run
            while those of its collectives that belong to that pause are under way.  "": it runs at once.
    """

    collectives: Callable[[Op, Types], tuple[KernelCollective, ...]] = lambda op, operands: ()
    cuts_vocabulary: bool = False
    uses_statistics: bool = False
    unit: int = 1
    least: Callable[[Op, Types], int] = lambda op, operands: 1
    traveling: tuple[int, ...] = ()
    is_on_one_axis: bool = False
    is_in_space: bool = False
    parts: str = ""


@dataclass(frozen=True)
class Buffers:
    """Bytes that a call needs on one device in addition to its operands, its results and what autograd saves of them.

    Args:
        forward: needed while it runs.
        backward: needed while its backward runs.
        kept: kept from forward to backward, in place of the first operand.
    """

    forward: float = 0.0
    backward: float = 0.0
    kept: float = 0.0


@dataclass(frozen=True)
class RowProduct:
    """Which operands of a product are its rows and its matrix: each row of the result depends on one of the rows.

    Args:
        rows: index of the operand ``[..., k]`` of a result ``[..., n]``.
        matrix: index of the matrix ``[k, n]``.
        added: index of the operand that is added to every row, -1 for none.
        transposed: the matrix is ``[n, k]``.
    """

    rows: int
    matrix: int
    added: int = -1
    transposed: bool = False


_NO_BUFFERS = Buffers()


class OpCall(NamedTuple):
    """An op with local operands and results that is called `times` times, forward and backward."""

    op: Op
    operands: Types
    results: Types
    times: int


def _no_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    return _NO_BUFFERS


def nothing_between(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """`OpFamily.buffers` of ops that run as others, but with no tensors between: trace needn't look for them."""
    return _NO_BUFFERS


@dataclass(frozen=True)
class OpFamily:
    """Everything that autopar knows about a family of ops.

    Args:
        rules: qualified name (``"aten.linear.default"``) -> how the op splits; None: without a rule, so that trace
            tries which splits are legal.  An overload without a record gets that of another overload of its packet.
        size_args: positions of arguments that hold the (first) result's global shape; they become local.
        is_view: the result shares memory with the first operand.
        is_random: whether the op draws random numbers, always or in a given call.
        is_uninitialized: the content of the result is undefined.
        is_cheap: selective recomputation runs it again in backward instead of saving its result.  False for ops that
            compute much per byte, and for ops of other libraries, of which nothing is known.
        kernels: name of a function in ``lower.kernels`` -> the special kernel that the rules mention.
        function: name of a function in ``lower.kernels`` that computes the whole op, where none of torch's does.
        takes_generator: the function in ``lower.kernels`` takes the random generator as an argument.
        count_work: counts FLOPs and bytes; by default every operand and result once, or nothing for a view.
        calls: for an op that runs other ops forward and backward, their calls; its seconds are theirs plus those of its
            own backward.
        calls_again: these calls run once without their backward in forward, and again with it in the op's backward.
        saves: what autograd saves; by default, and where it returns None, trace observes it.
        runs_plain: where no fast kernel supports the call, it runs as plain products, and trace observes what they
            save.
        buffers: bytes of temporaries, given a call, its local operands and results, which operands need gradients, and
            whether a special kernel runs it.
        buffers_on_gpus: what a call needs besides on GPUs, where no special kernel runs it, given its local operands
            and which of them need gradients.
        buffers_on_cpus: the same on CPUs.
        has_formula: torch computes its backward by several ops, whose temporaries trace counts, as it does of
            ops without a record.
        num_differentiable: how many of the results, counted from the first, can have a gradient; None for all.
        gradient: ``"own"``: operands have gradients of their own; ``"passed"``: operands of the result's size get the
            gradient of the result itself; ``"parts"``: operands get views of it; ``"expanded"``: they get it expanded.
        takes_expanded: its backward reads an expanded gradient as it is, without a copy; elementwise ops always do.
        place: the memory format of the result; see `result_order`.
        may_copy: a view that becomes a copy where the operand's order in memory doesn't allow one.
        host_operands: positions of operands that it reads on the host, wherever they are.
        num_choices: for operands that are indices, the number of entries that they index, given the first operand's
            shape.
        row_dim: the dim of the first operand along which it works row by row.
        fuses: a compiler fuses it with neighboring elementwise ops into one kernel; elementwise ops always fuse.
        runs_apart: a compiler leaves it out of what it compiles.
        is_attention: results are [..., heads, queries, head size].
        row_products: qualified name -> the operands of a product that works row by row, if its matrix has two dims.
        count_arg: position of the argument that becomes the number of microbatches where each of them uses its own
            terms instead of the whole batch's sum; -1: there is none.
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
    saves: Callable[[Op, Types, Types], Saves | None] | None = None
    runs_plain: bool = False
    buffers: Callable[[Op, Types, Types, Sequence[bool], bool], Buffers] = _no_buffers
    buffers_on_gpus: Callable[[Op, Types, Sequence[bool]], Buffers] = lambda op, operands, trains: _NO_BUFFERS
    buffers_on_cpus: Callable[[Op, Types, Sequence[bool]], Buffers] = lambda op, operands, trains: _NO_BUFFERS
    has_formula: bool = False
    num_differentiable: int | None = None
    gradient: str = "own"
    takes_expanded: bool = False
    place: PlaceResult | None = None
    may_copy: bool = False
    host_operands: tuple[int, ...] = ()
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
    def counts_buffers(self) -> bool:
        """Whether `buffers` says what the ops of the family allocate, so that trace needn't observe it."""
        return self.buffers is not _no_buffers

    @property
    def may_run_others(self) -> bool:
        """Whether torch may compute a backward of these ops by others, as far as records say."""
        return self.has_formula or not self.rules

    @property
    def keeps_order(self) -> bool:
        """Whether views of this family keep the order of their operand's elements."""
        return self.place in (regrouped, same)

    def communicates(self, option: Option) -> bool:
        """Whether a special kernel runs the option with collectives, other than for images that are split in space."""
        kernel = self.kernels.get(option.kernel)
        return bool(option.collectives) and not (kernel is not None and kernel.is_in_space)

    def draws(self, op: Op) -> bool:
        """Whether this call of an op of the family draws random numbers."""
        return self.is_random(op) if callable(self.is_random) else self.is_random


def _is_pointwise(rule: str) -> bool:
    declaration = parse(rule)
    patterns = [argument.pattern for argument in declaration.arguments] + list(declaration.results)
    return all(isinstance(pattern, TensorPattern) and pattern.dims == ("*",) for pattern in patterns)


def aten(table: Mapping[str, Rule | None]) -> dict[str, Rule | None]:
    """Rules of ATen's ops by qualified name.  A key names one or more, ``"name"`` or ``"name.overload"``, with spaces
    in between.
    """
    return {
        f"aten.{name if '.' in name else name + '.default'}": rule
        for names, rule in table.items()
        for name in names.split()
    }


def argument(op: Op, index: int, keyword: str, default: Arg = None) -> Arg:
    """The argument at position `index` of the schema or with that `keyword`; `default` if it was left out."""
    if index < len(op.args):
        return op.args[index]
    return dict(op.kwargs).get(keyword, default)


def packet_name(target: str) -> str:
    """The name of an op without its overload: ``aten.add`` for ``aten.add.Tensor``."""
    return target.rsplit(".", 1)[0] if target.count(".") > 1 else target
