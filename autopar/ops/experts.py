"""Mixtures of experts: the part of the graph between routing and the results of every token's experts, as one op.

Rows are the pairs of a token and one of its experts.  The op sorts them by expert, gathers the tensors that they read,
runs its *body* on the sorted rows, and puts the results back in the order of the rows.  The body is the model's own
graph: each op in it works row by row, and its products have one matrix per expert.  As sorting happens inside, every
device can sort rows of its own: those of its tokens (``tokens``), those of all tokens that go to its experts
(``experts``), or those that all devices send to its experts (``dispatch``).  Devices may also split each expert
(``ffn``): each has a slice of its inner width, and its results are terms of a sum.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, cast

from autopar.ops.family import Buffers, Kernel, OpFamily, Types
from autopar.ops.work import Work, sum_bytes
from autopar.program import Arg, KernelCollective, Op, Ref, TensorType, itemsize_bytes

__all__ = ["ENDS", "EXPERTS", "FAMILIES", "IDS", "PRODUCT", "TRANSPOSE", "Body", "InnerWidth", "in_double", "read_body"]

EXPERTS = "autopar_traced.experts.default"
"""``(ids, reads, experts, others, members, num_experts, body)``, with R rows.

ids: [R], the expert of each row.  reads: list of [R, ...], or [R / k, ...] for tensors that the k rows of a token
share.  experts: list of [num_experts, ...].  others: tensors that all rows read.  members: [num_experts], the numbers
of all experts, or on a device with some of them (`experts` option) of those.  The result is [R, ...], in the order of
`ids`; or [R / k, ...], the sums of the k rows of each token, where the body says so (`Body.summed`).
"""
PRODUCT = "autopar_traced.grouped_product.default"
"""``(rows [R, k], matrices [experts, k, n], ends [experts]) -> [R, n]``, for rows that are sorted by expert."""
TRANSPOSE = "aten.transpose.int"
IDS, ENDS = "ids", "ends"
"""Names in a body: the expert of each sorted row, and where the rows of each expert end."""


@dataclass(frozen=True)
class InnerWidth:
    """How the inner width of every expert is split, so that the results of slices are terms of the whole result.

    Args:
        size: the whole width.
        cuts: (index in the op's list of experts, dim that is split, parts of it), as in ``S(dim/parts)``.
        terms: indices of tensors that are added to results, which only one device does.
        narrow: the body's values that have a slice of the width.
        moved_bytes: the part of the body's `moved_bytes` that belongs to them.
        kept_bytes: bytes that autograd saves of them for each row, other than operands and results.
    """

    size: int
    cuts: tuple[tuple[int, int, int], ...]
    terms: tuple[int, ...]
    narrow: tuple[str, ...]
    moved_bytes: float
    kept_bytes: float = 0.0


@dataclass(frozen=True)
class Body:
    """The ops that run on sorted rows.

    Args:
        ops: in order.  They read `IDS`, `ENDS`, and the entries of the op's lists as ``reads0``, ``experts0`` ...
        result: the value that is put back in the order of the rows.
        types: of every value with a dim of rows, without that dim.
        moved_bytes: bytes that its ops other than products read and write for each row.
        busiest: (number of devices that share the experts, rows of the busiest device over the mean), as expected by
            prices and memory; 1 for numbers that are not listed.  See `autopar.planning.imbalance`.
        kept_bytes: bytes that autograd saves for each row, other than operands and results.
        width: how devices can split each expert; None if they can't.
        summed: so many rows, those of a token, are added up at the end; 1: each row is a result.
        groups: (number of groups of neighboring experts, on how many of them a token has experts at most).
    """

    ops: tuple[Op, ...]
    result: str
    types: Mapping[str, TensorType]
    moved_bytes: float
    busiest: tuple[tuple[int, float], ...] = ()
    kept_bytes: float = 0.0
    width: InnerWidth | None = None
    summed: int = 1
    groups: tuple[int, int] = (1, 1)

    def text(self) -> str:
        """The body as text, which is an argument of the op."""
        return json.dumps(
            {
                "ops": [[op.target, _plain(op.args), {k: _plain(v) for k, v in op.kwargs}, op.results]
                        for op in self.ops],
                "result": self.result,
                "types": {name: [kind.shape, kind.dtype] for name, kind in self.types.items()},
                "moved_bytes": self.moved_bytes,
                "busiest": self.busiest,
                "kept_bytes": self.kept_bytes,
                "width": self.width and asdict(self.width),
                "summed": self.summed,
                "groups": self.groups,
            }
        )  # fmt: skip

    def products(self) -> Iterator[int]:
        """For each product, the index of its matrix (possibly transposed) in the list of experts."""
        transposed = {op.results[0]: op.operands[0] for op in self.ops if op.target == TRANSPOSE}
        for op in self.ops:
            if op.target == PRODUCT:
                matrix = op.operands[1]
                yield int(transposed.get(matrix, matrix).removeprefix("experts"))


def _plain(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return {"value": arg.name}
    return [_plain(part) for part in arg] if isinstance(arg, tuple) else arg


def _arg(plain: Any) -> Arg:
    if isinstance(plain, dict):
        return Ref(cast("dict[str, str]", plain)["value"])
    return tuple(map(_arg, cast("list[Any]", plain))) if isinstance(plain, list) else plain


@lru_cache(maxsize=256)
def read_body(text: str) -> Body:
    """The inverse of `Body.text`."""
    plain = json.loads(text)
    return Body(
        tuple(
            Op(
                results[0],
                target,
                tuple(map(_arg, args)),
                tuple((k, _arg(v)) for k, v in kwargs.items()),
                tuple(results),
            )
            for target, args, kwargs, results in plain["ops"]
        ),
        plain["result"],
        {name: TensorType(tuple(shape), dtype) for name, (shape, dtype) in plain["types"].items()},
        plain["moved_bytes"],
        tuple((devices, times) for devices, times in plain["busiest"]),
        plain["kept_bytes"],
        plain["width"] and _width(**plain["width"]),
        plain["summed"],
        (plain["groups"][0], plain["groups"][1]),
    )


def _width(cuts: Sequence[Sequence[int]], terms: Sequence[int], narrow: Sequence[str], **numbers: Any) -> InnerWidth:
    triples = tuple((index, dim, parts) for index, dim, parts in cuts)
    return InnerWidth(cuts=triples, terms=tuple(terms), narrow=tuple(narrow), **numbers)


def in_double(text: str) -> str:
    """Change the narrower dtypes of a body (as text) to float64; other texts are returned unchanged."""
    if not text.startswith('{"ops"'):
        return text
    for narrow in ("float32", "bfloat16", "float16"):
        text = text.replace(f'"torch.{narrow}"', '"torch.float64"').replace(f'], "{narrow}"]', '], "float64"]')
    return text


# ---------------------------------------------------------------- how it splits


@dataclass(frozen=True)
class _ExpertsCall:
    """The lists of one call with their types."""

    ids: TensorType
    reads: Types
    experts: Types
    others: Types
    members: TensorType
    num_experts: int
    body: Body

    @classmethod
    def of(cls, op: Op, operands: Types) -> _ExpertsCall:
        rest = iter(operands[1:-1])
        reads, experts, others = (
            tuple(next(rest) for _ in cast("tuple[Arg, ...]", op.args[position])) for position in (1, 2, 3)
        )
        num_experts, text = cast("tuple[int, str]", op.args[5:7])
        return cls(operands[0], reads, experts, others, operands[-1], num_experts, read_body(text))

    @property
    def skew(self) -> float:
        """The rows of the busiest device, relative to the mean over the devices that share the experts."""
        return dict(self.body.busiest).get(self.num_experts // self.experts[0].shape[0], 1.0)

    @property
    def growth(self) -> float:
        """The length of tensors that are sent and received, relative to balanced experts: the longest slice counts.

        It is 1 where each device processes all rows (``experts``), or only its own: nothing is sent then.
        """
        return self.skew if self.experts[0].shape[0] < self.members.shape[0] else 1.0

    @property
    def num_tokens(self) -> int:
        """Rows of the result."""
        return self.ids.shape[0] // self.body.summed

    @property
    def copies(self) -> tuple[tuple[int, float], ...]:
        """(devices, on how many of them a token has experts), as expected for the busiest, for what is sent.

        A token is sent once to each, however many of its experts are there.
        """
        busiest, numbers = dict(self.body.busiest), range(1, self.num_experts + 1)
        return tuple(
            (
                n,
                min(
                    float(n),
                    busiest.get(n, 1.0) * _num_reached(self.num_experts, n, self.body.summed, self.body.groups),
                ),
            )
            for n in numbers
            if self.num_experts % n == 0
        )

    @property
    def sent_copies(self) -> float:
        """The same of the devices that share the experts; 0 where nothing is sent."""
        num_local = self.experts[0].shape[0]
        return dict(self.copies)[self.num_experts // num_local] if num_local < self.members.shape[0] else 0.0

    @property
    def num_slices(self) -> float:
        """The number of slices into which the inner width is split; a device has one of them."""
        width = self.body.width
        if width is None:
            return 1.0
        index, dim, parts = width.cuts[0]
        return width.size * parts / self.experts[index].shape[dim]

    def on_a_slice(self, whole: float, narrow: float) -> float:
        """Bytes with a slice of the inner width, of `whole` bytes of which `narrow` are proportional to the width."""
        return whole - narrow * (1.0 - 1.0 / self.num_slices)

    @property
    def num_rows(self) -> float:
        """The rows that the busiest device computes: those of its input that go to its experts."""
        return self.ids.shape[0] * self.members.shape[0] / self.num_experts * self.skew


@lru_cache(maxsize=1024)
def _num_reached(num_experts: int, num_devices: int, num_chosen: int, groups: tuple[int, int]) -> float:
    """On how many devices a token has experts on average, none twice.

    Any groups are as likely as any others.  Each group that is chosen has one of the token's experts, as routers choose
    groups by their best experts; the others are any of those groups, as likely as any others.
    """
    num_groups, most = groups[0], min(groups[1], num_chosen)
    size, per_device = num_experts // num_groups, num_experts // num_devices
    ends = range(size, num_experts + 1, size)
    devices = Counter(
        tuple(sorted(max(0, min(first + per_device, end) - max(first, end - size)) for end in ends))
        for first in range(0, num_experts, per_device)
    )
    return sum(count * (1.0 - _missed(own, size, most, num_chosen)) for own, count in devices.items())


def _missed(own: Sequence[int], size: int, most: int, num_chosen: int) -> float:
    """The probability that a token has none of a device's experts.

    Args:
        own: how many experts of each group the device has.
        size: experts of a group.
        most: groups that a token chooses.
        num_chosen: experts that it chooses.
    """
    # By the number of groups, and of the device's experts in them: the sum, over all choices of so many groups, of the
    # probability that the device has the first expert of none.
    first_missed = {(0, 0): 1.0}
    for share in own:
        for (groups, experts), missed in list(first_missed.items()):
            more = (groups + 1, experts + share)
            first_missed[more] = first_missed.get(more, 0.0) + missed * (1.0 - share / size)
    others, num_others = most * (size - 1), min(num_chosen, most * size) - most
    total = sum(
        missed * math.comb(max(0, others - experts), num_others)
        for (groups, experts), missed in first_missed.items()
        if groups == most
    )
    return total / (math.comb(len(own), most) * math.comb(others, num_others))


def _rule(op: Op, operand_types: Types, result_types: Types) -> tuple[str, ...]:
    """Splits by tokens; by experts, with all rows on each device; by experts and tokens, with rows that are sent; and
    by the inner width.
    """
    call = _ExpertsCall.of(op, operand_types)

    def line(rows: str, experts: str, members: str, remarks: str) -> str:
        lists = (_dims(call.reads, rows), experts, _dims(call.others, "_"))
        result = _dims(result_types, rows)[1:-1]
        return f"{rows}, {', '.join(lists)}, {members} -> {result}{remarks}"

    lines = (
        line("tokens", _dims(call.experts, "_"), "_", ""),
        line("_", _dims(call.experts, "experts"), "experts", " | sum experts, by experts masked_experts"),
        line("dispatch", _dims(call.experts, "dispatch"), "_", " | by dispatch dispatched_experts"),
    )
    width = call.body.width
    return lines if width is None else (*lines, line("_", _width_dims(call.experts, width), "_", " | sum ffn"))


def _width_dims(experts: Types, width: InnerWidth) -> str:
    lists = [["_"] * len(kind.shape) for kind in experts]
    for index, dim, parts in width.cuts:
        lists[index][dim] = f"ffn/{parts}"
    signs = ("+" if index in width.terms else "" for index in range(len(experts)))
    return "[" + ", ".join(sign + " ".join(dims) for sign, dims in zip(signs, lists, strict=True)) + "]"


def _dims(kinds: Types, first: str) -> str:
    return "[" + ", ".join(" ".join([first, *"_" * (len(kind.shape) - 1)]) for kind in kinds) + "]"


# ---------------------------------------------------------------- its work, memory and collectives


def _work(op: Op, operands: Types, results: Types) -> Work:
    """The FLOPs of its products, and the bytes of its other ops and of the gathers before and after them."""
    call = _ExpertsCall.of(op, operands)
    matrices = [call.experts[index] for index in call.body.products()]
    flops = sum(2.0 * call.num_rows * kind.shape[1] * kind.shape[2] for kind in matrices)
    read_row, made_row = (sum(math.prod(k.shape[1:]) * itemsize_bytes(k.dtype) for k in kinds)
                          for kinds in (call.reads, results))  # fmt: skip
    width = call.body.width
    in_products = {
        is_narrow: sum(
            call.body.types[name].num_bytes
            for inner in call.body.ops
            for name in (inner.operands[0], *inner.results)
            if inner.target == PRODUCT and (is_narrow is False or (width is not None and name in width.narrow))
        )
        for is_narrow in (False, True)
    }
    read = call.num_rows * call.on_a_slice(in_products[False], in_products[True])
    weights = sum_bytes(tuple(matrices))
    moved = call.on_a_slice(call.body.moved_bytes, width.moved_bytes if width else 0.0)
    others = call.growth * call.ids.shape[0] * (2 * (read_row + made_row) + moved)
    around = _around(call, read_row, made_row)
    return Work(
        "matmul" if flops else "bytes",
        (call.experts or results)[0].dtype,
        flops=flops,
        backward_flops=2 * flops,
        read_bytes=weights + read,
        write_bytes=others + around,
        backward_read_bytes=2 * (weights + read),
        backward_write_bytes=weights + 2 * others + around,
        num_backward_kernels=2 * len(matrices) + len(call.body.ops),
        alignment=min((_alignment(kind.shape[1:]) for kind in matrices), default=64),
    )


def _around(call: _ExpertsCall, read_row: float, made_row: float) -> float:
    """Bytes read and written to add up the rows of each token, and to fill and to empty what is sent.

    Where tokens are sent, each copy is read and written once more, and so is its sum on the way back, whereas rows are
    added up from where they are, instead of being put back in their order first.
    """
    rows, tokens, sent = call.ids.shape[0], call.num_tokens, call.sent_copies * call.num_tokens
    if not sent:
        return made_row * (rows + tokens) if call.body.summed > 1 else 0.0
    return 2 * sent * read_row + (2 * sent + tokens - call.growth * rows) * made_row


def _alignment(sizes: Sequence[int]) -> int:
    return next((step for step in (64, 8) if all(size % step == 0 for size in sizes)), 1)


def _buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Forward: rows that are sent and received.  Backward: gradients of inner values.  Kept: the bytes that autograd
    saves in addition because of imbalance, less those that slices of the width save.
    """
    call = _ExpertsCall.of(op, operands)
    made = sum_bytes(results[:1])
    rows = 2.0 * call.growth * call.body.summed * made
    narrow = call.body.width.kept_bytes if call.body.width else 0.0
    kept = call.ids.shape[0] * (
        (call.growth - 1.0) * call.body.kept_bytes - call.growth * (narrow - call.on_a_slice(narrow, narrow))
    )
    sent = 2.0 * call.sent_copies * made
    is_summed = call.body.summed > 1
    return Buffers(forward=max(sent, rows if is_summed else 0.0), backward=max(sent, rows), kept=kept)


def _dispatch_collectives(op: Op, operands: Types) -> tuple[KernelCollective, ...]:
    """On each axis the maximum of all devices' numbers of rows first; then ids and the tensors that rows read, and
    their results back: a token once for each place on that axis, and those further out, that it has experts at.
    """
    call = _ExpertsCall.of(op, operands)
    copies, rows = call.copies, call.ids.shape[0]
    collectives = [
        KernelCollective("all_reduce", "forward", 0, (0,), "int64"),
        KernelCollective("all_to_all", "forward", 0, dtype="int64", reached=copies, pause=1),
    ]
    result = call.body.types[call.body.result].dtype
    for phase in ("forward", "backward"):
        collectives += [
            KernelCollective(
                "all_to_all",
                phase,
                1 + index,
                dtype=kind.dtype,
                count=1 if kind.shape[0] == call.num_tokens else rows // kind.shape[0],
                reached=copies,
                is_of_gradient=phase == "backward",
                pause=1,
            )
            for index, kind in enumerate(call.reads)
            if phase == "forward" or kind.is_floating
        ]
        collectives.append(KernelCollective("all_to_all", phase, len(operands), dtype=result, reached=copies, pause=2))
    return tuple(collectives)


FAMILIES = (
    OpFamily(
        {EXPERTS: _rule},
        kernels={
            "masked_experts": Kernel(),
            "dispatched_experts": Kernel(_dispatch_collectives, parts="parts_of_dispatch"),
        },
        is_cheap=False,
        runs_apart=True,  # the host determines how long slices of what is sent are
        count_work=_work,
        buffers=_buffers,
    ),
)
