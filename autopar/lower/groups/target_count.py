"""The number of targets that count in a call's loss, known before the step runs: the divisor of its mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.lower.kernels import run_ops
from autopar.program import Op, Program

__all__ = ["count_targets", "counting_ops"]

_DENOMINATOR = "autopar.cross_entropy_denominator"


def counting_ops(program: Program) -> tuple[Op, ...]:
    """The ops that compute from inputs alone what the loss, a mean over targets, divides by; none if it is no such
    mean, or weights of classes count.
    """
    made_by = {result: op for layer in program.layers for op in layer.ops for result in op.results}
    loss = made_by.get(program.loss)
    if loss is None or loss.target != "aten.div.Tensor" or len(loss.operands) != 2:
        return ()
    terms, count = (made_by.get(name) for name in loss.operands)
    if terms is None or count is None or count.target != _DENOMINATOR or "cross_entropy" not in terms.target:
        return ()
    counting: dict[str, Op] = {}
    pending = [count]
    while pending:
        op = pending.pop()
        counting[op.name] = op
        for name in op.operands:
            if name in made_by:
                pending.append(made_by[name])
            elif name not in program.inputs:
                return ()
    return tuple(op for layer in program.layers for op in layer.ops if op.name in counting)


@torch.no_grad()
def count_targets(program: Program, ops: tuple[Op, ...], tensors: Mapping[str, Tensor]) -> float:
    """What `counting_ops` give for the inputs of a call, by name; the host waits for it."""
    return float(run_ops(ops, tensors)[ops[-1].results[0]])
