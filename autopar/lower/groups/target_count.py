"""What a mean loss divides by, known before the step runs: the targets, or other places, that count.

A loss ``terms / divisor`` has a divisor that follows from inputs alone: a sum over all rows, such as the number of
targets of a cross entropy, or ``mask.sum()``, perhaps with arithmetic on it (``mask.sum().clamp(min=1)``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.lower.kernels import run_ops
from autopar.program import Op, Program

__all__ = ["LossCount", "loss_count"]

_DENOMINATOR = "autopar.cross_entropy_denominator"
_DIVISION = "aten.div.Tensor"
# Arithmetic with numbers, and conversions, that may stand behind the division.
_SCALING = (_DIVISION, "aten.mul.Tensor", "aten._to_copy.default")


@dataclass(frozen=True)
class LossCount:
    """How the divisor of a loss is computed.

    Args:
        terms: the value that is divided.
        counting: the ops from inputs to `sums`.
        sums: values of one number, each a reduction of what has an entry for each row or place; with their dtypes.
        arithmetic: the ops from `sums` to the divisor; empty: the only one of `sums` is the divisor.
        of_targets: whether it is a cross entropy averaged over its targets, whose terms add up over rows.
    """

    terms: str
    counting: tuple[Op, ...]
    sums: Mapping[str, torch.dtype]
    arithmetic: tuple[Op, ...]
    of_targets: bool

    @property
    def form(self) -> tuple[str, ...]:
        """What is equal for programs whose divisors are computed alike, whatever the number of rows and places."""
        return (
            *(op.target for op in self.counting if op.results[0] in self.sums),
            *(x.target for x in self.arithmetic),
        )

    @torch.no_grad()
    def sums_of(self, tensors: Mapping[str, Tensor]) -> tuple[float, ...]:
        """The sums for the inputs of a call, by name; the host waits for them."""
        known = run_ops(self.counting, tensors)
        return tuple(float(known[name]) for name in self.sums)

    @torch.no_grad()
    def divisor_of(self, sums: Sequence[float]) -> float:
        """The divisor of a call, or of all rows of a step, with these sums."""
        if not self.arithmetic:
            return sums[0]
        given = zip(self.sums.items(), sums, strict=True)
        known = run_ops(
            self.arithmetic, {name: torch.tensor(x, dtype=dtype, device="cpu") for (name, dtype), x in given}
        )
        return float(known[self.arithmetic[-1].results[0]])


def loss_count(program: Program) -> LossCount | None:
    """How the divisor of the loss of `program` is computed; None: it is no such loss, or more than inputs count, such
    as weights of classes.
    """
    made_by = {result: op for layer in program.layers for op in layer.ops for result in op.results}
    loss = made_by.get(program.loss)
    while loss is not None and loss.target in _SCALING and len(loss.operands) == 1:
        loss = made_by.get(loss.operands[0])
    if loss is None or loss.target != _DIVISION or len(loss.operands) != 2:
        return None
    terms, divisor = loss.operands
    found: dict[str, Op] = {}
    pending = [divisor]
    while pending:
        name = pending.pop()
        op = made_by.get(name)
        if op is None and name not in program.inputs:
            return None
        if op is not None and op.name not in found:
            found[op.name] = op
            pending += op.operands
    ops = [op for layer in program.layers for op in layer.ops if op.name in found]
    single = {name for op in ops for name in op.results if not program.type_of(name).shape}
    sums = [op.results[0] for op in ops if op.results[0] in single and any(_has_dims(program, x) for x in op.operands)]
    arithmetic = [op for op in ops if op.results[0] in single and op.results[0] not in sums]
    if not sums or any(name not in single for op in arithmetic for name in op.operands):
        return None
    counting = tuple(op for op in ops if op not in arithmetic)
    return LossCount(
        terms,
        counting,
        {name: getattr(torch, program.type_of(name).dtype) for name in sums},
        tuple(arithmetic),
        _is_of_targets(made_by.get(terms), [made_by[name] for name in sums]),
    )


def _has_dims(program: Program, name: str) -> bool:
    return bool(program.type_of(name).shape)


def _is_of_targets(terms: Op | None, sums: Sequence[Op]) -> bool:
    return terms is not None and "cross_entropy" in terms.target and all(op.target == _DENOMINATOR for op in sums)
