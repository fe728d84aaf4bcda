"""Every collective that one training step by a plan runs: what was priced, what runs, what is explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.placement import REPLICATE, reshard
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.search.crossings import crossing_steps, find_crossings
from autopar.search.flows import find_flows, time_view
from autopar.search.layer_cost import PricedCollective, SharedStorage, TrainingSpec, layer_collectives
from autopar.search.layer_tables import tidy
from autopar.search.reshard_tables import LOCAL

__all__ = ["plan_collectives"]


def plan_collectives(
    program: Program, plan: Plan, training: TrainingSpec | None = None
) -> tuple[PricedCollective, ...]:
    """Every collective of one step: for each layer what is moved to it, then its own.

    These are the ones that the plan's price counts (`layer_collectives` and `crossings.crossing_s`), with the actual
    layers' values as names.  Collectives of parameters may travel in shared buffers: fewer calls, the same bytes.
    What the caller gets costs nothing in plans that a search made: the loss and new values of buffers leave whole
    there, and other outputs as they lie.

    Args:
        program: that the plan is for.
        plan: any plan that fits it, searched, edited or random.
        training: how it is trained; by default as `TrainingSpec` says.

    Raises:
        ValueError: the plan does not fit the program.
    """
    training = training or TrainingSpec()
    strategies = [plan.strategies[planned.strategy] for planned in plan.layers]
    values = {name: value for value, name in program.parameters.items()}
    shared = {values[name]: (plan.shared_mesh, layout) for name, layout in plan.shared_storage}
    arriving: list[list[PricedCollective]] = [[] for _ in program.layers]
    for reader, run in _crossing_collectives(program, strategies, plan.num_microbatches, training):
        arriving[reader].append(run)
    found: list[PricedCollective] = []
    for layer, strategy, before in zip(program.layers, strategies, arriving, strict=True):
        found += before
        found += _own_collectives(program, layer, strategy, plan.num_microbatches, training, shared)
    return (*found, *_returning_collectives(program, strategies, plan.num_microbatches, training))


def _own_collectives(
    program: Program,
    layer: Layer,
    strategy: LayerStrategy,
    num_microbatches: int,
    training: TrainingSpec,
    shared: SharedStorage,
) -> tuple[PricedCollective, ...]:
    """Those inside a layer, whose strategy names the values of the first layer of its kind."""
    names = dict(zip(_value_names(program.kinds[layer.kind]), _value_names(layer), strict=True))
    own = replace(strategy, copies=tuple((names[name], layout) for name, layout in strategy.copies))
    return layer_collectives(program, layer, own, num_microbatches, training, shared)


def _value_names(layer: Layer) -> tuple[str, ...]:
    return (*layer.inputs, *layer.held, *(name for op in layer.ops for name in op.results))


def _crossing_collectives(
    program: Program, strategies: list[LayerStrategy], num_microbatches: int, training: TrainingSpec
) -> Iterator[tuple[int, PricedCollective]]:
    """(index of the reading layer, collective) for every value that crosses to another layer."""
    time = {layer.kind: strategy.time for layer, strategy in zip(program.layers, strategies, strict=True)}
    for crossing in find_crossings(program, time, num_microbatches):
        source, target = strategies[crossing.producer], strategies[crossing.reader]
        steps = crossing_steps(
            (source.mesh, source.outputs[crossing.output]), (target.mesh, target.inputs[crossing.input])
        )
        has_gradient = crossing.requires_grad and training.is_training
        for step in steps:
            for kind, phase in ((step.forward, "forward"), (step.backward, "backward")):
                if kind not in LOCAL and (phase == "forward" or has_gradient):
                    num_bytes = crossing.tensor.num_bytes * step.fraction
                    yield (
                        crossing.reader,
                        PricedCollective(
                            crossing.value, kind, step.axis, num_bytes, num_microbatches, phase, "activation"
                        ),
                    )


def _returning_collectives(
    program: Program, strategies: list[LayerStrategy], num_microbatches: int, training: TrainingSpec
) -> Iterator[PricedCollective]:
    """Those that make the loss and new values of buffers whole, and turn terms of other outputs into values."""
    given = {*program.outputs, *program.updates.values()}
    for layer, strategy in zip(program.layers, strategies, strict=True):
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
            for step in reshard(layout, target, strategy.mesh):
                for kind, phase in ((step.forward, "forward"), (step.backward, "backward")):
                    if kind not in LOCAL and (phase == "forward" or is_differentiated):
                        num_bytes = tensor.num_bytes * step.fraction
                        yield PricedCollective(name, kind, step.axis, num_bytes, times, phase, "activation")
