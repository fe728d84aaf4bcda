"""Whether one op computes what a region of a graph does: both run in float64, on skewed random numbers.

Results and gradients must agree.  So is found, too, whether the op can be cut in the inner width of experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.ops.experts import EXPERTS, Body, InnerWidth
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.annotations.saves import SavesMeter
from autopar.trace.evaluation import run_op
from autopar.trace.experts.expert_widths import NUM_SLICES, inner_widths, run_in_slices
from autopar.trace.experts.grouped_products import grouped_product, run_experts
from autopar.trace.experts.row_order import divisor_to, random_ids, with_sizes
from autopar.trace.graph import Graph

__all__ = ["LISTS", "PRODUCTS", "Region", "proven_body"]

LISTS = ("reads", "experts", "others")
PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_MAX_ELEMENTS = 1 << 24  # of one tensor, where both forms are compared: larger calls are shrunk before
_SMALL = 64  # sizes up to this are not shrunk: they may be numbers of experts or of heads
_FEW_ROWS = 1 << 12  # to look at: several for each of hundreds of experts, and of their order nothing depends on more
_LEAST = 8  # what a size is shrunk to at least
_TOLERANCE = 1e-10  # relative, in float64; the order of sums differs

# By all that the comparison depends on, as layers of one model are alike: None, or the body that the op may have.
_proven: dict[object, Body | None] = {}


@dataclass(frozen=True)
class Region:
    """A part of a graph that one op may take the place of.

    Args:
        ids: the sorted value: the expert of each row.
        lists: what rows read, by the list of the op that it is in, in order.
        ops: of the model, in order, `end` the last.
        body: in the op's own names.
        end: puts rows back in their order; its result is the region's.
        num_experts: how many.
        intermediates: the largest tensors between its ops, where they are larger than what it reads and makes.
        onto: what `end` adds up rows onto, which the op doesn't read; empty if these are zeros.
    """

    ids: str
    lists: Mapping[str, tuple[str, ...]]
    ops: tuple[Op, ...]
    body: Body
    end: Op
    num_experts: int
    intermediates: tuple[TensorType, ...] = ()
    onto: str = ""

    def write(self, members: str, made: str) -> list[Op]:
        """The op that makes `made`, before it the numbers of all experts, and behind it the sum with `onto`."""
        lists = tuple(tuple(map(Ref, self.lists[name])) for name in LISTS)
        all_experts = Op(
            members, "aten.arange.default", (self.num_experts,), (("dtype", "torch.int64"), ("device", "cpu")),
            (members,), source=self.end.source, module=self.end.module,
        )  # fmt: skip
        args = (Ref(self.ids), *lists, Ref(members), self.num_experts, self.body.text())
        experts = replace(self.end, target=EXPERTS, args=args, kwargs=())
        if not self.onto:
            return [all_experts, experts]
        total = replace(self.end, target="aten.add.Tensor", args=(Ref(self.onto), Ref(made)), kwargs=())
        return [all_experts, replace(experts, name=made, results=(made,)), total]


def proven_body(graph: Graph, region: Region) -> Body | None:
    """The body of an op that computes what the region's ops do, forward and backward, in float64; None if none does."""
    numbered: dict[str, str] = {region.ids: "ids"}
    for op in region.ops:
        for name in (*op.operands, *op.results):
            numbered.setdefault(name, f"n{len(numbered)}")
    key = (
        tuple((op.target, repr(op.reading(numbered).args), repr(op.reading(numbered).kwargs)) for op in region.ops),
        region.body.text(), tuple(graph.types.get(name) for name in numbered),
    )  # fmt: skip
    if key not in _proven:
        try:
            _proven[key] = _compare(graph, region)
        except (RuntimeError, IndexError, ValueError, TypeError):
            _proven[key] = None
    return _proven[key]


def _compare(graph: Graph, region: Region) -> Body | None:
    given = [name for name in LISTS for name in region.lists[name]]
    kinds = {name: graph.types[name] for name in (region.ids, *given)}
    for op in region.ops:  # constants and ranges, which sizes among them must fit to
        kinds |= {name: graph.types[name] for name in op.operands if graph.roles.get(name) == "constant"}
    small = _shrinking(kinds, region)
    if small is None:
        return None
    shapes = {name: tuple(small.get(size, size) for size in kinds[name].shape) for name in given}
    ids = random_ids(small.get(kinds[region.ids].shape[0], kinds[region.ids].shape[0]), region.num_experts, seed=1)
    generator = torch.Generator().manual_seed(2)
    drawn = {
        name: torch.randn(shapes[name], generator=generator, dtype=torch.float64).requires_grad_()
        if kinds[name].is_floating
        else torch.randint(0, 2, shapes[name], generator=generator)
        for name in given
    }
    constants = {name: graph.constants[name] for name in kinds if name in graph.constants and name not in drawn}
    own = [_in_double(with_sizes(op, small)) for op in region.ops]
    body = replace(region.body, ops=tuple(_in_double(with_sizes(op, small)) for op in region.body.ops)).text()
    trained = [x for x in drawn.values() if x.requires_grad]
    seed: Tensor | None = None

    def with_gradients(result: Tensor) -> list[Tensor]:
        nonlocal seed
        seed = torch.randn(result.shape, generator=generator, dtype=torch.float64) if seed is None else seed
        return [result, *_gradients(result, trained, seed)]

    reads, experts, others = ([drawn[name] for name in region.lists[which]] for which in LISTS)
    members = torch.arange(region.num_experts)
    with torch.enable_grad():
        expected = with_gradients(_run(own, {region.ids: ids, **constants, **drawn})[region.end.results[0]])
        whole = run_experts(ids, reads, experts, others, members, region.num_experts, body)
        if not all(map(_is_close, expected, with_gradients(whole))):
            return None
        for width in inner_widths(region.body, [graph.types[name] for name in region.lists["experts"]]):
            with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError):
                cut = run_in_slices(width, ids, (reads, experts, others), region.num_experts, body)
                if all(map(_is_close, expected, with_gradients(cut))):
                    return replace(region.body, width=_with_kept(graph, region, width))
    return region.body


def _with_kept(graph: Graph, region: Region, width: InnerWidth) -> InnerWidth:
    """The width with what autograd keeps of it: what a slice keeps less than the whole."""
    op = region.write("members", "made")[1]
    whole = [graph.types[name] for name in op.operands[:-1]] + [TensorType((region.num_experts,), "int64")]
    cut, first = list(whole), 1 + len(region.lists["reads"])
    for place, dim, _ in width.cuts:
        shape = list(cut[first + place].shape)
        shape[dim] //= NUM_SLICES
        cut[first + place] = replace(cut[first + place], shape=tuple(shape))
    result = (graph.types[region.end.results[0]],)
    kept, less = (
        SavesMeter().saved(op, tuple(kinds), result, tuple(kind.is_floating for kind in kinds)).extra_bytes
        for kinds in (whole, cut)
    )
    num_rows = max(1, whole[0].shape[0])
    return replace(width, kept_bytes=(kept - less) * NUM_SLICES / (NUM_SLICES - 1) / num_rows)


def _gradients(result: Tensor, leaves: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    gradients: Sequence[Any] = torch.autograd.grad(result, leaves, seed, allow_unused=True)
    pairs: Any = zip(leaves, gradients, strict=True)
    return [torch.zeros_like(x) if g is None else g for x, g in pairs]


def _is_close(one: Tensor, other: Tensor) -> bool:
    scale = float(one.detach().abs().max()) if one.numel() else 0.0
    return one.shape == other.shape and bool(((one - other).abs() <= _TOLERANCE * max(scale, 1.0)).all())


def _run(ops: Sequence[Op], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known = dict(values)
    for op in ops:
        if op.target in PRODUCTS:
            results: Sequence[Any] = (grouped_product(*(known[name] for name in op.operands)),)
        else:
            results = run_op(op, known)
        known.update(zip(op.results, results, strict=True))
    return known


def _shrinking(kinds: Mapping[str, TensorType], region: Region) -> dict[int, int] | None:
    """Large sizes -> smaller ones in the same proportions; None if they stay too large.

    Numbers of rows have proportions of their own, unless one of them is the size of another dim, too.
    """
    compared = (*kinds.values(), *region.intermediates)
    if max(kind.num_elements for kind in compared) <= _MAX_ELEMENTS:
        return {}
    of_rows = {region.ids, *region.lists["reads"]}
    rows = {kinds[name].shape[0] for name in of_rows}
    others = {size for name, kind in kinds.items() for size in kind.shape[name in of_rows :]}
    others = {size for size in others if size > _SMALL} - {region.num_experts}
    apart = not rows & others
    divisor = _common_divisor(rows, -(-_FEW_ROWS * min(rows) // max(rows))) if apart else 1
    small = {size: size // divisor for size in rows} if apart else {}
    others = others if apart else others | rows
    divisor = _common_divisor(others, _LEAST)
    # Sizes inside of the body: parts of others, such as halves.
    inside = {size for kind in region.body.types.values() for size in kind.shape if size > _SMALL} - rows
    small |= {size: size // divisor for size in others | inside if size % divisor == 0}
    shrunk = max(math.prod(small.get(size, size) for size in kind.shape) for kind in compared)
    return small if shrunk <= _MAX_ELEMENTS and region.num_experts not in small else None


def _common_divisor(sizes: Iterable[int], least: int) -> int:
    """The largest that makes the smallest of the sizes no less than `least`."""
    common = math.gcd(*sizes)
    return divisor_to(-(-least * common // min(sizes)), common) if common else 1


_NARROW = ("torch.float32", "torch.float16", "torch.bfloat16")


def _in_double(op: Op) -> Op:
    """The op with float64 where it names a narrower dtype, so that both forms compute in that.

    Not the counting of rows: histograms take integers as float32.
    """
    change = partial(_widened, is_count="histc" in op.target)
    return op.map_args(change)


def _widened(arg: Arg, *, is_count: bool) -> Arg:
    return "torch.float64" if arg in _NARROW and not is_count else arg
