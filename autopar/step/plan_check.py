"""Check that a plan fits a program, before a plan that was written or edited by hand runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, cast

from autopar.errors import PlanMismatchError
from autopar.placement import Layout, format_layout, local_shape
from autopar.plan import LayerStrategy, Plan, stages_problem
from autopar.plan.decisions import decision_problems
from autopar.plan.records import encode_record
from autopar.program import Layer, Op, Program
from autopar.step.activation_policies import can_rerun, rerun_ops
from autopar.step.plan_typing import derivation_problems, schedule_problems, storage_problems, value_problems

__all__ = ["check_fit", "check_same_decisions", "check_same_program"]


def check_fit(plan: Plan, program: Program, world_size: int, *, same_shapes: bool = True) -> None:
    """Raise if `plan` can't run `program` on `world_size` devices.

    Args:
        plan: what is to run.
        program: what was traced from the model at hand.
        world_size: number of devices at hand.
        same_shapes: False lets the plan of a larger or smaller twin pass, as long as its layers and ops are the same.

    Raises:
        PlanMismatchError: naming everything that doesn't fit, the first ten.
    """
    _refuse(
        list(_program_problems(plan, program, world_size, same_shapes=same_shapes))
        or list(_problems(plan, program, same_shapes=same_shapes))
    )


def check_same_program(plan: Plan, program: Program, world_size: int) -> None:
    """Raise PlanMismatchError if `plan` was made for another program or another number of devices."""
    _refuse(list(_program_problems(plan, program, world_size, same_shapes=True)))


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - 10} more)" if len(problems) > 10 else ""
        raise PlanMismatchError(
            "the plan does not fit: "
            + "; ".join(problems[:10])
            + more
            + ". Plan again for this model, these inputs and these devices with autopar.plan(...)"
        )


def check_same_decisions(plan: Plan, rank: int, first: Plan) -> None:
    """Raise PlanMismatchError, naming a decision, unless `rank` was given the plan that the first rank was given."""
    if plan.decisions.digest() == first.decisions.digest():
        return
    for place, here, there in _differences("", encode_record(plan.decisions), encode_record(first.decisions)):
        raise PlanMismatchError(
            f"ranks were given different plans: {place} is {here!r:.200} on rank {rank} and {there!r:.200} on the "
            "first rank. Save the plan once and pass the same file on every rank"
        )


def _differences(place: str, here: Any, there: Any) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two values of JSON: where, and what stands there in each."""
    if isinstance(here, dict) and isinstance(there, dict):
        ours, theirs = cast("dict[str, Any]", here), cast("dict[str, Any]", there)
        for key in (*ours, *(key for key in theirs if key not in ours)):
            yield from _differences(f"{place}.{key}" if place else key, ours.get(key), theirs.get(key))
    elif isinstance(here, list | tuple) and isinstance(there, list | tuple):
        pairs = zip_longest(cast("list[Any]", here), cast("list[Any]", there))
        for index, (one, other) in enumerate(pairs):
            yield from _differences(f"{place}[{index}]", one, other)
    elif here != there:
        yield place, here, there


def _program_problems(plan: Plan, program: Program, world_size: int, *, same_shapes: bool) -> Iterator[str]:
    """What the plan was made for, and is not at hand."""
    if plan.world_size != world_size:
        yield f"it is for {plan.world_size} devices, but there are {world_size}"
    planned = tuple((layer.name, layer.kind) for layer in plan.layers)
    traced = tuple((layer.name, layer.kind) for layer in program.layers)
    if planned != traced:
        yield f"it has layers {_brief(planned)}, the model has {_brief(traced)}"
    elif same_shapes and plan.fingerprint != program.fingerprint:
        yield (
            f"it was made for a model or inputs of other shapes (fingerprint {plan.fingerprint}, "
            f"here {program.fingerprint})"
        )
    if plan.piece_tokens != program.piece_tokens:
        yield f"it has logits of {plan.piece_tokens} tokens at a time (0: all), here it is {program.piece_tokens}"
    late = tuple(op.name for op in program.tail)
    if (plan.decisions.late_ops, plan.decisions.statistics) != (late, program.statistics):
        yield (
            f"it has late_ops and statistics {(plan.decisions.late_ops, plan.decisions.statistics)}, here they are "
            + (f"{(late, program.statistics)}")
        )


def _problems(plan: Plan, program: Program, *, same_shapes: bool) -> Iterator[str]:
    problem = stages_problem(plan.decisions)
    inconsistent = [problem] if problem else list(decision_problems(plan.decisions)) or list(value_problems(plan))
    yield from inconsistent
    if inconsistent:
        return
    problems = [*_strategy_problems(plan, program, same_shapes=same_shapes)]
    if not problems and same_shapes:
        problems = [
            *storage_problems(program, plan), *derivation_problems(program, plan), *schedule_problems(program, plan),
        ]  # fmt: skip
    yield from problems


def _strategy_problems(plan: Plan, program: Program, *, same_shapes: bool) -> Iterator[str]:
    seen: set[tuple[int, int]] = set()
    for layer, planned_layer in zip(program.layers, plan.layers, strict=True):
        pair = planned_layer.kind, planned_layer.strategy
        if pair not in seen or not same_shapes:
            seen.add(pair)
            yield from _layer_problems(program, layer, plan.strategies[planned_layer.strategy], plan)


def _brief(layers: tuple[tuple[str, int], ...]) -> str:
    return f"{len(layers)}: {', '.join(name for name, _ in layers[:4])}{' ...' if len(layers) > 4 else ''}"


def _layer_problems(program: Program, layer: Layer, strategy: LayerStrategy, plan: Plan) -> Iterator[str]:
    where = f"layer {layer.name}"
    parts = (("assignments", strategy.assignments, layer.ops), ("inputs", strategy.inputs, layer.inputs),
             ("factors in time", strategy.time, layer.ops if plan.num_microbatches > 1 else strategy.time),
             ("outputs", strategy.outputs, layer.outputs), ("storage", strategy.storage, layer.state))  # fmt: skip
    for name, given, needed in parts:
        if len(given) != len(needed):
            yield f"{where}: {len(given)} {name} for {len(needed)}"
            return
    times = strategy.time if plan.num_microbatches > 1 else ("-",) * len(layer.ops)
    for op, factors, time in zip(layer.ops, strategy.assignments, times, strict=True):
        yield from _op_problems(op, factors, strategy.mesh, (time, plan.num_microbatches), where)
    representative = program.kinds[layer.kind]
    yield from _rerun_problems(representative, strategy, where)
    layouts = [*zip(layer.inputs, strategy.inputs, strict=True), *zip(layer.outputs, strategy.outputs, strict=True),
               *zip(layer.state, strategy.storage, strict=True)]  # fmt: skip
    if layer == representative:
        layouts += list(strategy.copies)
    for name, layout in layouts:
        yield from _layout_problems(program, name, layout, strategy.mesh, where)


def _rerun_problems(layer: Layer, strategy: LayerStrategy, where: str) -> Iterator[str]:
    """Ops that `strategy` names to run again, but that `layer` does not have or that can't."""
    ops = {op.name: op for op in layer.ops}
    for name in rerun_ops(strategy.recompute):
        if name not in ops:
            yield f"{where}: recompute names {name!r}, which is no op of layer {layer.name}"
        elif not can_rerun(ops[name]):
            yield f"{where}: recompute names {name!r}, which draws random numbers and can't run again"


def _op_problems(
    op: Op, factors: tuple[str, ...], mesh: tuple[int, ...], time: tuple[str, int], where: str
) -> Iterator[str]:
    """`time` is the factor that microbatches split, and how many there are."""
    options = {option.factor: option for option in op.options}
    # Any op may run whole, in "-" and "~".
    unknown = [factor for factor in (*factors, time[0]) if factor not in options and factor not in "-~"]
    if unknown:
        yield f"{where}, {op.name} ({op.target}): no factor {', '.join(unknown)}; it has {', '.join(options)}"
        return
    splits = [*zip(factors, mesh, strict=True), time]
    for factor in dict.fromkeys(factor for factor, _ in splits if factor in options):
        degree = math.prod(size for chosen, size in splits if chosen == factor)
        extent = options[factor].extent
        if extent and extent % degree:
            yield f"{where}, {op.name}: factor {factor} of extent {extent} can't be cut into {degree}"


def _layout_problems(program: Program, name: str, layout: Layout, mesh: tuple[int, ...], where: str) -> Iterator[str]:
    if name not in program.values:
        yield f"{where}: no value is called {name}"
        return
    shape = program.type_of(name).shape
    text = f"{where}: {name} of shape {shape} can't have the layout {format_layout(layout)} on mesh {mesh}"
    if any(p.is_shard and p.dim >= len(shape) for p in layout):
        yield text
        return
    try:
        local_shape(shape, layout, mesh)
    except ValueError:
        yield text
