"""What a loop in Python reads and writes one entry at a time, over time steps or chunks, becomes one op each.

As written, every iteration of ``out[:, i] = f(x[:, i])`` copies all of `out`, and in backward fills a tensor of the
size of `x`.  ``x.unbind(1)`` and ``torch.stack(parts, 1)`` have the same values in one pass over memory, and the
iterations no longer differ by a number, so that they are layers of one kind.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.ops.family import argument
from autopar.program import Op, Ref, TensorType
from autopar.trace.graph import Graph, Names, rename
from autopar.trace.passes.cleanup import drop_dead_ops, slice_bounds
from autopar.trace.passes.rewrites import Writer, rewrite

__all__ = ["join_python_loops"]

_SELECT = "aten.select.int"
_WRITES = {"aten.select_scatter.default": "aten.stack.default", "aten.slice_scatter.default": "aten.cat.default"}
_FEWEST = 4  # entries of a loop: the three of ``qkv[0], qkv[1], qkv[2]`` stay as their author wrote them


def join_python_loops(graph: Graph) -> Graph:
    """Join the reads and writes of single entries that together have most of a tensor."""
    for join in (_read_what_was_written, _join_writes, _unbind_reads):
        made = join(graph)
        graph = graph if made is graph else drop_dead_ops(made)
    return graph


def _read_what_was_written(graph: Graph) -> Graph:
    """Read an entry from where it was computed, not from the tensor that it was written to."""
    producers = graph.producers
    gone: dict[str, str] = {}

    def step(op: Op) -> Iterable[Op] | None:
        entry = _entry(op, graph) if op.target == _SELECT else None
        if entry is None:
            return None
        source = op.operands[0]
        while (write := producers.get(source)) is not None and (part := _written(write, graph)) is not None:
            if not write.target.startswith("aten.select") or part.dim != entry[0]:
                break
            if part.start == entry[1]:
                gone[op.results[0]] = part.source
                return ()
            source = write.operands[0]
        return None if source == op.operands[0] else [replace(op, args=(Ref(source), *op.args[1:]))]

    return rename(graph.rewrite(step), gone)


@dataclass(frozen=True)
class _Part:
    """What an op writes to entries `start` to `stop` along `dim`."""

    dim: int
    start: int
    stop: int
    source: str


def _entry(op: Op, graph: Graph) -> tuple[int, int] | None:
    """The dim and the entry that a select reads, counted from the front."""
    shape = graph.types[op.operands[0]].shape
    dim, index = argument(op, 1, "dim", 0), argument(op, 2, "index")
    if not isinstance(dim, int) or not isinstance(index, int) or op.kwargs:
        return None
    dim %= len(shape)
    return dim, index % shape[dim]


def _written(op: Op, graph: Graph) -> _Part | None:
    """The part that `op` writes; None unless it writes one without gaps, in the dtype of the whole."""
    if op.target not in _WRITES or op.kwargs or len(op.operands) < 2:
        return None
    result, source = graph.types[op.results[0]], op.operands[1]
    as_read = replace(op, args=(op.args[0], *op.args[2:]), kwargs=())
    if graph.types[source].dtype != result.dtype:
        return None
    if op.target.startswith("aten.select"):
        entry = _entry(as_read, graph)
        return entry and _Part(entry[0], entry[1], entry[1] + 1, source)
    bounds = slice_bounds(as_read, result)
    return bounds and _Part(*bounds, source)


def _join_writes(graph: Graph) -> Graph:
    """Writes that together overwrite a tensor put their sources together: what was in it is never read.

    Where entries are left of which there are fewer than were written, these are read from it.
    """
    counts = graph.count_readers()
    continued = {op.operands[0] for op in graph.ops if _continues(graph, op) and counts[op.operands[0]] == 1}

    def write(writer: Writer, op: Op) -> None:
        part = _written(op, graph)
        if part is None:
            return
        is_all = part.stop - part.start == graph.types[op.results[0]].shape[part.dim]
        if op.results[0] in continued and not is_all:
            return
        base, parts = _parts(graph, continued, op)
        if not parts:
            return
        whole, dim = graph.types[op.results[0]], parts[0].dim
        size, covered = whole.shape[dim], sum(part.stop - part.start for part in parts)
        pieces = {part.start: Ref(part.source) for part in parts}
        if covered < size:
            if op.target.startswith("aten.slice") or covered < max(_FEWEST, size / 2):
                return
            entry = replace(whole, shape=(*whole.shape[:dim], *whole.shape[dim + 1 :]))
            left = [index for index in range(size) if index not in pieces]
            pieces |= {index: writer.add(_SELECT, (Ref(base), dim, index), entry) for index in left}
        writer.add(_WRITES[op.target], (tuple(pieces[start] for start in sorted(pieces)), dim), op.results[0])

    return rewrite(graph, write)


def _continues(graph: Graph, op: Op) -> bool:
    """Whether it writes along the same dim as the op before it, whose result it writes to."""
    before = graph.producers.get(op.operands[0]) if op.target in _WRITES else None
    if before is None or before.target != op.target:
        return False
    parts = _written(before, graph), _written(op, graph)
    return parts[0] is not None and parts[1] is not None and parts[0].dim == parts[1].dim


def _parts(graph: Graph, continued: Container[str], last: Op) -> tuple[str, Sequence[_Part]]:
    """What was written until `last`, and to which tensor; what was written over later is left out."""
    parts: dict[int, _Part] = {}
    op, base, covered = last, last.results[0], 0
    while (part := _written(op, graph)) is not None:
        before = parts.get(part.start)
        if before is None:
            parts[part.start] = part
            covered += part.stop - part.start
        elif part.stop > before.stop:
            break
        base = op.operands[0]
        if covered >= graph.types[base].shape[part.dim] or base not in continued:
            break
        op = graph.producers[base]
    ordered = sorted(parts.values(), key=lambda each: each.start)
    overlap = any(first.stop > second.start for first, second in pairwise(ordered))
    return base, [] if overlap else ordered


def _unbind_reads(graph: Graph) -> Graph:
    """Entries that are read one by one come from one op, if they are at least half of those that there are.

    Not those of parameters, as of layers whose weights are in one tensor: each is read where its layer runs.
    """
    reads: dict[tuple[str, int], dict[int, list[Op]]] = {}
    of_inputs = set(graph.inputs)
    for op in graph.ops:
        if of_inputs.isdisjoint(op.operands):
            continue
        of_inputs.update(op.results)
        if op.target == _SELECT and (entry := _entry(op, graph)) is not None:
            reads.setdefault((op.operands[0], entry[0]), {}).setdefault(entry[1], []).append(op)
    names, types = Names(graph), dict[str, TensorType]()
    made: dict[str, Op] = {}
    gone: dict[str, str] = {}
    for (source, dim), entries in reads.items():
        size = graph.types[source].shape[dim]
        if len(entries) < max(_FEWEST, size / 2):
            continue
        first = min((op for ops in entries.values() for op in ops), key=lambda op: graph.places[op.name])
        kind = graph.types[first.results[0]]
        results = tuple(
            entries[index][0].results[0] if index in entries else names.fresh(f"{first.name}_{index}")
            for index in range(size)
        )
        types.update(dict.fromkeys(results, kind))
        made[first.name] = replace(
            first, name=names.fresh("unbind"), target="aten.unbind.int", args=(Ref(source), dim), results=results
        )
        gone |= {op.results[0]: ops[0].results[0] for ops in entries.values() for op in ops[1:]}
    joined = {*gone, *(name for op in made.values() for name in op.results)}

    def step(op: Op) -> Iterable[Op] | None:
        if op.name in made:
            return [made[op.name]]
        return () if op.target == _SELECT and op.results[0] in joined else None

    return rename(graph.rewrite(step).with_types(types), gone) if made else graph
