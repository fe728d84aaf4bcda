"""Operands of dtypes that an op refuses, found when a model is traced: torch traces some of them without a word.

Without this, a step would fail in its middle, after other collectives, and not when the inputs come.
"""

from __future__ import annotations

from autopar.errors import ExampleInputsError
from autopar.program import Op
from autopar.trace.calls.signature import CallForm
from autopar.trace.graph import Graph

__all__ = ["check_dtypes"]

# What torch 2.9 to 2.14 refuse to run, but trace on tensors without values; convolutions and attention are refused
# there, too, and elementwise ops promote their operands.
_OF_ONE_DTYPE = frozenset(
    f"aten.{name}.default"
    for name in ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "addmv", "dot", "binary_cross_entropy")
)
_WITH_CLASSES = frozenset(
    f"aten.{name}.default" for name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
)
_CLASSES = ("int64", "uint8")
# The first operand of these has to be floating: the kernels of CPUs and of CUDA refuse all others, whatever the shape.
# Norms, and what is decomposed, are refused when they are traced.
_OF_FLOATS = frozenset({
    "softmax", "log_softmax", "gelu", "silu", "mish", "softplus", "hardswish", "hardsigmoid", "log_sigmoid", "glu",
    "rrelu", "std", "var", "cross_entropy_loss", "scaled_dot_product_attention",
})  # fmt: skip
_INTEGERS = ("int", "uint", "bool")


def check_dtypes(graph: Graph, form: CallForm) -> None:
    """Raise ExampleInputsError if an op of `graph`, as captured from a call of this form, can't run."""
    for op in graph.ops:
        problem = _problem(graph, op)
        if problem:
            raise ExampleInputsError(
                f"{op.source or 'the model'}: the model fails on the example inputs: {problem}. It got "
                f"{form.inputs_text} and is called as {form.signature_text}"
            )


def _problem(graph: Graph, op: Op) -> str:
    dtypes = [graph.types[name].dtype for name in op.operands]
    name = op.target.split(".")[1]
    if op.target in _OF_ONE_DTYPE and len(set(dtypes)) > 1:
        return f"{name} takes tensors of one dtype, not of {', '.join(dtypes)}: convert the input, or in forward"
    # With a dtype of its own, softmax converts.
    if op.target.startswith("aten.") and name in _OF_FLOATS and dtypes[0].startswith(_INTEGERS) and not _has_dtype(op):
        return f"{name} takes floating-point numbers, not {dtypes[0]}: convert the input, or in forward"
    if op.target not in _WITH_CLASSES:
        return ""
    target = graph.types[op.operands[1]]
    if target.is_floating or target.dtype in _CLASSES:
        return ""
    return f"{name} takes classes as int64, not as {target.dtype}: pass labels.long()"


def _has_dtype(op: Op) -> bool:
    """Whether the call names a dtype."""
    arguments = (*op.args, *(value for _, value in op.kwargs))
    return any(isinstance(each, str) and each.startswith("torch.") for each in arguments)
