"""Model FLOPs of a step, as the usual formula counts them: the numerator of model FLOPs utilization (MFU).

::

    model FLOPs = sum over products:   forward x (1 + operands of the product that need a gradient)
                + sum over attention:  forward x (1 + 2 if it needs a gradient), causal attention half of the square

Of a language model that is trained whole this is ``6 x parameters of matrices x tokens`` and attention's part, as in
appendix B of PaLM (https://arxiv.org/abs/2204.02311), but for attention counted causal.  Nothing that runs again in
backward counts, whoever runs it again; frozen weights (LoRA) save the product of their gradient.
"""

from __future__ import annotations

from collections import Counter

from autopar.ops import Work, count_work, family_of
from autopar.program import Op, Program, TensorType
from autopar.step.training import TrainingSpec, is_differentiable

__all__ = ["model_flops"]

_OF_PRODUCT = 2  # operands that the product rule gives a gradient each; in attention as many for each of its products


def model_flops(program: Program, training: TrainingSpec) -> dict[str, float]:
    """Dtype that arithmetic is done in -> its model FLOPs in one step over the whole batch, on all devices together."""
    totals: dict[str, float] = {}
    times = Counter(layer.kind for layer in program.layers)
    for layer in program.kinds:
        for op in layer.ops:
            works = _works(program, op)
            flops = sum(count * work.flops for count, work in works)
            if flops:
                passes = 1 + _gradients(program, op, works, training)
                dtype = works[0][1].dtype
                totals[dtype] = totals.get(dtype, 0.0) + times[layer.kind] * flops * passes
    return totals


def _works(program: Program, op: Op) -> list[tuple[int, Work]]:
    """The products and attention of one forward, and how many times they run."""
    operands, results = _types(program, op.operands), _types(program, op.results)
    calls = family_of(op.target).calls
    works = (
        [(1, count_work(op, operands, results))]
        if calls is None
        else [(call.times, count_work(call.op, call.operands, call.results)) for call in calls(op, operands, results)]
    )
    return [(times, work) for times, work in works if work.is_counted_in_flops]


def _types(program: Program, names: tuple[str, ...]) -> tuple[TensorType, ...]:
    return tuple(map(program.type_of, names))


def _gradients(program: Program, op: Op, works: list[tuple[int, Work]], training: TrainingSpec) -> int:
    """How many times as many FLOPs as the forward the backward has: a product for each operand with a gradient."""
    if not is_differentiable(program, op, training):
        return 0
    if works[0][1].kind == "attention":
        return _OF_PRODUCT
    # What is added to a product (a bias) has fewer dims, or is behind the two that are multiplied.
    trained = (name for name in op.operands if program.values[name].requires_grad)
    return min(_OF_PRODUCT, sum(len(program.type_of(name).shape) > 1 for name in trained))
