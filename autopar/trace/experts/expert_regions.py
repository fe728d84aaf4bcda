"""Mixtures of experts that sort rows by expert become one op (`autopar.ops.experts`).

A region is recognized by what it computes.  It begins where the experts of all rows are sorted.  What is computed from
that alone is looked at on random ids: places of tokens, the order and its inverse, where groups end.  From there on
every op must work row by row, by its factor rule, or multiply groups of rows by one matrix each, until the rows are put
back in their order, or added up by their tokens.  Where the rows of each token are added up next, that belongs to the
region.  Then the new op and the model's own ops are run, both in float64 and on skewed random numbers: results and
gradients must agree, or the region stays as it is.  So is found whether it can be cut in the inner width.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ops import filled_with
from autopar.ops.experts import ENDS, IDS, PRODUCT, TRANSPOSE, Body
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.experts.batched_experts import find_batched
from autopar.trace.experts.expert_groups import group_limit
from autopar.trace.experts.expert_proof import LISTS, PRODUCTS, Region, proven_body
from autopar.trace.experts.expert_widths import in_equal_parts, moved_bytes
from autopar.trace.experts.row_order import RowOrder, divisor_to, is_rowwise, with_columns, without_rows
from autopar.trace.graph import Graph, Names

__all__ = ["join_experts"]

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_SUMS = ("aten.sum.dim_IntList",)
_ADDITIONS = ("aten.index_add.default", "aten.scatter_add.default")
_WRITE = "aten.index_put.default"
_SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
_FEW_ROWS = 1 << 12  # to look at: several for each of hundreds of experts, and of their order nothing depends on more


def join_experts(graph: Graph) -> Graph:
    """Replace each region of experts by one op; its own ops are removed by the next pass that drops dead ones."""
    readers = graph.count_readers()
    replaced: dict[str, list[Op]] = {}
    types: dict[str, TensorType] = {}
    names = Names(graph)
    taken: set[str] = set()
    for place, op in enumerate(graph.ops):
        for region in () if op.name in taken else _with_and_without_sums(graph, _regions(graph, place, readers)):
            body = proven_body(graph, region)
            if body is not None:
                body = replace(body, groups=group_limit(graph, region.ids, region.num_experts))
                members = names.fresh("members")
                types[members] = TensorType((region.num_experts,), "int64")
                made = names.fresh("experts") if region.onto else region.end.results[0]
                types[made] = graph.types[region.end.results[0]]
                replaced[region.end.name] = replace(region, body=body).write(members, made)
                taken.update(each.name for each in region.ops)
                break
    if not replaced:
        return graph
    return graph.rewrite(lambda op: replaced.get(op.name)).with_types(types)


def _regions(graph: Graph, place: int, readers: Mapping[str, int]) -> Iterator[Region]:
    """What may begin with the op at `place`."""
    op = graph.ops[place]
    if op.target in _SORTS and len(graph.types[op.results[0]].shape) == 1:
        num_rows = graph.types[op.operands[0]].shape[0]
        tried = dict.fromkeys((divisor_to(_FEW_ROWS, num_rows), 1) if num_rows > _FEW_ROWS else (1,))
        region = next(filter(None, (_SortedRegion(graph, place, readers, fewer).find() for fewer in tried)), None)
    else:
        region = find_batched(graph, place)
    if region is not None:
        yield region


def _with_and_without_sums(graph: Graph, regions: Iterable[Region]) -> Iterator[Region]:
    """Each region, before it the one that also adds up the rows of each token, if all that reads it does that."""
    for region in regions:
        made = graph.types[region.end.results[0]].shape
        view = _only_reader(graph, region.end, _VIEWS)
        sums = view and _only_reader(graph, view, _SUMS)
        if view and sums:
            apart, dims = graph.types[view.results[0]].shape, sums.args[1]
            is_of_tokens = len(apart) == len(made) + 1 and apart[2:] == made[1:] and apart[1] > 1
            if is_of_tokens and dims in ((1,), (1 - len(apart),)) and not any(sums.args[2:]) and not sums.kwargs:
                body = replace(region.body, summed=apart[1])
                yield replace(region, ops=(*region.ops, view, sums), body=body, end=sums)
        yield region


def _only_reader(graph: Graph, op: Op, targets: Collection[str]) -> Op | None:
    """What alone reads the op's result, if it is one of `targets`."""
    places = graph.readers.get(op.results[0], ())
    if len(places) != 1 or op.results[0] in graph.read_at_end:
        return None
    reader = graph.ops[places[0]]
    return reader if reader.target in targets else None


@dataclass
class _SortedRegion:
    """Follows one sort through the graph."""

    graph: Graph
    place: int
    readers: Mapping[str, int]
    fewer: int  # how many times as many rows the graph has as are looked at
    ops: list[Op] = field(default_factory=list[Op])
    body: list[Op] = field(default_factory=list[Op])
    inner: dict[str, str] = field(default_factory=dict[str, str])  # the model's name of a value -> the body's
    lists: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in LISTS})
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    sizes_of: tuple[str, ...] = ()  # what is filled with a number, and read by the end alone, has the sizes of

    @property
    def sort(self) -> Op:
        """Where the region begins."""
        return self.graph.ops[self.place]

    def find(self) -> Region | None:
        """The region that begins with the sort, or None."""
        self.num_rows = self.graph.types[self.sort.operands[0]].shape[0]
        self.num_experts = self._count_experts()
        if not self.num_experts or self.num_rows < 1:
            return None
        self.known = RowOrder.of(self.graph, self.place, self.num_experts, self.fewer)
        self.ops = list(self.known.ops)
        for op in self.graph.ops[self.place + 1 :]:
            if self._is_start(op):
                continue  # it reads sizes alone
            if any(name in self.inner for name in op.operands):
                if self._is_end(op):
                    return self._finish_at(op)
                if not self._row_op(op):
                    return None
            elif any(name in self.known.values for name in op.operands) and op.results[0] not in self.known.values:
                if not self._first_op(op):
                    continue  # it stays outside, with what it reads
            else:
                continue
            self.ops.append(op)
        return None

    def _count_experts(self) -> int:
        """By the products that read what is computed from the sort, or from what it sorts."""
        ids = self.sort.operands[0]
        reached = {ids, *with_columns(self.graph, ids), *self.sort.results}
        first = min(at for name in reached for at in self.graph.readers.get(name, (self.place,)))
        for op in self.graph.ops[first:]:
            if reached.isdisjoint(op.operands):
                continue
            if op.target in PRODUCTS and op.operands[2] in reached:
                return self.graph.types[op.operands[1]].shape[0]
            reached.update(op.results)
        return 0

    def _first_op(self, op: Op) -> bool:
        """Whether that is what rows read of outside, in their sorted order."""
        if op.target == "aten.gather.default":
            return self._first_gather(op)
        if op.target != "aten.index.Tensor" or len(op.operands) != 2 or op.args[1] != (Ref(op.operands[1]),):
            return False
        source, index = op.operands
        if source in self.inner or source in self.known.values:
            return False
        if self.known.kinds.get(index) == "sorted":
            return self._row_op(op)
        return self._reads(op, source, index)

    def _first_gather(self, op: Op) -> bool:
        """Whether it takes whole rows: of the same entry in every column."""
        source, index = op.operands
        entries, places = self.graph.types[source].shape, self.graph.types[index].shape
        takes_rows = len(entries) == 2 and op.args[1] in (0, -2) and entries[1:] == places[1:]
        return takes_rows and source not in self.inner and self._reads(op, source, index)

    def _reads(self, op: Op, source: str, index: str) -> bool:
        num_entries = self.graph.types[source].shape[0]
        if not num_entries or self.num_rows % num_entries or not self.known.are_places(index, num_entries):
            return False
        self._keep(op.results[0], self._outside("reads", source))
        return True

    def _outside(self, kind: str, source: str) -> str:
        sources = self.lists[kind]
        if source not in sources:
            sources.append(source)
        return f"{kind}{sources.index(source)}"

    def _keep(self, name: str, inner: str) -> None:
        self.inner[name] = inner
        of_all = self.graph.types[name]
        self.types[inner] = TensorType(of_all.shape[1:], of_all.dtype)

    def _row_op(self, op: Op) -> bool:
        """An op that works row by row, or multiplies groups of rows."""
        is_product = op.target in PRODUCTS
        if is_product:
            left, right, ends = op.operands
            if left not in self.inner or self.known.kinds.get(ends) != "ends" or right in self.inner:
                return False
        elif not is_rowwise(op, self.graph.types, self.inner.keys() | self.known.sorted_ids):
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
        self.body.append(without_rows(whole, self.num_rows))
        return True

    def _name_of(self, op: Op, name: str, *, is_expert: bool) -> str:
        if name in self.inner:
            return self.inner[name]
        if name in self.known.kinds:
            return {"ends": ENDS, "sorted": IDS}.get(self.known.kinds[name], name)
        return self._outside("experts" if is_expert else "others", name)

    def _is_end(self, op: Op) -> bool:
        """Whether rows are put back in their order, or added up by their tokens."""
        return self._is_read_back(op) or self._is_written_back(op) or self._adds_up(op)

    def _finish_at(self, end: Op) -> Region | None:
        if self._is_read_back(end):
            return self._finish(end, end.operands[0])
        region = self._finish_from_zeros(end)
        return region and self._with_sums(region, end) if self._adds_up(end) else region

    def _is_read_back(self, op: Op) -> bool:
        return (
            op.target == "aten.index.Tensor"
            and op.operands[0] in self.inner
            and op.args[1] == (Ref(op.operands[1]),)
            and self.known.kinds.get(op.operands[1]) == "inverse"
        )

    def _is_start(self, op: Op) -> bool:
        """Whether the op fills what rows are then added or written to, and nothing else reads."""
        if filled_with(op) is None or self.readers[op.results[0]] != 1:
            return False
        reader = _only_reader(self.graph, op, (*_ADDITIONS, _WRITE))
        return reader is not None and reader.operands[0] == op.results[0]

    def _is_written_back(self, op: Op) -> bool:
        """Whether the op writes all rows to their places in another tensor, of which nothing is left."""
        if op.target != _WRITE or len(op.operands) != 3 or any(op.args[3:]) or op.kwargs:
            return False
        start, places, rows = op.operands
        types = self.graph.types
        is_whole = rows in self.inner and types[start].shape == types[rows].shape
        return is_whole and op.args[1] == (Ref(places),) and self.known.kinds.get(places) == "order"

    def _adds_up(self, op: Op) -> bool:
        """Whether the op adds sorted rows up by their tokens, onto what doesn't depend on them."""
        if op.target not in _ADDITIONS or len(op.operands) != 3 or op.kwargs or op.args[1] != 0:
            return False
        start, places, rows = op.operands
        num_tokens = self.graph.types[op.results[0]].shape[0]
        is_of_tokens = num_tokens > 0 and self.num_rows % num_tokens == 0 and rows in self.inner
        return is_of_tokens and start not in self.inner and self.known.are_places(places, num_tokens)

    def _with_sums(self, region: Region, end: Op) -> Region:
        """The region with what it adds up rows onto, and how many of each token."""
        zeros = self.graph.producers.get(end.operands[0])
        onto = "" if zeros is not None and filled_with(zeros) == 0 else end.operands[0]
        num_tokens = self.graph.types[end.results[0]].shape[0]
        return replace(region, onto=onto, body=replace(region.body, summed=self.num_rows // num_tokens))

    def _finish_from_zeros(self, end: Op) -> Region | None:
        """The region whose rows are added or written to zeros, without what the model's own tensor reads."""
        kind, start = self.graph.types[end.results[0]], end.operands[0]
        name = f"{end.name}_zeros"
        zeros = Op(name, "aten.full.default", (kind.shape, 0), (("dtype", f"torch.{kind.dtype}"),), (name,))
        filled = self.graph.producers.get(start)
        if filled is not None and self._is_start(filled):
            self.sizes_of += filled.operands
        self.ops.append(zeros)
        return self._finish(end.reading({start: name}), end.operands[2])

    def _finish(self, end: Op, result: str) -> Region | None:
        ops = (*self.ops, end)
        inside = {name: 0 for op in self.ops for name in op.results if name in self.inner}
        for name in itertools.chain(self.sizes_of, *(op.operands for op in ops)):
            if name in inside:
                inside[name] += 1
        is_closed = all(count == self.readers[name] for name, count in inside.items())
        own = {IDS, ENDS, *self.inner.values(), *(f"{k}{i}" for k in LISTS for i in range(len(self.lists[k])))}
        is_complete = all(name in own for op in self.body for name in op.operands)
        has_experts = all(
            self.graph.types[name].shape[:1] == (self.num_experts,) for name in self.lists["experts"]
        ) and not set(self.lists["experts"]) & {*self.lists["others"], *self.lists["reads"]}
        if not (is_closed and is_complete and has_experts):
            return None
        turned = self._turn()
        inside_ops = tuple(self.body)
        body = Body(inside_ops, self.inner[result], dict(self.types), moved_bytes(inside_ops, self.types))
        lists = {name: tuple(names) for name, names in self.lists.items()}
        # What is known from the order alone is computed before the rows that read it.
        ordered = sorted((*turned, *ops), key=lambda op: self.graph.places.get(op.name, -1))
        return Region(self.sort.operands[0], lists, _needed(ordered, end), body, end, self.num_experts)

    def _turn(self) -> list[Op]:
        """Transposed matrices are read as they are stored, and transposed inside: slices are those of parameters."""
        producers, ops = self.graph.producers, list[Op]()
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
            ops.append(op)
        return ops


def _needed(ops: Sequence[Op], end: Op) -> tuple[Op, ...]:
    """Those of the ops that the last one depends on, in order."""
    needed, kept = set(end.results), list[Op]()
    for op in reversed(ops):
        if not needed.isdisjoint(op.results):
            kept.append(op)
            needed.update(op.operands)
    return tuple(reversed(kept))


def _dim(arg: Arg) -> int:
    return arg if isinstance(arg, int) else 0


def _reads_by_expert(op: Op, place: int) -> bool:
    return op.target == "aten.index.Tensor" and place == 0
