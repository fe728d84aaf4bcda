"""The predicted speedup of another precision, for users who did not choose one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from autopar.errors import MissingPriceError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.program import Program, TensorType, Value
from autopar.step.prices import Prices
from autopar.step.pricing import StepPricing
from autopar.step.training import TrainingSpec

__all__ = ["with_speedup"]

_WORTH_SAYING = 1.1  # times as fast; less is within the error of a prediction


def with_speedup(plan: Plan, program: Program, prices: Prices, training: TrainingSpec) -> Plan:
    """`plan`, which computes in float32, with an estimate of what bfloat16 would make of it: the same decisions priced
    with every float32 tensor but the stored parameters and optimizer state in bfloat16.

    Unchanged on CPUs, where bfloat16 is no faster, for programs in other dtypes, and where nothing is gained or known.
    """
    if prices.device == "cpu" or not plan.costs or not _is_float32(program):
        return plan
    changed = replace(program, values={name: _in_bfloat16(value) for name, value in program.values.items()})
    stored = replace(training, storage_itemsize_bytes=4, gradient_itemsize_bytes=4)
    with suppress(MissingPriceError):
        step_s = StepPricing(changed, plan.decisions, prices, stored, schedule_actions).step_s
        if plan.step_time_s > _WORTH_SAYING * step_s:
            speedup = plan.step_time_s / step_s
            return replace(plan, prediction=replace(plan.prediction, speedups=(("bf16", speedup),)))
    return plan


def _is_float32(program: Program) -> bool:
    types = [program.type_of(name) for name in program.parameters]
    elements = {dtype: sum(t.num_elements for t in types if t.dtype == dtype) for dtype in {t.dtype for t in types}}
    return max(elements, key=elements.__getitem__, default="") == "float32"


def _in_bfloat16(value: Value) -> Value:
    if value.type.dtype != "float32":
        return value
    return replace(value, type=TensorType(value.type.shape, "bfloat16"))
