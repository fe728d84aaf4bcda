"""Attention on one piece of a tensor after another, where pieces repeat, becomes attention on a batch of pieces.

Vision models that take the patches of all images in one dim cut queries, keys and values into images, or windows,
attend in each, and put the results together again.  If images are of one size, that is

    cat([attention(q[i], k[i], v[i]) for i in images], patches)   with q, k, v: [1, heads, images * patches, width]

and the same as attention on ``[images, heads, patches, width]``, which has a dim of images that devices can share.
Pieces of several sizes, such as windows at borders, may repeat together: then there is a batch of each of them, and
of neighbors of one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from autopar.ops.family import argument
from autopar.program import Op, Ref
from autopar.trace.graph import Graph
from autopar.trace.passes.cleanup import TO_THE_END, drop_dead_ops
from autopar.trace.passes.masks import ATTENTION
from autopar.trace.passes.rewrites import Writer, rewrite

__all__ = ["batch_alike_pieces"]

_SPLITS = ("aten.split_with_sizes.default", "aten.split.Tensor", "aten.chunk.default")
_MOVES = ("aten.transpose.int", "aten.permute.default")
_TOKENS = 2  # the dim of queries, keys and values that is cut


@dataclass(frozen=True)
class _Pieces:
    """Attention on the pieces of three tensors.

    Args:
        wholes: queries, keys and values, ``[1, heads, tokens, width]``.
        first: attention on the first piece.
        move: of its result, before they are put together; None: there is none.
        sizes: of each piece, in tokens.
    """

    wholes: tuple[str, ...]
    first: Op
    move: Op | None
    sizes: tuple[int, ...]

    @property
    def pattern(self) -> tuple[int, ...]:
        """The fewest sizes that repeat until the end."""
        sizes = self.sizes
        divisors = (n for n in range(1, len(sizes) + 1) if len(sizes) % n == 0)
        return next(sizes[:n] for n in divisors if sizes == sizes[:n] * (len(sizes) // n))

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Sizes of the pattern, and how many neighbors have each."""
        return tuple((size, len(list(run))) for size, run in groupby(self.pattern))


def batch_alike_pieces(graph: Graph) -> Graph:
    """Let attention on pieces that repeat be attention on a batch of them."""
    readers = graph.count_readers()

    def write(writer: Writer, op: Op) -> None:
        pieces = _pieces(graph, readers, op) if op.target == "aten.cat.default" else None
        if pieces is not None and len(pieces.runs) < len(pieces.sizes):
            _write(writer, pieces, op)

    made = rewrite(graph, write)
    return graph if made.ops is graph.ops else drop_dead_ops(made)


def _pieces(graph: Graph, readers: Mapping[str, int], cat: Op) -> _Pieces | None:
    """The pieces whose results `cat` puts together as they were; None if it does anything else."""
    results = _makers(graph, cat.operands)
    moves = results if results and results[0].target in _MOVES else []
    attention = _makers(graph, [name for op in moves for name in op.operands[:1]]) if moves else results
    if len(attention) < 2 or any(op.target != ATTENTION or len(op.operands) != 3 for op in attention):
        return None
    between = [*attention, *moves]
    is_alike = all(_literals(op) == _literals(ops[0]) for ops in (attention, moves) for op in ops)
    wholes = [_whole(graph, [op.operands[place] for op in attention]) for place in range(3)]
    first, move = attention[0], moves[0] if moves else None
    is_along = _dim(cat, 1) == _tokens_behind(move) and not argument(first, 4, "dropout_p", 0.0)
    if not is_alike or not is_along or "" in wholes or any(readers[op.results[0]] > 1 for op in between):
        return None
    return _Pieces(tuple(wholes), first, move, tuple(graph.types[op.operands[0]].shape[_TOKENS] for op in attention))


def _makers(graph: Graph, names: tuple[str, ...] | list[str]) -> list[Op]:
    """The op behind each value; none if not all are computed."""
    made = [graph.producers[name] for name in names if name in graph.producers]
    return made if len(made) == len(names) else []


def _literals(op: Op) -> tuple[object, ...]:
    return op.target, [arg for arg in op.args if not isinstance(arg, Ref)], op.kwargs


def _whole(graph: Graph, names: list[str]) -> str:
    """What was cut into just these values along the tokens of its only row; "" if nothing was."""
    split = graph.producers.get(names[0])
    if split is None or split.target not in _SPLITS or split.results != tuple(names):
        return ""
    shape = graph.types[split.operands[0]].shape
    return split.operands[0] if len(shape) == 4 and shape[0] == 1 and _dim(split, 2) == _TOKENS else ""


def _dim(op: Op, place: int) -> int:
    """The argument that is one of four dims."""
    dim = argument(op, place, "dim", 0)
    assert isinstance(dim, int)
    return dim % 4


def _tokens_behind(move: Op | None) -> int:
    """Where the dim of tokens is after a move."""
    if move is None:
        return _TOKENS
    dims = [0, 1, 2, 3]
    if move.target == "aten.transpose.int":
        one, other = (int(dim) % 4 for dim in move.args[1:3] if isinstance(dim, int))
        dims[one], dims[other] = dims[other], dims[one]
    else:
        order = argument(move, 1, "dims")
        dims = [dim % 4 for dim in order if isinstance(dim, int)] if isinstance(order, tuple) else dims
    return dims.index(_TOKENS)


def _write(writer: Writer, pieces: _Pieces, cat: Op) -> None:
    """The ops that attend in batches of pieces, for `cat`."""
    first, tokens = pieces.first, sum(pieces.pattern)
    count = len(pieces.sizes) // len(pieces.pattern)
    batches = [_batch(writer, Ref(name), count) for name in pieces.wholes]
    kind = writer.type_of(Ref(first.results[0]))
    _, heads, _, width = kind.shape
    made: list[Ref] = []
    start = 0
    for size, run in pieces.runs:
        stop = start + size * run
        own = [_apart(writer, _cut(writer, batch, start, stop), run) for batch in batches]
        result = replace(kind, shape=(count * run, heads, size, width))
        made.append(_joined(writer, writer.add(ATTENTION, (*own, *first.args[3:]), result, first.kwargs), run))
        start = stop
    x = made[0]
    if len(made) > 1:
        x = writer.add("aten.cat.default", (tuple(made), _TOKENS), replace(kind, shape=(count, heads, tokens, width)))
    x = writer.add("aten.transpose.int", (x, 0, 1), replace(kind, shape=(heads, count, tokens, width)))
    shape = (1, heads, count * tokens, width)
    move = pieces.move
    x = writer.add("aten.reshape.default", (x, shape), cat.results[0] if move is None else replace(kind, shape=shape))
    if move is not None:
        writer.add(move.target, (x, *move.args[1:]), cat.results[0], move.kwargs)


def _batch(writer: Writer, whole: Ref, count: int) -> Ref:
    """``[1, heads, count * tokens, width]`` -> ``[count, heads, tokens, width]``."""
    kind = writer.type_of(whole)
    _, heads, tokens, width = kind.shape
    shape = (heads, count, tokens // count, width)
    cut = _reshaped(writer, whole, shape)
    return writer.add("aten.transpose.int", (cut, 0, 1), replace(kind, shape=(count, heads, *shape[2:])))


def _cut(writer: Writer, batch: Ref, start: int, stop: int) -> Ref:
    """These tokens of each piece of a batch."""
    kind = writer.type_of(batch)
    if stop - start == kind.shape[_TOKENS]:
        return batch
    shape = (*kind.shape[:_TOKENS], stop - start, kind.shape[3])
    end = TO_THE_END if stop == kind.shape[_TOKENS] else stop
    return writer.add("aten.slice.Tensor", (batch, _TOKENS, start, end), replace(kind, shape=shape))


def _apart(writer: Writer, batch: Ref, run: int) -> Ref:
    """``[count, heads, run * size, width]`` -> ``[count * run, heads, size, width]``."""
    if run == 1:
        return batch
    kind = writer.type_of(batch)
    count, heads, tokens, width = kind.shape
    x = _reshaped(writer, batch, (count, heads, run, tokens // run, width))
    x = writer.add("aten.transpose.int", (x, 1, 2), replace(kind, shape=(count, run, heads, tokens // run, width)))
    return _reshaped(writer, x, (count * run, heads, tokens // run, width))


def _joined(writer: Writer, pieces: Ref, run: int) -> Ref:
    """``[count * run, heads, size, width]`` -> ``[count, heads, run * size, width]``."""
    if run == 1:
        return pieces
    kind = writer.type_of(pieces)
    every, heads, size, width = kind.shape
    x = _reshaped(writer, pieces, (every // run, run, heads, size, width))
    x = writer.add("aten.transpose.int", (x, 1, 2), replace(kind, shape=(every // run, heads, run, size, width)))
    return _reshaped(writer, x, (every // run, heads, run * size, width))


def _reshaped(writer: Writer, x: Ref, shape: tuple[int, ...]) -> Ref:
    return writer.add("aten.reshape.default", (x, shape), replace(writer.type_of(x), shape=shape))
