"""Every collective of one training step by a plan: the same list is priced, run and explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.placement import REPLICATE, Axis, reshard, tidy
from autopar.plan import Plan
from autopar.program import Program
from autopar.step.costs.layer_cost import placed_collectives
from autopar.step.costs.parameter_costs import shared_parameter_bytes
from autopar.step.layer.boundary_values import sent_values, transfer_steps
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.prices import PricedCollective, Prices, priced, reshard_calls, run_s
from autopar.step.training import TrainingSpec

__all__ = ["StepCollectives", "broadcast_s", "output_gathers", "plan_collectives", "step_collectives"]


def plan_collectives(
    program: Program, plan: Plan, training: TrainingSpec | None = None, *, group: int = 0
) -> tuple[PricedCollective, ...]:
    """Every collective of one step: for each layer what is moved to it, then its own.

    With pipeline stages these are the collectives of the device group `group`; what it sends to other groups comes
    behind them, and the broadcast of the loss (without one, of all outputs): `stage_collectives`.

    These are the ones that the plan's price counts (`placed_collectives` and `transfer_parts_s`), with the actual
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
    training = (training or TrainingSpec()).by(plan.decisions)
    layers = PlannedLayers(program, plan.decisions)
    between = step_collectives(layers, training)
    collectives: list[PricedCollective] = []
    for index in (index for index, own in enumerate(layers.group_of) if own == group):
        names = layers.names(index)
        inside = placed_collectives(layers.placed[index], training)
        collectives += between.arriving[index]
        collectives += (replace(run, value=names.get(run.value, run.value)) for run in inside)
        collectives += between.returning[index]
    collectives += (run for stage, run in between.sent if plan.decisions.groups[stage] == group)
    collectives += (run for groups, run in between.tied if group in groups)
    return (*collectives, *between.broadcasts)


@dataclass(frozen=True)
class StepCollectives:
    """The collectives of a step outside of layers.

    Args:
        arriving: per layer, of what other layers made, and of its gradients.
        returning: per layer, those that make the loss and new values of buffers whole, and turn terms of other outputs
            into values; those of `output_gathers`, where these are part of a step.
        sent: what stages send to stages on other device groups, by the sender; purpose ``"stage"``.
        tied: gradients of parameters that several device groups hold: the groups, and what each of them sends; purpose
            ``"tied"``.
        broadcasts: what is broadcast to all device groups at the end; purpose ``"output"``.
    """

    arriving: tuple[tuple[PricedCollective, ...], ...]
    returning: tuple[tuple[PricedCollective, ...], ...]
    sent: tuple[tuple[int, PricedCollective], ...]
    tied: tuple[tuple[tuple[int, ...], PricedCollective], ...]
    broadcasts: tuple[PricedCollective, ...]


def step_collectives(layers: PlannedLayers, training: TrainingSpec) -> StepCollectives:
    """All that is moved between layers, to the caller and between device groups."""
    has_stages = bool(layers.decisions.stages)
    return StepCollectives(
        _arriving(layers, training),
        tuple(tuple(_returning(layers, index, training)) for index in range(len(layers.strategies))),
        tuple(_sent(layers, training)) if has_stages else (),
        tuple(_tied(layers, training)) if has_stages and training.is_training else (),
        tuple(_broadcasts(layers.program, layers.decisions.pipeline_axis)) if has_stages else (),
    )


def _arriving(layers: PlannedLayers, training: TrainingSpec) -> tuple[tuple[PricedCollective, ...], ...]:
    arriving: list[list[PricedCollective]] = [[] for _ in layers.strategies]
    for crossing in layers.crossings:
        source, target = layers.strategies[crossing.producer], layers.strategies[crossing.reader]
        steps = transfer_steps(
            (source.mesh, source.outputs[crossing.output]), (target.mesh, target.inputs[crossing.input])
        )
        has_gradient = crossing.requires_grad and training.is_training
        arriving[crossing.reader] += (
            priced(call, crossing.value, layers.decisions.num_microbatches, "activation")
            for call in reshard_calls(steps, crossing.tensor.num_bytes, has_gradient=has_gradient)
        )
    return tuple(map(tuple, arriving))


def _returning(layers: PlannedLayers, index: int, training: TrainingSpec) -> Iterator[PricedCollective]:
    program, placed = layers.program, layers.placed[index]
    given = {*program.outputs, *program.whole_results}
    outputs = zip(program.layers[index].outputs, placed.layer.outputs, placed.departures, strict=True)
    for name, first, layout in outputs:
        flow = placed.flows[first]
        if name not in given or flow.source != "op":
            continue
        is_whole = name in program.whole_results
        target = (REPLICATE,) * len(layout) if is_whole else tidy(layout)
        tensor, times = placed.view.value_type(flow), placed.view.num_microbatches
        if not is_whole:
            tensor, times = program.type_of(name), 1  # all microbatches at once
        has_gradient = training.is_training and program.values[name].requires_grad
        is_differentiated = has_gradient and (name in program.loss_terms or not program.loss)
        steps = reshard(layout, target, placed.mesh)
        for call in reshard_calls(steps, tensor.num_bytes, has_gradient=is_differentiated):
            yield priced(call, name, times, "activation")
    if training.gathers_outputs:
        yield from output_gathers(layers, index)


def output_gathers(layers: PlannedLayers, index: int) -> Iterator[PricedCollective]:
    """What makes the outputs of the layer of this index, other than the loss, whole on every rank."""
    program, placed, plan = layers.program, layers.placed[index], layers.decisions
    for name, layout in zip(program.layers[index].outputs, placed.departures, strict=True):
        if not program.loss or name in program.whole_results or name not in program.outputs:
            continue
        num_bytes = float(program.type_of(name).num_bytes)
        steps = reshard(tidy(layout), (REPLICATE,) * len(layout), placed.mesh)
        for call in reshard_calls(steps, num_bytes, has_gradient=False):
            yield priced(call, name, 1, "activation")
        if plan.num_groups > 1:
            yield PricedCollective(name, "broadcast", plan.pipeline_axis, num_bytes, 1, "forward", "output")


def _sent(layers: PlannedLayers, training: TrainingSpec) -> Iterator[tuple[int, PricedCollective]]:
    plan = layers.decisions
    for sent in sent_values(layers.crossings, [stage.start for stage in plan.stages], layers.strategies):
        if plan.groups[sent.stage] == plan.groups[sent.stage + 1]:
            continue
        run = PricedCollective(
            sent.crossing.value, "send", plan.pipeline_axis, sent.num_bytes, plan.num_microbatches, "forward", "stage"
        )
        yield sent.stage, run
        if sent.crossing.requires_grad and training.is_training:
            yield sent.stage + 1, replace(run, phase="backward")


def _tied(layers: PlannedLayers, training: TrainingSpec) -> Iterator[tuple[tuple[int, ...], PricedCollective]]:
    axis = layers.decisions.pipeline_axis
    for name, where in layers.shared.items():
        value, groups = layers.program.values[name], sorted(layers.first_readers(name))
        if len(groups) > 1 and value.requires_grad:
            num_bytes = shared_parameter_bytes(value, where, training).gradient_bytes
            run = PricedCollective(name, "send", axis, num_bytes, len(groups) - 1, "backward", "tied")
            yield tuple(groups), run


def _broadcasts(program: Program, pipeline_axis: Axis) -> Iterator[PricedCollective]:
    """What all device groups get at the end: the loss, or without one all outputs, and new values of buffers."""
    for name in program.whole_results:
        if program.values[name].role == "op":
            num_bytes = float(program.type_of(name).num_bytes)
            yield PricedCollective(name, "broadcast", pipeline_axis, num_bytes, 1, "forward", "output")


def broadcast_s(program: Program, prices: Prices, pipeline_axis: Axis) -> float:
    """Seconds of the broadcasts to all device groups."""
    return sum(run_s(run, prices) for run in _broadcasts(program, pipeline_axis))
