"""Plain numbers that are added to the losses of a model, written so that losses stay sums over the batch.

``sum(losses)`` begins with 0, ``aux = x.new_zeros(())`` reads no entry of ``x``, and ``1 - score`` is a term more.
As torch records them, the first and the last need the whole loss, and the second the whole ``x``: they would keep
microbatches from passing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.ops import filled_with
from autopar.ops.family import packet_name
from autopar.program import Arg, Op, TensorType
from autopar.trace.gradients import differentiable
from autopar.trace.graph import Graph
from autopar.trace.passes.cleanup import bypass
from autopar.trace.passes.rewrites import Writer, rewrite

__all__ = ["is_unlike", "rewrite_created_like", "rewrite_number_terms"]

_SUMS = {"aten.add.Tensor": 1, "aten.add.Scalar": 1, "aten.sub.Tensor": -1, "aten.sub.Scalar": -1}
_DIFFERENCES = ("aten.rsub.Scalar", "aten.rsub.Tensor")
# By dtype of a single number, whether what is added to it is rounded to this dtype before it is added, on every device.
_ROUNDED_FIRST = {"float32": True, "float64": True, "bfloat16": False, "float16": False}


def rewrite_number_terms(graph: Graph) -> Graph:
    """Leave out a 0 that is added to a single number, and make another number that is added to it a tensor.

    Torch's own op rounds the number to the tensor's dtype in 32 and 64 bits, as a constant of it is.  In 16 bits its
    kernels for GPUs compute with the number itself, so only numbers that the dtype has exactly are made tensors.
    Numbers beside what has no gradient, as in ``mask.sum() + 1e-6``, are part of no loss, but of what divides it.
    """
    trained = differentiable(graph)

    def is_zero(op: Op) -> bool:
        return op.target in _SUMS and _term(op, graph) == 0.0

    def write(writer: Writer, op: Op) -> None:
        value = _term(op, graph)
        if value is None or op.results[0] not in trained:
            return
        kind, x = graph.types[op.results[0]], op.args[0]
        if op.target in _DIFFERENCES:
            x = writer.add("aten.neg.default", (x,), kind)
        constant = writer.add("aten.full.default", ((), value), kind, (("dtype", f"torch.{kind.dtype}"),))
        writer.add("aten.add.Tensor", (x, constant), op.results[0])

    return rewrite(bypass(graph, {op.name for op in graph.ops if is_zero(op)}), write)


def _is_rounded(value: float, dtype: str) -> bool:
    return _ROUNDED_FIRST[dtype] or torch.tensor(value, dtype=getattr(torch, dtype)).item() == value


def _term(op: Op, graph: Graph) -> float | None:
    """The number that the op adds to a single number, or to its negative; None if it does something else."""
    is_difference = op.target in _DIFFERENCES
    if not (op.target in _SUMS or is_difference) or len(op.operands) != 1 or len(op.args) < 2:
        return None
    value, kind = _number(op.args[1]), graph.types[op.results[0]]
    is_number = kind.shape == () and kind.dtype in _ROUNDED_FIRST and graph.types[op.operands[0]] == kind
    if value is None or not is_number or len(op.args) > 2 or op.kwargs:
        return None
    if abs(value) > torch.finfo(getattr(torch, kind.dtype)).max or not _is_rounded(value, kind.dtype):
        return None
    return value if is_difference else _SUMS[op.target] * value


def rewrite_created_like(graph: Graph) -> Graph:
    """``x.new_zeros(sizes)`` with none of the sizes of ``x`` becomes ``full(sizes)``, and so does ``zeros_like(x)`` of
    a single number: then it depends on no values of ``x``.
    """

    def write(writer: Writer, op: Op) -> None:
        value, kind = _number(filled_with(op)), graph.types[op.results[0]]
        if value is None or len(op.operands) != 1 or not _is_unlike(op, graph.types[op.operands[0]], kind):
            return
        number = bool(value) if kind.dtype == "bool" else value if kind.is_floating else int(value)
        writer.add("aten.full.default", (kind.shape, number), op.results[0], (("dtype", f"torch.{kind.dtype}"),))

    return rewrite(graph, write)


def _is_unlike(op: Op, given: TensorType, made: TensorType) -> bool:
    """Whether the result has no dim that is split as the operand's is."""
    if "complex" in made.dtype:
        return False
    if packet_name(op.target).endswith("_like"):  # dims are split as the operand's are
        return made.shape == ()
    return is_unlike(given.shape, made.shape)


def is_unlike(given: Sequence[int], made: Sequence[int]) -> bool:
    """Whether ``x.new_zeros(made)`` of an x of shape `given` has no dim that is split as one of x is."""
    return len(given) != len(made) or all(a != b for a, b in zip(given, made, strict=True))


def _number(value: Arg) -> float | None:
    """The number, if it is a finite one."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value if math.isfinite(value) else None
