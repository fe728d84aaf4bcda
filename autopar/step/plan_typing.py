"""Check that a plan's decisions are legal, by the derivation of the local programs that they describe.

Between ops every change of layout has a movement, so what can be wrong is where decisions end: how values come into a
layer and leave it in time (microbatches), how parameters are stored, and how often a gradient is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from autopar.errors import PlanMismatchError
from autopar.placement import BROADCAST, REPLICATE, Layout, Placement, format_layout, local_shape, refine_mesh
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.schedules import find_schedule
from autopar.step.activation_policies import policy_names, rerun_ops
from autopar.step.layer.instructions import LocalProgram, RunOp
from autopar.step.layer.local_layer import place
from autopar.step.layer.local_program import derive

__all__ = ["ZERO_LEVELS", "derivation_problems", "schedule_problems", "storage_problems", "value_problems"]

ZERO_LEVELS = (0, 1, 2, 3)


def value_problems(plan: Plan) -> Iterator[str]:
    """Meshes that don't fit together, and words that stand for no decision; the decisions are consistent otherwise
    (`autopar.plan.decisions.decision_problems`).
    """
    if math.prod(plan.shared_mesh) != plan.group_size:
        yield f"shared_mesh {plan.shared_mesh} does not hold the {plan.group_size} devices of the plan (or of a stage)"
    else:
        try:
            refine_mesh(plan.shared_mesh, *(strategy.mesh for strategy in plan.strategies))
        except ValueError as error:
            yield f"{error}: the strides of one must divide those of the others"
    for index, strategy in enumerate(plan.strategies):
        if strategy.zero not in ZERO_LEVELS:
            yield f"strategies[{index}]: zero is {strategy.zero}, but must be one of {list(ZERO_LEVELS)}"
        if strategy.recompute not in policy_names() and not rerun_ops(strategy.recompute):
            yield f"strategies[{index}]: recompute is {strategy.recompute!r}, but must be one of {list(policy_names())}"


def storage_problems(program: Program, plan: Plan) -> Iterator[str]:
    """What of parameters can't be stored as the plan says.  The plan's strategies fit its layers otherwise."""
    by_name = {name: value for value, name in program.parameters.items()}
    shared = dict(plan.shared_storage)
    for name, layout in plan.shared_storage:
        if name not in by_name or program.values[by_name[name]].role != "parameter":
            yield f"shared_storage: the model has no parameter {name!r}"
        else:
            yield from _stored(program, by_name[name], layout, plan.shared_mesh, "shared_storage")
    for layer, planned in zip(program.layers, plan.layers, strict=True):
        strategy = plan.strategies[planned.strategy]
        for value, layout in zip(layer.state, strategy.storage, strict=True):
            where = f"layer {layer.name}"
            if program.values[value].role == "parameter":
                yield from _stored(program, value, layout, strategy.mesh, where)
            elif any(placement != REPLICATE for placement in layout):
                yield f"{where}: {value} is no parameter and is whole on every device, but its storage is " + repr(
                    format_layout(layout)
                )
    readers = Counter(value for layer in program.layers for value in layer.state)
    for value, count in readers.items():
        name = program.parameters.get(value, "")
        if count > 1 and program.values[value].role == "parameter" and name not in shared:
            yield f"shared_storage: {count} layers read the parameter {name!r}, so it needs an entry here"


def _stored(program: Program, value: str, layout: Layout, mesh: tuple[int, ...], where: str) -> Iterator[str]:
    shape = program.type_of(value).shape
    text = f"{where}: storage {format_layout(layout)!r} of {value} {list(shape)} on mesh {mesh}"
    if any(placement.kind not in "RS" for placement in layout):
        yield f"{text}: a parameter is stored whole (R) or in slices (S)"
    elif any(placement.parts > 1 for placement in layout):
        yield f"{text}: files and optimizers know contiguous slices only: choose a slice of another dim, or R"
    elif any(p.is_shard and p.dim >= len(shape) for p in layout):
        yield f"{text}: a slice of one of the {len(shape)} dims"
    else:
        try:
            local_shape(shape, layout, mesh)
        except ValueError as error:
            yield f"{text}: {error}"


def derivation_problems(program: Program, plan: Plan) -> Iterator[str]:
    """Derive every layer as the runtime would, and say what can't be.  The plan's strategies fit its layers."""
    count = plan.num_microbatches if program.loss or plan.stages else 1
    times: dict[str, Placement] = dict.fromkeys(program.inputs, REPLICATE)
    derived: dict[tuple[object, ...], LocalProgram] = {}
    for layer, planned in zip(program.layers, plan.layers, strict=True):
        strategy = plan.strategies[planned.strategy]
        arrivals = tuple(times[name] for name in layer.inputs)
        key = (layer.kind, planned.strategy, arrivals)
        if key not in derived:
            first = program.kinds[layer.kind]
            try:
                derived[key] = derive(place(program, first, strategy, count), arrivals)
            except (PlanMismatchError, ValueError) as error:
                text = str(error)
                yield text if text.startswith("layer ") else f"layer {layer.name}: {text}"
                return  # what follows can't be typed
            if count > 1 and program.training:
                yield from _repeated_gradients(program, first, strategy, derived[key], count)
        times.update(zip(layer.outputs, derived[key].output_times, strict=True))
    if count > 1 and program.training:
        yield from _returned_problems(program, times, count)
    if program.training and program.loss and (count > 1 or plan.stages):
        yield from _loss_problems(program, plan)


def _loss_problems(program: Program, plan: Plan) -> Iterator[str]:
    """Losses of which every device begins backward with the whole gradient, though their layout wants terms of it."""
    for layer, planned in zip(program.layers, plan.layers, strict=True):
        for name, layout in zip(layer.outputs, plan.strategies[planned.strategy].outputs, strict=True):
            if name in program.loss_terms and BROADCAST in layout:
                yield (
                    f"layer {layer.name}: the loss {name} leaves in layout {format_layout(layout)!r}, whose gradient "
                    "is a sum of terms (B), but every device begins backward with the whole gradient, which is R's"
                )


def _returned_problems(program: Program, times: Mapping[str, Placement], count: int) -> Iterator[str]:
    """What backward begins with and can't be put together from `count` microbatches, by its placements in time."""
    for name in program.loss_terms if program.loss else dict.fromkeys(program.outputs):
        value, time = program.values[name], times.get(name, REPLICATE)
        if name not in times or not value.requires_grad:
            continue
        if (program.loss or value.can_be_loss) and time.kind != "P":
            yield (
                f"the loss {name} is {time} in time, but each of the {count} microbatches must give a term of it (P): "
                "choose the batch's factor in time for the ops that make it"
            )
        elif not (program.loss or value.can_be_loss or time.is_shard):
            yield (
                f"the output {name} is {time} in time, but each of the {count} microbatches must give its rows (S), as "
                "the caller computes the loss: choose the batch's factor in time for the ops that make it"
            )


def schedule_problems(program: Program, plan: Plan) -> Iterator[str]:
    """A schedule that begins backward before a loss is known.  The plan's stages fit its schedule otherwise."""
    begins_early = program.training and plan.stages and not find_schedule(plan.schedule).forwards_first
    if begins_early and not program.has_loss_in_layers and plan.num_microbatches > 1:
        made = (
            "is computed from sums over the whole batch" if program.loss else "is the caller's, of the model's outputs"
        )
        yield (
            f"schedule {plan.schedule} begins backward passes before all forward passes have ended, but the loss "
            f"{made}: choose a schedule like gpipe"
        )


def _repeated_gradients(
    program: Program, layer: Layer, strategy: LayerStrategy, local: LocalProgram, count: int
) -> Iterator[str]:
    """Parameters that an op reads as if there were one microbatch, so that each would give their whole gradient."""
    for run in (each for each in local.singles if isinstance(each, RunOp)):
        chosen = strategy.time[run.index]
        if program.with_gradient.isdisjoint(run.op.results):
            continue
        placements = next((o.operands for o in run.op.options if o.factor == chosen), None)
        for mention, name in enumerate(run.op.operands):
            value = program.values[name]
            placement = placements[mention] if placements else BROADCAST if chosen == "~" else REPLICATE
            if value.role == "parameter" and value.requires_grad and placement == REPLICATE:
                yield (
                    f"layer {layer.name}, {run.op.name} ({run.op.target}): with the factor {chosen!r} in time each of "
                    f"the {count} microbatches would give the whole gradient of {name}; it has "
                    f"{[option.factor for option in run.op.options]} and '~'"
                )
