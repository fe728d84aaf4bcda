"""Mixtures of experts that sort rows by expert become one op (`autopar.ops.experts`).

A region is recognised by what it computes.  It begins where the experts of all rows are sorted.  What is computed from
that alone is looked at on random ids: places of tokens, the order and its inverse, where groups end.  From there on
every op must work row by row, by its factor rule, or multiply groups of rows by one matrix each, until the rows are put
back in their order.  Then the new op is run beside the model's own ops, both in float64 and on skewed random numbers:
results and gradients must agree, or the region stays as it is.  So is found whether it can be cut in the inner width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.ops import family_of, options_for
from autopar.ops.experts import ENDS, EXPERTS, IDS, PRODUCT, TRANSPOSE, Body, InnerWidth
from autopar.placement import shard
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.evaluation import run_op
from autopar.trace.expert_widths import NUM_SLICES, in_equal_parts, inner_widths, moved_bytes, run_in_slices
from autopar.trace.graph import Graph, Names
from autopar.trace.grouped_products import grouped_product, run_experts
from autopar.trace.row_order import RowOrder, divisor_to, random_ids, with_sizes
from autopar.trace.saves import SavesMeter

__all__ = ["join_experts"]

_SORTS = ("aten.sort.default", "aten.sort.stable")
_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_MAX_ELEMENTS = 1 << 24  # of one tensor, where both forms are compared: larger calls are shrunk before
_SMALL = 64  # sizes up to this are not shrunk: they may be numbers of experts or of heads
_FEW_ROWS = 1 << 12  # to look at: several for each of hundreds of experts, and of their order nothing depends on more
_LEAST = 8  # what a size is shrunk to at least
_TOLERANCE = 1e-10  # relative, in float64; the order of sums differs

# By all that the comparison depends on, as layers of one model are alike: None, or the body that the op may have.
_proven: dict[object, Body | None] = {}


def join_experts(graph: Graph) -> Graph:
    """Replace each region that is found by one op; its own ops go with the next pass that drops dead ones."""
    readers = graph.count_readers()
    replaced: dict[str, list[Op]] = {}
    types: dict[str, TensorType] = {}
    names = Names(graph)
    for place, op in enumerate(graph.ops):
        if op.target in _SORTS and len(graph.types[op.results[0]].shape) == 1:
            num_rows = graph.types[op.operands[0]].shape[0]
            tried = dict.fromkeys((divisor_to(_FEW_ROWS, num_rows), 1) if num_rows > _FEW_ROWS else (1,))
            found = next(filter(None, (_Search(graph, place, readers, fewer).find() for fewer in tried)), None)
            body = _proven_body(graph, found) if found is not None else None
            if found is not None and body is not None:
                members = names.fresh("members")
                types[members] = TensorType((found.num_experts,), "int64")
                replaced[found.end.name] = replace(found, body=body).write(members)
    if not replaced:
        return graph
    return graph.rewrite(lambda op: replaced.get(op.name)).with_types(types)


@dataclass(frozen=True)
class _Region:
    """A region with its parts.

    Args:
        ids: the sorted value: the expert of each row.
        lists: what rows read, by the list of the op that it is in, in order.
        ops: of the model, from the sort to `end`.
        body: in the op's own names.
        end: puts rows back in their order; its result is the region's.
        num_experts: how many.
    """

    ids: str
    lists: Mapping[str, tuple[str, ...]]
    ops: tuple[Op, ...]
    body: Body
    end: Op
    num_experts: int

    def write(self, members: str) -> list[Op]:
        """The op, and before it the numbers of all experts."""
        lists = tuple(tuple(map(Ref, self.lists[name])) for name in _LISTS)
        all_experts = Op(
            members, "aten.arange.default", (self.num_experts,), (("dtype", "torch.int64"), ("device", "cpu")),
            (members,), source=self.end.source, module=self.end.module,
        )  # fmt: skip
        args = (Ref(self.ids), *lists, Ref(members), self.num_experts, self.body.text())
        return [all_experts, replace(self.end, target=EXPERTS, args=args, kwargs=())]


_LISTS = ("reads", "experts", "others")


@dataclass
class _Search:
    """Follows one sort through the graph."""

    graph: Graph
    place: int
    readers: Mapping[str, int]
    fewer: int  # how many times as many rows the graph has as are looked at
    ops: list[Op] = field(default_factory=list[Op])
    body: list[Op] = field(default_factory=list[Op])
    inner: dict[str, str] = field(default_factory=dict[str, str])  # the model's name of a value -> the body's
    lists: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in _LISTS})
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])

    @property
    def sort(self) -> Op:
        """Where the region begins."""
        return self.graph.ops[self.place]

    def find(self) -> _Region | None:
        """The region that begins with the sort, or None."""
        self.num_rows = self.graph.types[self.sort.operands[0]].shape[0]
        self.num_experts = self._count_experts()
        if not self.num_experts or self.num_rows < 1:
            return None
        self.known = RowOrder.of(self.graph, self.place, self.num_experts, self.fewer)
        self.ops = list(self.known.ops)
        for op in self.graph.ops[self.place + 1 :]:
            if any(name in self.inner for name in op.operands):
                if self._is_end(op):
                    return self._finish(op)
                made = self._row_op(op)
            elif any(name in self.known.values for name in op.operands) and op.results[0] not in self.known.values:
                made = self._first_op(op)
            else:
                continue
            if not made:
                return None
            self.ops.append(op)
        return None

    def _count_experts(self) -> int:
        """By the products that read what is computed from the sort."""
        reached = set(self.sort.results)
        for op in self.graph.ops[self.place + 1 :]:
            if reached.isdisjoint(op.operands):
                continue
            if op.target in _PRODUCTS and op.operands[2] in reached:
                return self.graph.types[op.operands[1]].shape[0]
            reached.update(op.results)
        return 0

    def _first_op(self, op: Op) -> bool:
        """What rows read of outside, in their sorted order; anything else that reads the order stays outside."""
        if op.target != "aten.index.Tensor" or len(op.operands) != 2 or op.args[1] != (Ref(op.operands[1]),):
            return False
        source, index = op.operands
        if source in self.inner or source in self.known.values:
            return False
        if self.known.kinds.get(index) == "sorted":
            return self._row_op(op)
        num_entries = self.graph.types[source].shape[0]
        if not num_entries or self.num_rows % num_entries or not self.known.are_places(index, num_entries):
            return False
        self._keep(op.results[0], self._outside("reads", source))
        return True

    def _outside(self, kind: str, source: str) -> str:
        held = self.lists[kind]
        if source not in held:
            held.append(source)
        return f"{kind}{held.index(source)}"

    def _keep(self, name: str, inner: str) -> None:
        self.inner[name] = inner
        of_all = self.graph.types[name]
        self.types[inner] = TensorType(of_all.shape[1:], of_all.dtype)

    def _row_op(self, op: Op) -> bool:
        """An op that works row by row, or multiplies groups of rows."""
        is_product = op.target in _PRODUCTS
        if is_product:
            left, right, ends = op.operands
            if left not in self.inner or self.known.kinds.get(ends) != "ends" or right in self.inner:
                return False
        elif not _is_rowwise(op, self.graph.types, self.inner.keys() | self.known.sorted_ids):
            return False
        if any(self.graph.types[name].shape[:1] != (self.num_rows,) for name in op.results):
            return False
        read: dict[str, str] = {}
        for place, name in enumerate(op.operands):
            read[name] = self._name_of(op, name, is_expert=(is_product and place == 1) or _reads_by_expert(op, place))
        for name in op.results:
            self._keep(name, f"v{len(self.inner)}")
        made = replace(
            op.reading(read), name="", results=tuple(self.inner[name] for name in op.results), source="", module=""
        )
        if is_product:
            made = replace(made, target=PRODUCT, args=tuple(Ref(read[name]) for name in op.operands), kwargs=())
        whole = in_equal_parts(made, self.types[read[op.operands[0]]]) if read[op.operands[0]] in self.types else made
        self.body.append(_without_sizes(whole, self.num_rows))
        return True

    def _name_of(self, op: Op, name: str, *, is_expert: bool) -> str:
        if name in self.inner:
            return self.inner[name]
        if name in self.known.kinds:
            return {"ends": ENDS, "sorted": IDS}.get(self.known.kinds[name], name)
        return self._outside("experts" if is_expert else "others", name)

    def _is_end(self, op: Op) -> bool:
        return (
            op.target == "aten.index.Tensor"
            and op.operands[0] in self.inner
            and op.args[1] == (Ref(op.operands[1]),)
            and self.known.kinds.get(op.operands[1]) == "inverse"
        )

    def _finish(self, end: Op) -> _Region | None:
        ops = (*self.ops, end)
        inside = {name: 0 for op in self.ops for name in op.results if name in self.inner}
        for name in (name for op in ops for name in op.operands if name in inside):
            inside[name] += 1
        is_closed = all(count == self.readers[name] for name, count in inside.items())
        own = {IDS, ENDS, *self.inner.values(), *(f"{k}{i}" for k in _LISTS for i in range(len(self.lists[k])))}
        is_complete = all(name in own for op in self.body for name in op.operands)
        has_experts = all(
            self.graph.types[name].shape[:1] == (self.num_experts,) for name in self.lists["experts"]
        ) and not set(self.lists["experts"]) & {*self.lists["others"], *self.lists["reads"]}
        if not (is_closed and is_complete and has_experts):
            return None
        turned = self._turn()
        inside_ops = tuple(self.body)
        body = Body(inside_ops, self.inner[end.operands[0]], dict(self.types), moved_bytes(inside_ops, self.types))
        lists = {name: tuple(held) for name, held in self.lists.items()}
        ops = (*turned, *ops)
        # What is known from the order alone is computed before the rows that read it.
        order = {op.name: place for place, op in enumerate(self.graph.ops)}
        ordered = tuple(sorted(ops, key=lambda op: order[op.name]))
        return _Region(self.sort.operands[0], lists, ordered, body, end, self.num_experts)

    def _turn(self) -> list[Op]:
        """Transposed matrices are read as they are stored, and transposed inside: slices are those of parameters."""
        producers, found = self.graph.producers, list[Op]()
        for place, name in enumerate(self.lists["experts"]):
            op = producers.get(name)
            if op is None or op.target != TRANSPOSE or {d % 3 for d in map(_dim, op.args[1:])} != {1, 2}:
                continue
            if len(self.graph.types[name].shape) != 3 or op.operands[0] in self.lists["experts"]:
                continue
            inner, turned = f"experts{place}", f"turned{place}"
            self.lists["experts"][place] = op.operands[0]
            self.body = [each.reading({inner: turned}) for each in self.body]
            self.body.insert(0, Op("", TRANSPOSE, (Ref(inner), 1, 2), (), (turned,)))
            found.append(op)
        return found


def _dim(arg: Arg) -> int:
    return arg if isinstance(arg, int) else 0


def _is_rowwise(op: Op, types: Mapping[str, TensorType], rows: Iterable[str]) -> bool:
    """Whether a factor of the op cuts the rows of its operands and results, all else whole, without a kernel."""
    rows = set(rows)
    operands, results = (tuple(types[name] for name in names) for names in (op.operands, op.results))
    match = options_for(op, operands, results)
    if match is None or match.is_random or family_of(op.target).is_uninitialized:
        return False
    return any(
        not option.kernel
        and all(placement == shard(0) for placement in option.results)
        and all((name in rows) == (p == shard(0)) and (name in rows or not p.is_shard)
                for name, p in zip(op.operands, option.operands, strict=True))
        for option in match.options
    )  # fmt: skip


def _reads_by_expert(op: Op, place: int) -> bool:
    return op.target == "aten.index.Tensor" and place == 0


def _without_sizes(op: Op, num_rows: int) -> Op:
    """The op with -1 for the number of rows among sizes that are arguments."""
    args = list(op.args)
    for place in family_of(op.target).size_args:
        sizes = args[place]
        if isinstance(sizes, tuple) and sizes[:1] == (num_rows,):
            args[place] = (-1, *sizes[1:])
    return replace(op, args=tuple(args))


# ---------------------------------------------------------------- whether both forms are the same function


def _proven_body(graph: Graph, region: _Region) -> Body | None:
    """The body of an op that computes what the region's ops do, forward and backward, in float64; None if none does."""
    numbered: dict[str, str] = {region.ids: "ids"}
    for op in region.ops:
        for name in (*op.operands, *op.results):
            numbered.setdefault(name, f"n{len(numbered)}")
    key = (
        tuple((op.target, repr(op.reading(numbered).args), repr(op.reading(numbered).kwargs)) for op in region.ops),
        region.body.text(), tuple(graph.types[name] for name in numbered),
    )  # fmt: skip
    if key not in _proven:
        try:
            _proven[key] = _compare(graph, region)
        except (RuntimeError, IndexError, ValueError, TypeError):
            _proven[key] = None
    return _proven[key]


def _compare(graph: Graph, region: _Region) -> Body | None:
    given = [name for name in _LISTS for name in region.lists[name]]
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
    wanted = [x for x in drawn.values() if x.requires_grad]
    seed: Tensor | None = None

    def with_gradients(result: Tensor) -> list[Tensor]:
        nonlocal seed
        seed = torch.randn(result.shape, generator=generator, dtype=torch.float64) if seed is None else seed
        return [result, *_gradients(result, wanted, seed)]

    reads, experts, others = ([drawn[name] for name in region.lists[which]] for which in _LISTS)
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


def _with_kept(graph: Graph, region: _Region, width: InnerWidth) -> InnerWidth:
    """The width with what autograd keeps of it: what a slice keeps less than the whole."""
    op = region.write("members")[1]
    whole = [graph.types[name] for name in op.operands[:-1]] + [TensorType((region.num_experts,), "int64")]
    cut, first = list(whole), 1 + len(region.lists["reads"])
    for place, dim, _ in width.cuts:
        shape = list(cut[first + place].shape)
        shape[dim] //= NUM_SLICES
        cut[first + place] = replace(cut[first + place], shape=tuple(shape))
    result = (graph.types[region.end.results[0]],)
    kept, less = (
        SavesMeter().saved(op, tuple(kinds), result, tuple(kind.is_floating for kind in kinds))[1]
        for kinds in (whole, cut)
    )
    num_rows = max(1, whole[0].shape[0])
    return replace(width, kept_bytes=(kept - less) * NUM_SLICES / (NUM_SLICES - 1) / num_rows)


def _gradients(result: Tensor, wanted: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    found: Sequence[Any] = torch.autograd.grad(result, wanted, seed, allow_unused=True)
    pairs: Any = zip(wanted, found, strict=True)
    return [torch.zeros_like(x) if g is None else g for x, g in pairs]


def _is_close(one: Tensor, other: Tensor) -> bool:
    scale = float(one.detach().abs().max()) if one.numel() else 0.0
    return one.shape == other.shape and bool(((one - other).abs() <= _TOLERANCE * max(scale, 1.0)).all())


def _run(ops: Sequence[Op], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known = dict(values)
    for op in ops:
        if op.target in _PRODUCTS:
            results: Sequence[Any] = (grouped_product(*(known[name] for name in op.operands)),)
        else:
            results = run_op(op, known)
        known.update(zip(op.results, results, strict=True))
    return known


def _shrinking(kinds: Mapping[str, TensorType], region: _Region) -> dict[int, int] | None:
    """Large sizes -> smaller ones in the same proportions; None if they stay too large.

    Numbers of rows have proportions of their own, unless one of them is the size of another dim, too.
    """
    if max(kind.num_elements for kind in kinds.values()) <= _MAX_ELEMENTS:
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
    shrunk = max(math.prod(small.get(size, size) for size in kind.shape) for kind in kinds.values())
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
