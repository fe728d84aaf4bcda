"""Products of rows that a view merges from several dims keep the dims apart.

``nn.MultiheadAttention`` computes its last product on ``[tokens * batch, features]``, tokens first, and splits the rows
into ``[tokens, batch, features]`` behind it.  A slice of the batch is no slice of merged rows, so devices that share
the batch would exchange activations in every layer, and microbatches would not be exact.  ``linear`` takes any number
of leading dims, and merged rows are in the order of separate ones: the view moves from behind the product to before it.

A mixture whose experts compute all tokens may have ``tokens.repeat(experts, 1) * weights.reshape(-1, 1)``, in rows of
``[experts * tokens, features]``, which it splits into ``[experts, tokens, features]``.  A slice of the tokens is none
of these rows either; with the dims apart, the tokens are not even repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.graph import Graph
from autopar.trace.passes.cleanup import bypass, is_elementwise
from autopar.trace.passes.constants import broadcast_shape
from autopar.trace.passes.rewrites import Writer, rewrite

__all__ = ["keep_rows_apart", "keep_terms_apart"]

_PRODUCT, _VIEW, _REPEAT = "aten.linear.default", "aten.reshape.default", "aten.repeat.default"


def keep_rows_apart(graph: Graph) -> Graph:
    """Let a product of merged rows ``[n, k]`` read rows ``[a, b, k]``, if that is how its result is split behind it.

    Ops that work on each element of one tensor may be between the product and either view.
    """
    readers = graph.count_readers()
    types: dict[str, TensorType] = {}
    shapes: dict[str, tuple[int, ...]] = {}  # of views before a product
    splits: set[str] = set()  # views behind one
    for op in graph.ops:
        chain = _between_views(graph, op, readers) if op.target == _PRODUCT else ()
        if not chain:
            continue
        rows = graph.types[chain[-1].results[0]].shape[:-1]
        for each in chain[:-1]:
            kind = graph.types[each.results[0]]
            types[each.results[0]] = replace(kind, shape=(*rows, kind.shape[-1]))
        shapes[chain[0].name] = types[chain[0].results[0]].shape
        splits.add(chain[-1].name)
    if not splits:
        return graph
    apart = graph.rewrite(lambda op: [replace(op, args=(op.args[0], shapes[op.name]))] if op.name in shapes else None)
    return bypass(apart.with_types(types), splits)


def _between_views(graph: Graph, product: Op, readers: Mapping[str, int]) -> tuple[Op, ...]:
    """The ops from a view that merges rows, by way of `product`, to a view that splits them; empty: there are none."""
    before, behind = [product], [product]
    while before[-1].target != _VIEW:
        source = graph.producers.get(before[-1].operands[0])
        if source is None or readers[source.results[0]] != 1 or not _keeps_rows(source):
            return ()
        before.append(source)
    while behind[-1].target != _VIEW:
        places = graph.readers.get(behind[-1].results[0], ())
        reader = graph.ops[places[0]] if places and readers[behind[-1].results[0]] == 1 else None
        if reader is None or not _keeps_rows(reader):
            return ()
        behind.append(reader)
    source, merged, result, split = (
        graph.types[name].shape
        for name in (before[-1].operands[0], before[-1].results[0], product.results[0], behind[-1].results[0])
    )
    is_merged = len(source) > len(merged) == len(result) == 2 < len(split) and split[-1] == result[-1]
    return (*before[::-1], *behind[1:]) if is_merged else ()


def _keeps_rows(op: Op) -> bool:
    return op.target == _VIEW or (is_elementwise(op) and len(op.operands) == 1)


def keep_terms_apart(graph: Graph) -> Graph:
    """Let elementwise ops on merged rows ``[a * b, ...]`` read rows ``[a, b, ...]``, if a view behind them splits
    theirs so, and all that they read was merged so, or repeated.
    """
    readers, producers = graph.count_readers(), graph.producers

    def write(writer: Writer, op: Op) -> None:
        maker = producers.get(op.operands[0]) if op.target == _VIEW else None
        if maker is None or not is_elementwise(maker) or readers[op.operands[0]] != 1:
            return
        merged, shape = graph.types[op.operands[0]].shape, graph.types[op.results[0]].shape
        dims = shape[: len(shape) - len(merged) + 1]
        if len(dims) < 2 or shape != (*dims, *merged[1:]) or prod(dims) != merged[0]:
            return
        apart = _RowsApart(graph, readers, dims)
        if apart.shape_of(maker) == shape:
            apart.write(writer, maker, op.results[0])

    return rewrite(graph, write)


@dataclass(frozen=True)
class _RowsApart:
    """Merged rows of a graph as rows of several dims.

    Args:
        graph: where they are merged.
        readers: how often each of its values is read.
        dims: of the rows.
    """

    graph: Graph
    readers: Mapping[str, int]
    dims: tuple[int, ...]

    def shape_of(self, op: Op) -> tuple[int, ...] | None:
        """What an elementwise op gives if it reads rows that are repeated or merged before; None: there are others."""
        rank = len(self.graph.types[op.results[0]].shape)
        shapes = [self._shape(name, rank) for name in op.operands]
        known = [each for each in shapes if each is not None]
        return broadcast_shape(known) if len(op.results) == 1 and len(known) == len(shapes) else None

    def _shape(self, name: str, rank: int) -> tuple[int, ...] | None:
        """That of a value as rows apart; None: they were not merged."""
        own, maker = self.graph.types[name].shape, self.graph.producers.get(name)
        if len(own) < rank or own[0] == 1:
            return own
        if maker is None or own[0] != prod(self.dims):
            return None
        source: tuple[int, ...] = self.graph.types[maker.operands[0]].shape if maker.operands else ()
        if maker.target == _VIEW and source[: len(self.dims)] == self.dims:
            return (*self.dims, *own[1:])
        if maker.target == _REPEAT:
            return source if source == (*self.dims[1:], *own[1:]) else None
        return self.shape_of(maker) if is_elementwise(maker) and self.readers[name] == 1 else None

    def write(self, writer: Writer, op: Op, result: TensorType | str) -> Ref:
        """Append such an op."""
        rank = len(self.graph.types[op.results[0]].shape)
        args = [self._apart(writer, arg, rank) if isinstance(arg, Ref) else arg for arg in op.args]
        return writer.add(op.target, args, result, op.kwargs)

    def _apart(self, writer: Writer, arg: Ref, rank: int) -> Arg:
        kind, shape = self.graph.types[arg.name], self._shape(arg.name, rank)
        if shape is None or shape == kind.shape:
            return arg
        maker = self.graph.producers[arg.name]
        source = Ref(maker.operands[0])
        if maker.target == _REPEAT or self.graph.types[source.name].shape == shape:
            return source
        if maker.target == _VIEW:
            return writer.add(_VIEW, (source, shape), replace(kind, shape=shape))
        return self.write(writer, maker, replace(kind, shape=shape))
