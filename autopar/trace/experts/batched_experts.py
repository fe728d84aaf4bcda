"""Experts that give every row a copy of its expert's matrix: finds the region that one op can replace.

Hugging Face's ``batched_mm`` has it so: matrices are indexed by the expert of each row, and a batched product takes one
row and one matrix at a time.  That needs a matrix for every row, which fits for few tokens only.  The same products of
rows that are sorted by expert need none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopar.ops.experts import IDS, PRODUCT, TRANSPOSE, Body
from autopar.program import Op, Ref, TensorType
from autopar.trace.experts.expert_proof import LISTS, Region
from autopar.trace.experts.expert_widths import in_equal_parts, moved_bytes
from autopar.trace.experts.row_order import is_rowwise, without_rows
from autopar.trace.graph import Graph

__all__ = ["find_batched"]

_REPEAT = "aten.repeat_interleave.self_int"
_SCALINGS = ("aten.mul.Tensor", "aten.add.Tensor")  # of results, by weights and biases: terms of a sum stay terms
_ROW_DIMS = {
    0: -1,
    1: 1,
}  # place of the matrices in a batched product -> the dim of size 1 of the rows that they multiply


def find_batched(graph: Graph, place: int) -> Region | None:
    """The region whose first matrices the op at `place` reads, or None."""
    first = graph.ops[place]
    if not _takes_by_row(first) or len(graph.types[first.operands[0]].shape) != 3:
        return None
    ids = graph.types[first.operands[1]]
    return _BatchedRegion(graph, place).find() if len(ids.shape) == 1 and ids.dtype == "int64" else None


def _takes_by_row(op: Op) -> bool:
    return op.target == "aten.index.Tensor" and len(op.operands) == 2 and op.args[1] == (Ref(op.operands[1]),)


@dataclass
class _BatchedRegion:
    """Follows the rows through the graph."""

    graph: Graph
    place: int
    until: str = ""  # the op at which the region ends, if that is known
    behind: str = ""  # the first op since a product that the region need not have
    body: list[Op] = field(default_factory=list[Op])
    inner: dict[str, str] = field(default_factory=dict[str, str])  # the model's name of a value of rows -> the body's
    made: set[str] = field(default_factory=set[str])  # those that are computed from a product
    matrices: dict[str, str] = field(default_factory=dict[str, str])  # those of rows -> of experts
    products: dict[str, str] = field(default_factory=dict[str, str])  # not yet squeezed -> the body's name
    lists: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in LISTS})
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])

    def find(self) -> Region | None:
        first = self.graph.ops[self.place]
        self.ids = first.operands[1]
        self.num_rows = self.graph.types[self.ids].shape[0]
        self.num_experts = self.graph.types[first.operands[0]].shape[0]
        self.producers = self.graph.producers
        for op in self.graph.ops[self.place :]:
            made = [name for name in op.operands if name in self.made]
            if op.name == self.until:
                return self._finish(made)
            if not self._follow(op, made):
                return (
                    _BatchedRegion(self.graph, self.place, self.behind or op.name).find()
                    if made and not self.until
                    else None
                )
        return None

    def _follow(self, op: Op, made: list[str]) -> bool:
        """Whether the op may be part of the region; `made` are those of its operands that come from a product."""
        if _takes_by_row(op) and op.operands[1] == self.ids and op.operands[0] not in self.inner:
            return self._take(op)
        if op.target == "aten.bmm.default" and any(name in self.matrices for name in op.operands):
            self.behind = ""
            return self._multiply(op)
        if op.target == "aten.squeeze.dim" and op.operands[0] in self.products:
            self.inner[op.results[0]] = self.products[op.operands[0]]
            self.made.add(op.results[0])
            return True
        if any(name in self.inner for name in op.operands):
            is_scaling = not made or (op.target in _SCALINGS and len(made) == 1)
            self.behind = self.behind or ("" if is_scaling else op.name)
            self.made.update(op.results if made else ())
            return self._row_op(op)
        return not any(name in self.matrices or name in self.products for name in op.operands)

    def _outside(self, kind: str, name: str) -> str:
        names = self.lists[kind]
        if name not in names:
            names.append(name)
        return f"{kind}{names.index(name)}"

    def _take(self, op: Op) -> bool:
        source = self.graph.types[op.operands[0]]
        if source.shape[:1] != (self.num_experts,):
            return False
        if len(source.shape) == 3:
            self.matrices[op.results[0]] = op.operands[0]
            return True
        inner = self._outside("experts", op.operands[0])
        self._add(Op("", op.target, (Ref(inner), (Ref(IDS),)), (), op.results), op.results)
        return True

    def _multiply(self, op: Op) -> bool:
        """A row times its matrix, from either side."""
        if len(op.operands) != 2 or len(self.matrices.keys() & set(op.operands)) != 1:
            return False
        at = next(index for index, name in enumerate(op.operands) if name in self.matrices)
        row = self.producers.get(op.operands[1 - at])
        if row is None or row.target != "aten.unsqueeze.default" or row.args[1] not in (_ROW_DIMS[at], 2 - at):
            return False
        source = row.operands[0]
        if len(self.graph.types[source].shape) != 2:
            return False
        left = self.inner.get(source) or self._read(source)
        matrix = self._outside("experts", self.matrices[op.operands[at]])
        if at == 0:  # the matrix stands left of a column
            turned = f"turned{matrix.removeprefix('experts')}"
            if not any(each.results == (turned,) for each in self.body):
                self.body.append(Op("", TRANSPOSE, (Ref(matrix), 1, 2), (), (turned,)))
            matrix = turned
        name = f"v{len(self.types)}"
        columns = self.graph.types[op.results[0]].shape[1 if at == 0 else 2]
        self.types[name] = TensorType((columns,), self.graph.types[op.results[0]].dtype)
        self.body.append(Op("", PRODUCT, (Ref(left), Ref(matrix), Ref("ends")), (), (name,)))
        self.products[op.results[0]] = name
        return True

    def _read(self, name: str) -> str:
        """What rows have of outside; where each is repeated for the experts of a token, what is repeated."""
        op = self.producers.get(name)
        source = op.operands[0] if op is not None and op.target == _REPEAT and op.args[2:] == (0,) else name
        inner = self._outside("reads", source)
        kind = self.graph.types[name]
        self.types[inner] = TensorType(kind.shape[1:], kind.dtype)
        return inner

    def _row_op(self, op: Op) -> bool:
        types = self.graph.types
        rows = {name for name in op.operands if name in self.inner or types[name].shape[:1] == (self.num_rows,)}
        if any(types[name].shape[:1] != (self.num_rows,) for name in op.results):
            return False
        if rows & self.matrices.keys() or not is_rowwise(op, types, rows):
            return False
        read = {
            name: self.inner.get(name) or (self._read(name) if name in rows else self._outside("others", name))
            for name in op.operands
        }
        made = in_equal_parts(op.reading(read), self.types.get(read[op.operands[0]], types[op.operands[0]]))
        self._add(without_rows(made, self.num_rows), op.results)
        return True

    def _add(self, op: Op, results: tuple[str, ...]) -> None:
        for name in results:
            kind = self.graph.types[name]
            self.inner[name] = f"v{len(self.types)}"
            self.types[self.inner[name]] = TensorType(kind.shape[1:], kind.dtype)
        self.body.append(
            replace(op, name="", results=tuple(self.inner[name] for name in results), source="", module="")
        )

    def _finish(self, leaving: list[str]) -> Region | None:
        if len(set(leaving)) != 1:
            return None
        result = leaving[0]
        given = {self.ids, *(name for names in self.lists.values() for name in names)}
        ops = tuple(self._slice(result, given))
        inside = {name for op in ops for name in op.results} - {result}
        readers = [op for op in self.graph.ops if not inside.isdisjoint(op.operands)]
        own = {op.name for op in ops}
        shared = {name for name in inside if name not in {*self.inner, *self.matrices, *self.products}}
        is_closed = all(op.name in own for op in readers if not (inside - shared).isdisjoint(op.operands))
        end = self.producers.get(result)
        if end is None or len(end.results) != 1 or not is_closed or inside & given:
            return None
        if result in self.graph.outputs or not any(op.target == PRODUCT for op in self.body):
            return None
        body = tuple(_alive(self.body, self.inner[result]))
        matrices = tuple(self.graph.types[name] for name in self.matrices)
        lists = {name: tuple(each) for name, each in self.lists.items()}
        whole = Body(body, self.inner[result], dict(self.types), moved_bytes(body, self.types))
        return Region(self.ids, lists, ops, whole, end, self.num_experts, matrices)

    def _slice(self, result: str, given: set[str]) -> Iterator[Op]:
        """The ops that compute the result from what is given, in order."""
        needed, chosen = {result}, set[str]()
        for op in reversed(self.graph.ops):
            if not needed.isdisjoint(op.results):
                chosen.add(op.name)
                needed.update(name for name in op.operands if name not in given)
        return (op for op in self.graph.ops if op.name in chosen)


def _alive(body: list[Op], result: str) -> Iterator[Op]:
    """The ops that the result depends on."""
    needed, alive = {result}, set[int]()
    for index in range(len(body) - 1, -1, -1):
        if not needed.isdisjoint(body[index].results):
            alive.add(index)
            needed.update(body[index].operands)
    return (op for index, op in enumerate(body) if index in alive)
