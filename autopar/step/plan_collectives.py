"""Every collective that one training step by a plan runs: what was priced, what runs, what is explained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.placement import REPLICATE, Axis, reshard, tidy
from autopar.plan import Decisions, LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.step.boundary_values import BoundaryValue, boundary_values, sent_values, transfer_steps
from autopar.step.layer_cost import layer_collectives
from autopar.step.local_layer import SharedStorage
from autopar.step.parameter_costs import shared_parameter_bytes
from autopar.step.planned_layers import own_strategy
from autopar.step.prices import PricedCollective, Prices, priced, reshard_calls
from autopar.step.training import TrainingSpec
from autopar.step.value_flows import find_flows, time_view

__all__ = [
    "boundary_collectives",
    "broadcast_s",
    "plan_collectives",
    "returning_collectives",
    "sent_collectives",
    "stage_collectives",
    "tied_collectives",
    "told_collectives",
    "told_outputs",
]


def plan_collectives(
    program: Program, plan: Plan, training: TrainingSpec | None = None, *, group: int = 0
) -> tuple[PricedCollective, ...]:
    """Every collective of one step: for each layer what is moved to it, then its own.

    With pipeline stages these are the collectives of the device group `group`; what it sends to other groups comes
    behind them, and the broadcast of the loss (without one, of all outputs): `stage_collectives`.

    These are the ones that the plan's price counts (`layer_collectives` and `crossings.transfer_s`), with the actual
    layers' values as names.  Collectives of parameters may share buffers: fewer calls, the same bytes.
    What the caller gets costs nothing in plans that a search made: the loss and new values of buffers leave whole
    there, and other outputs in their own layouts.

    Args:
        program: that the plan is for.
        plan: any plan that fits it, searched, edited or random.
        training: how it is trained; by default as `TrainingSpec` says.
        group: which device group's, in a plan with stages.

    Raises:
        ValueError: the plan does not fit the program.
    """
    training = training or TrainingSpec()
    strategies = [plan.strategies[planned.strategy] for planned in plan.layers]
    values = {name: value for value, name in program.parameters.items()}
    shared = {values[name]: (plan.shared_mesh, layout) for name, layout in plan.shared_storage}
    arriving: list[list[PricedCollective]] = [[] for _ in program.layers]
    for reader, run in boundary_collectives(program, strategies, plan.num_microbatches, training):
        arriving[reader].append(run)
    found: list[PricedCollective] = []
    stages = [stage for stage in plan.stages if stage.group == group]
    own = {layer for stage in stages for layer in range(stage.start, stage.stop)}
    for index, (layer, strategy, before) in enumerate(zip(program.layers, strategies, arriving, strict=True)):
        if index in own or not plan.stages:
            found += before
            found += _own_collectives(program, layer, strategy, plan.num_microbatches, training, shared)
            found += returning_collectives(program, layer, strategy, plan.num_microbatches, training)
    return (*found, *stage_collectives(program, plan.decisions, training, group))


def _own_collectives(
    program: Program,
    layer: Layer,
    strategy: LayerStrategy,
    num_microbatches: int,
    training: TrainingSpec,
    shared: SharedStorage,
) -> tuple[PricedCollective, ...]:
    """Those inside a layer."""
    return layer_collectives(program, layer, own_strategy(program, layer, strategy), num_microbatches, training, shared)


def boundary_collectives(
    program: Program, strategies: list[LayerStrategy], num_microbatches: int, training: TrainingSpec
) -> Iterator[tuple[int, PricedCollective]]:
    """(index of the reading layer, collective) for every value that crosses to another layer."""
    time = {layer.kind: strategy.time for layer, strategy in zip(program.layers, strategies, strict=True)}
    for crossing in boundary_values(program, time, num_microbatches):
        source, target = strategies[crossing.producer], strategies[crossing.reader]
        steps = transfer_steps(
            (source.mesh, source.outputs[crossing.output]), (target.mesh, target.inputs[crossing.input])
        )
        has_gradient = crossing.requires_grad and training.is_training
        for call in reshard_calls(steps, crossing.tensor.num_bytes, has_gradient=has_gradient):
            yield crossing.reader, priced(call, crossing.value, num_microbatches, "activation")


def returning_collectives(
    program: Program, layer: Layer, strategy: LayerStrategy, num_microbatches: int, training: TrainingSpec
) -> Iterator[PricedCollective]:
    """Those that make the loss and new values of buffers whole, and turn terms of other outputs into values."""
    given = {*program.outputs, *program.updates.values()}
    flows = find_flows(program, layer)
    view = time_view(layer, flows, strategy.time, num_microbatches)
    for name, layout in zip(layer.outputs, strategy.outputs, strict=True):
        if name not in given or flows[name].source != "op":
            continue
        is_whole = not program.loss or name == program.loss or name in program.updates.values()
        target = (REPLICATE,) * len(layout) if is_whole else tidy(layout)
        tensor, times = view.value_type(flows[name]), num_microbatches
        if not is_whole:
            tensor, times = program.type_of(name), 1  # all microbatches at once
        has_gradient = training.is_training and program.values[name].requires_grad
        is_differentiated = has_gradient and (name == program.loss or not program.loss)
        steps = reshard(layout, target, strategy.mesh)
        for call in reshard_calls(steps, tensor.num_bytes, has_gradient=is_differentiated):
            yield priced(call, name, times, "activation")


def stage_collectives(
    program: Program, plan: Decisions, training: TrainingSpec, group: int
) -> Iterator[PricedCollective]:
    """What device group `group` sends to others in a step, and what all groups are told at its end.

    Their purposes are ``"stage"`` for values between stages and their gradients, ``"tied"`` for gradients of
    parameters that several groups hold, ``"output"`` for the loss.
    """
    if not plan.stages:
        return
    time = {layer.kind: each.time for layer, each in zip(program.layers, plan.layer_strategies, strict=True)}
    crossings = boundary_values(program, time, plan.num_microbatches)
    yield from (run for stage, run in sent_collectives(crossings, plan, training) if plan.groups[stage] == group)
    yield from (run for groups, run in tied_collectives(program, plan, training) if group in groups)
    yield from told_collectives(program, plan)


def sent_collectives(
    crossings: Sequence[BoundaryValue], plan: Decisions, training: TrainingSpec
) -> Iterator[tuple[int, PricedCollective]]:
    """What stages send to stages on other device groups, by the sender: values, and backward their gradients."""
    axis = Axis(plan.num_groups, plan.group_size)
    for sent in sent_values(crossings, [stage.start for stage in plan.stages], plan.layer_strategies):
        if plan.groups[sent.stage] == plan.groups[sent.stage + 1]:
            continue
        run = PricedCollective(
            sent.crossing.value, "send", axis, sent.num_bytes, plan.num_microbatches, "forward", "stage"
        )
        yield sent.stage, run
        if sent.crossing.requires_grad and training.is_training:
            yield sent.stage + 1, replace(run, phase="backward")


def tied_collectives(
    program: Program, plan: Decisions, training: TrainingSpec
) -> Iterator[tuple[tuple[int, ...], PricedCollective]]:
    """Gradients of parameters that several device groups hold: the groups, and what each of them sends."""
    axis = Axis(plan.num_groups, plan.group_size)
    values = {name: value for value, name in program.parameters.items()}
    for name, layout in plan.shared_storage if plan.stages and training.is_training else ():
        value = program.values[values[name]]
        reading = zip(plan.ranges, plan.groups, strict=True)
        groups = {own for span, own in reading if any(value.name in program.layers[index].state for index in span)}
        if len(groups) > 1 and value.requires_grad:
            num_bytes = shared_parameter_bytes(value, (plan.shared_mesh, layout), training).gradient_bytes
            run = PricedCollective(value.name, "send", axis, num_bytes, len(groups) - 1, "backward", "tied")
            yield tuple(sorted(groups)), run


def told_collectives(program: Program, plan: Decisions) -> Iterator[PricedCollective]:
    """What all device groups are told at the end of a step."""
    axis = Axis(plan.num_groups, plan.group_size)
    for name in told_outputs(program) if plan.stages else ():
        yield PricedCollective(name, "broadcast", axis, float(program.type_of(name).num_bytes), 1, "forward", "output")


def broadcast_s(program: Program, prices: Prices, pipeline_axis: Axis) -> float:
    """Seconds to tell all device groups what they all get."""
    sizes = (float(program.type_of(name).num_bytes) for name in told_outputs(program))
    return sum(prices.collective_s("broadcast", pipeline_axis, size) for size in sizes)


def told_outputs(program: Program) -> tuple[str, ...]:
    """What every device group is told at the end: the loss, or without one all outputs, and new values of buffers."""
    returned = (program.loss,) if program.loss else tuple(dict.fromkeys(program.outputs))
    return tuple(name for name in (*returned, *program.updates.values()) if program.values[name].role == "op")
