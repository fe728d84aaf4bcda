"""Writes to parts of complex tensors, as of modes of a spectrum, written as those of real ones.

A write in place becomes an op that returns the whole tensor, such as ``slice_scatter``.  torch takes the gradient of
the write itself, but has none of these ops for complex numbers.  Of their real and imaginary parts, a last dim, it has.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.program import Arg, Op, TensorType
from autopar.trace.graph import Graph
from autopar.trace.passes.rewrites import Writer, rewrite

__all__ = ["rewrite_complex_writes"]

_DIAGONAL = "aten.diagonal_scatter.default"
_DEFAULTS: dict[str, tuple[Arg, ...]] = {
    "aten.slice_scatter.default": (0,), "aten.select_scatter.default": (), _DIAGONAL: (0, 0, 1),
}  # fmt: skip
"""What follows the tensors in arguments that are left out, as far as it has dims."""
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def rewrite_complex_writes(graph: Graph) -> Graph:
    """Have writes to parts of complex tensors write to their real and imaginary parts."""

    def write(writer: Writer, op: Op) -> None:
        if op.target not in _DEFAULTS or op.kwargs:
            return
        result = graph.types[op.results[0]]
        if result.dtype not in _PARTS or any(graph.types[name].dtype != result.dtype for name in op.operands):
            return
        target, source = (_as_real(writer, arg) for arg in op.args[:2])
        if op.target == _DIAGONAL:  # a diagonal is the last dim of what it is read to
            kind, last = writer.type_of(source), len(result.shape) - 1
            turned = replace(kind, shape=(*kind.shape[:-2], 2, kind.shape[-2]))
            source = writer.add("aten.transpose.int", (source, last - 1, last), turned)
        given = _counted_from_first(op, len(result.shape))
        written = writer.add(op.target, (target, source, *given), _real_type(result))
        writer.add("aten.view_as_complex.default", (written,), op.results[0])

    return rewrite(graph, write)


def _as_real(writer: Writer, x: Arg) -> Arg:
    kind = writer.type_of(x)
    resolved = writer.add("aten.resolve_conj.default", (x,), kind)  # a conjugate is a flag of its tensor
    return writer.add("aten.view_as_real.default", (resolved,), _real_type(kind))


def _real_type(kind: TensorType) -> TensorType:
    return replace(kind, shape=(*kind.shape, 2), dtype=_PARTS[kind.dtype])


def _counted_from_first(op: Op, num_dims: int) -> tuple[Arg, ...]:
    """What follows the tensors in the arguments of `op`, with dims that don't count from the last one."""
    given = (*op.args[2:], *_DEFAULTS[op.target][len(op.args) - 2 :])
    dims = (1, 2) if op.target == _DIAGONAL else (0,)
    return tuple(x % num_dims if at in dims and isinstance(x, int) else x for at, x in enumerate(given))
