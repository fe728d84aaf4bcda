"""Products of rows that a view merges from several dims keep the dims apart.

``nn.MultiheadAttention`` computes its last product on ``[tokens * batch, features]``, tokens first, and splits the rows
into ``[tokens, batch, features]`` behind it.  A slice of the batch is no slice of merged rows, so devices that share
the batch would exchange activations in every layer, and microbatches would not be exact.  ``linear`` takes any number
of leading dims, and merged rows are in the order of separate ones: the view moves from behind the product to before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.program import Op, TensorType
from autopar.trace.graph import Graph
from autopar.trace.passes.cleanup import bypass, is_elementwise

__all__ = ["keep_rows_apart"]

_PRODUCT, _VIEW = "aten.linear.default", "aten.reshape.default"


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
