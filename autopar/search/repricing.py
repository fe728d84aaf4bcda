"""The price of a plan that was not searched for: edited by a person, or made elsewhere."""

from __future__ import annotations

from dataclasses import replace

from autopar.placement import REPLICATE
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.schedule import ScheduleSource, Shape
from autopar.search.assembly import Choice, assemble_plan
from autopar.search.candidates import Candidate, Scene
from autopar.search.finals import credit_overlap
from autopar.search.stages.assembly import assemble_pipeline
from autopar.step.boundary_values import find_crossings
from autopar.step.layer_cost import layer_cost
from autopar.step.memory import with_memory
from autopar.step.plan_collectives import own_strategy
from autopar.step.prices import Prices
from autopar.step.sent_values import layer_groups
from autopar.step.shared_parameters import shared_costs
from autopar.step.training import TrainingSpec

__all__ = ["reprice"]


def reprice(
    program: Program,
    plan: Plan,
    prices: Prices,
    training: TrainingSpec,
    schedules: ScheduleSource,
) -> Plan:
    """`plan` with the costs, times and memory that its own decisions have; nothing is decided anew.

    Of a plan that a search with the same arguments made, these are the numbers that it has.

    Args:
        program: that the plan fits (`autopar.step.plan_check.check_fit`).
        plan: any plan.
        prices: of the devices that it is to run on.
        training: how it is trained.
        schedules: where the action lists of its schedule come from.

    Raises:
        ValueError: a strategy does not fit its layer.
        MissingPriceError: an op or collective has no price.
    """
    choice = _choice(program, plan, prices, training)
    if plan.stages:
        bounds = (*(stage.start for stage in plan.stages), len(plan.layers))
        shape = Shape(plan.schedule, plan.num_groups, len(plan.stages), plan.num_microbatches)
        choice = replace(choice, group_of=layer_groups(shape, bounds))
        priced = assemble_pipeline(choice, shape, bounds, schedules)
    else:
        priced = assemble_plan(choice, program, prices, training)
    priced = credit_overlap(program, priced, prices, training, schedules)
    priced = with_memory(program, priced, training, schedules)
    return replace(
        priced,
        memory_error=plan.memory_error,
        memory_limit_bytes=plan.memory_limit_bytes,
        optimality_gap=plan.optimality_gap,
        constraints=plan.constraints,
        notes=plan.notes,
        planning_s=plan.planning_s,
    )


def _choice(program: Program, plan: Plan, prices: Prices, training: TrainingSpec) -> Choice:
    strategies = [plan.strategies[layer.strategy] for layer in plan.layers]
    time = {layer.kind: strategy.time for layer, strategy in zip(program.layers, strategies, strict=True)}
    values = {name: value for value, name in program.parameters.items()}
    shared = {values[name]: (plan.shared_mesh, layout) for name, layout in plan.shared_storage}
    scene = Scene(program, prices, training, plan.num_microbatches, time, shared, 0.0)
    candidates: dict[tuple[int, LayerStrategy], Candidate] = {}
    chosen = [
        candidates.setdefault((layer.kind, strategy), _candidate(scene, layer, strategy))
        if (layer.kind, strategy) not in candidates
        else candidates[layer.kind, strategy]
        for layer, strategy in zip(program.layers, strategies, strict=True)
    ]
    return Choice(
        scene,
        tuple(chosen),
        find_crossings(program, time, plan.num_microbatches),
        plan.shared_mesh,
        plan.world_size,
        shared_costs(program, shared, prices, training, plan.group_size, plan.num_groups),
        plan.samples_per_step,
        (0,) * len(program.layers),
    )


def _candidate(scene: Scene, layer: Layer, strategy: LayerStrategy) -> Candidate:
    """The layer with this strategy; policies stand for layouts in a search only."""
    own = own_strategy(scene.program, layer, strategy)
    cost = layer_cost(scene.program, layer, own, scene.num_microbatches, scene.prices, scene.training, scene.shared)
    anywhere = (REPLICATE,) * len(strategy.mesh)
    return Candidate(layer, anywhere, anywhere, own, cost)
