"""Other forms of heads and losses: products with a transposed matrix, and picked log-probabilities.

They become the ops that everything else knows: ``aten.linear``, and ``autopar.cross_entropy`` of each position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ops.family import argument
from autopar.program import Arg, Op, Ref
from autopar.trace.graph import Graph
from autopar.trace.passes.rewrites import LOG_SOFTMAXES, Writer, rewrite

__all__ = ["rewrite_picked_log_probabilities", "rewrite_transposed_products"]

_PRODUCTS = ("aten.matmul.default", "aten.mm.default")
_EINSUM = "aten.einsum.default"
_NO_INDEX = -(1 << 63)
"""An index that no target has: a position that is picked always counts."""


def rewrite_transposed_products(graph: Graph) -> Graph:
    """``x @ w.t()`` of a matrix w, and the same as an einsum, become ``linear(x, w)``."""
    producers = graph.producers

    def write(writer: Writer, op: Op) -> None:
        factors = _factors(writer, op, producers)
        if factors is None:
            return
        x, matrix = (writer.type_of(arg) for arg in factors)
        if len(x.shape) > 1 and len(matrix.shape) == 2 and x.dtype == matrix.dtype:
            writer.add("aten.linear.default", factors, op.results[0])

    return rewrite(graph, write)


def _factors(writer: Writer, op: Op, producers: Mapping[str, Op]) -> tuple[Ref, Ref] | None:
    """The rows ``[..., k]`` and the matrix ``[n, k]`` of a product ``[..., n]``, where `op` is one."""
    if op.target in _PRODUCTS:
        rows, turned = op.args[:2]
        maker = producers.get(turned.name) if isinstance(turned, Ref) else None
        if isinstance(rows, Ref) and maker is not None and _is_transposition(writer, maker):
            return rows, Ref(maker.operands[0])
    elif op.target == _EINSUM and len(op.operands) == 2 and len(op.args) == 2 and isinstance(op.args[0], str):
        terms, _, result = op.args[0].replace(" ", "").partition("->")
        rows, _, matrix = terms.partition(",")
        letters = {*rows, *matrix}
        is_plain = len(letters) == len(rows) + 1 and all(letter.isalpha() for letter in letters)
        if is_plain and len(matrix) == 2 and matrix[1] == rows[-1] and result == rows[:-1] + matrix[0]:
            return Ref(op.operands[0]), Ref(op.operands[1])
    return None


def _is_transposition(writer: Writer, op: Op) -> bool:
    """Whether the op swaps both dims of a matrix."""
    if not op.operands or len(writer.type_of(Ref(op.operands[0])).shape) != 2:
        return False
    if op.target == "aten.permute.default":
        order = argument(op, 1, "dims")
        return isinstance(order, tuple) and tuple(dim % 2 for dim in order if isinstance(dim, int)) == (1, 0)
    if op.target == "aten.transpose.int":
        return sorted(dim % 2 for dim in op.args[1:3] if isinstance(dim, int)) == [0, 1]
    return op.target in ("aten.t.default", "aten.numpy_T.default", "aten.mT.default")


def rewrite_picked_log_probabilities(graph: Graph) -> Graph:
    """``log_softmax(x, -1).gather(-1, y.unsqueeze(-1))`` becomes minus the cross entropy of each position."""
    producers, readers = graph.producers, graph.count_readers()

    def write(writer: Writer, op: Op) -> None:
        softmax = producers.get(op.operands[0]) if op.target == "aten.gather.default" else None
        if softmax is None or softmax.target not in LOG_SOFTMAXES or readers[softmax.results[0]] != 1:
            return
        logits, scores = writer.type_of(softmax.args[0]), writer.type_of(op.args[0])
        index = writer.type_of(op.args[2])
        last = len(logits.shape) - 1
        if logits.dtype != scores.dtype or index.shape != (*logits.shape[:-1], 1) or last < 1:
            return
        if not _is_dim(softmax.args[1], last) or not _is_dim(op.args[1], last):
            return
        target = _without_last_dim(writer, op.args[2], producers)
        each = replace(scores, shape=logits.shape[:-1])
        args = (softmax.args[0], target, None, last, _NO_INDEX, 0.0, "none")
        losses = writer.add("autopar.cross_entropy", args, each)
        picked = writer.add("aten.neg.default", (losses,), each)
        writer.add("aten.unsqueeze.default", (picked, last), op.results[0])

    return rewrite(graph, write)


def _is_dim(arg: Arg, dim: int) -> bool:
    return isinstance(arg, int) and arg % (dim + 1) == dim


def _without_last_dim(writer: Writer, index: Arg, producers: Mapping[str, Op]) -> Ref:
    """`index`, whose last dim has one place, without it."""
    assert isinstance(index, Ref)
    kind = writer.type_of(index)
    maker = producers.get(index.name)
    if maker is not None and maker.target == "aten.unsqueeze.default":
        source = Ref(maker.operands[0])
        if writer.type_of(source).shape == kind.shape[:-1] and _is_dim(maker.args[1], len(kind.shape) - 1):
            return source
    return writer.add("aten.squeeze.dim", (index, len(kind.shape) - 1), replace(kind, shape=kind.shape[:-1]))
