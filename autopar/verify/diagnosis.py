"""Finds where a parallel run first differs from a single device: op by op in forward, in backward, then by stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from autopar.errors import VerificationError
from autopar.lower.run.stage_map import StageMap
from autopar.placement import Layout, format_layout
from autopar.plan import Plan
from autopar.planning.call_traces import ExampleInputs
from autopar.program import Layer, Op, Program
from autopar.schedules import simplest_schedule
from autopar.step.layer.value_flows import option_of
from autopar.trace import Traced
from autopar.verify.differences import largest_difference, largest_entry, number_error
from autopar.verify.op_observer import Observed, observe, single_device_plan
from autopar.verify.rehearsal import Run, gradient_layout, join_layout, run_parallel

__all__ = ["first_difference"]

_TOLERANCE = 1e-9  # relative: far above rounding in float64, and far below errors of wrong programs


def first_difference(model: nn.Module, traced: Traced, plan: Plan, inputs: ExampleInputs) -> str:
    """Name the first op whose result, or else the last op whose gradient, differs from that of one device.

    This second run has no microbatches and no recomputation, as these change when an op runs but not its result; at
    first it has no pipeline stages either.
    """
    program = traced.program
    expected = observe(model, traced, single_device_plan(program), inputs)[0]
    flat = plan.with_decisions(world_size=plan.group_size, stages=(), schedule="")
    problem = _first_op(program, _single_pass(flat), expected, observe(model, traced, _single_pass(flat), inputs))
    if problem:
        return problem
    if not plan.stages:
        return (
            "Results and gradients of all ops agree in one pass without microbatches and recomputation: the difference "
            "comes from these, from how parameters are stored, or from the optimizer"
        )
    return _first_difference_of_stages(_Rehearsal(model, traced, inputs), plan, flat, expected)


def _single_pass(plan: Plan) -> Plan:
    """`plan` without microbatches and recomputation, and with the simplest schedule that runs its stages."""
    strategies = tuple(replace(strategy, time=(), recompute="none") for strategy in plan.strategies)
    schedule = simplest_schedule(plan.schedule, plan.num_groups, len(plan.stages)) if plan.stages else ""
    return plan.with_decisions(num_microbatches=1, strategies=strategies, schedule=schedule)


@dataclass(frozen=True)
class _Rehearsal:
    model: nn.Module
    traced: Traced
    inputs: ExampleInputs

    def run(self, plan: Plan) -> Run:
        return run_parallel(self.model, self.traced, plan, self.inputs, 1)


def _first_difference_of_stages(rehearsal: _Rehearsal, plan: Plan, flat: Plan, expected: Observed) -> str:
    """As `first_difference`, for a plan whose ops all agree without its stages."""
    program = rehearsal.traced.program
    alone = rehearsal.run(single_device_plan(program))
    problem = _first_parameter(rehearsal, flat, alone)
    if problem:
        return f"Even without stages, where all ops agree, {problem}: look at microbatches, recomputation and storage"
    simple = _single_pass(plan)
    observed = observe(rehearsal.model, rehearsal.traced, simple, rehearsal.inputs)
    problem = _first_op(program, simple, expected, observed)
    if problem:
        return f"Without pipeline stages all ops agree; with them, they don't. {problem}"
    problem = _first_parameter(rehearsal, simple, alone)
    if problem:
        return f"All ops agree, also with pipeline stages, but {problem}"
    problem = _first_parameter(rehearsal, plan, alone)
    if problem:
        return (
            "Everything agrees without stages, and with them in one microbatch; with "
            f"{plan.num_microbatches} microbatches and schedule {plan.schedule}, {problem}"
        )
    return "Results and gradients of the first step agree: the difference comes from the optimizer or from later steps"


def _first_parameter(rehearsal: _Rehearsal, plan: Plan, expected: Run) -> str:
    """Describe the first gradient of a parameter, or the loss, that is wrong in a step of `plan`; empty if none is."""
    try:
        run = rehearsal.run(plan)
    except VerificationError as error:
        return str(error)
    stages = StageMap(rehearsal.traced.program, plan, 0)
    for name, gradient in expected.gradients.items():
        problem = _difference(gradient, run.gradients[name]) if name in run.gradients else "it is missing"
        if problem:
            groups = stages.holders.get(name, ()) if plan.stages else ()
            kind = "device group" if len(groups) == 1 else "tied across the device groups"
            where = f" ({kind} {', '.join(map(str, groups))})" if groups else ""
            return f"the gradient of {name}{where} differs: {problem}"
    if number_error(expected.losses[0], run.losses[0]) > _TOLERANCE:
        return f"the loss is {run.losses[0]} instead of {expected.losses[0]}"
    return ""


@dataclass(frozen=True)
class _OpResult:
    """One result of an op, with its layer, its layout and the ranks that have it."""

    name: str
    layer: Layer
    op: Op
    layout: Layout
    mesh: tuple[int, ...]
    ranks: range

    def difference(self, expected: Mapping[str, Tensor], actual: Sequence[Mapping[str, Tensor]], layout: Layout) -> str:
        """How the ranks' tensors differ from the expected one; empty if they don't, or weren't observed."""
        parts = [actual[rank] for rank in self.ranks]
        if self.name not in expected or any(self.name not in part for part in parts):
            return ""
        try:
            whole = join_layout([part[self.name] for part in parts], layout, self.mesh, self.name)
        except (VerificationError, RuntimeError) as error:
            return str(error)
        return _difference(expected[self.name], whole)

    def describe(self, finding: str, problem: str) -> str:
        source = f" ({self.op.source})" if self.op.source else ""
        place = f"in layer {self.layer.name}, with layout {format_layout(self.layout)}"
        return f"{finding} {self.op.name} = {self.op.target}{source} {place}: {problem}"


def _results(program: Program, plan: Plan) -> Iterator[_OpResult]:
    stages = StageMap(program, plan, 0)
    for stage, indices in enumerate(stages.ranges):
        first = stages.groups[stage] * plan.group_size
        for layer_index in indices:
            layer, strategy = program.layers[layer_index], plan.strategies[plan.layers[layer_index].strategy]
            for op, factors in zip(layer.ops, strategy.assignments, strict=True):
                options = [option_of(op, factor) for factor in factors]
                for index, name in enumerate(op.results):
                    layout = tuple(option.results[index] for option in options)
                    yield _OpResult(name, layer, op, layout, strategy.mesh, range(first, first + plan.group_size))


def _first_op(program: Program, plan: Plan, expected: Observed, ranks: list[Observed]) -> str:
    """Describe the first op whose result, or else the last whose gradient, differs; empty if none does."""
    results = list(_results(program, plan))
    values, gradients = [rank.values for rank in ranks], [rank.gradients for rank in ranks]
    for result in results:
        problem = result.difference(expected.values, values, result.layout)
        if problem:
            return result.describe("The first op whose result differs is", problem)
    for result in reversed(results):
        problem = result.difference(expected.gradients, gradients, gradient_layout(result.layout))
        if problem:
            return result.describe("Forward agrees; the first gradient that differs is that of", problem)
    return ""


def _difference(expected: Tensor, actual: Tensor) -> str:
    if actual.shape != expected.shape:
        return f"its shape is {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.numel():
        return ""
    difference, scale = largest_difference(expected, actual), largest_entry(expected)
    is_close = difference <= _TOLERANCE * max(scale, 1e-6)
    return "" if is_close else f"off by {difference:.3g}, with a largest entry of {scale:.3g}"
