"""From chosen candidates to a `Plan`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.placement import Axis, Layout
from autopar.plan import LayerCost, LayerStrategy, Plan, PlannedLayer
from autopar.program import Layer, Program
from autopar.search.candidates import Candidate, Scene
from autopar.search.labels import axis_labels
from autopar.step.boundary_values import Crossing, crossing_parts_s
from autopar.step.layer_cost import (
    TrainingSpec,
    is_differentiable,
    is_rerun,
    own_training,
    placed_collectives,
)
from autopar.step.local_layer import PlacedLayer
from autopar.step.prices import Prices
from autopar.step.shared_parameters import SharedCost

__all__ = [
    "Choice",
    "assemble_plan",
    "boundary_seconds",
    "first_readers",
    "layer_costs",
]


@dataclass(frozen=True, eq=False)
class Choice:
    """One candidate per layer.

    Args:
        scene: what all layers share.
        candidates: one per layer.
        crossings: all values that cross from layer to layer.
        shared_mesh: the mesh of shared parameters' storage.
        world_size: number of all devices.
        shared_costs: per shared parameter what it takes, counted at the first layer of each device group that reads it.
        num_samples: rows of the global batch.
        group_of: per layer the device group that runs it.
    """

    scene: Scene
    candidates: tuple[Candidate, ...]
    crossings: tuple[Crossing, ...]
    shared_mesh: tuple[int, ...]
    world_size: int
    shared_costs: Mapping[str, SharedCost]
    num_samples: int
    group_of: tuple[int, ...]


def boundary_seconds(choice: Choice) -> list[tuple[float, float]]:
    """Per layer, the seconds to bring what crosses to it from where it was produced, and the gradients back."""
    seconds = [(0.0, 0.0)] * len(choice.candidates)
    for crossing in choice.crossings:
        source = choice.candidates[crossing.producer].strategy
        target = choice.candidates[crossing.reader].strategy
        ahead_s, back_s = crossing_parts_s(
            choice.scene.prices,
            crossing.tensor,
            crossing.requires_grad and choice.scene.training.is_training,
            choice.scene.num_microbatches,
            (source.mesh, source.outputs[crossing.output]),
            (target.mesh, target.inputs[crossing.input]),
        )
        before = seconds[crossing.reader]
        seconds[crossing.reader] = before[0] + ahead_s, before[1] + back_s
    return seconds


def layer_costs(choice: Choice) -> list[LayerCost]:
    """Per layer its candidate's cost (that of `layer_cost`), boundary moves included."""
    costs = [
        replace(
            candidate.cost,
            activation_comm_s=candidate.cost.activation_comm_s + ahead_s + back_s,
            forward_comm_s=candidate.cost.forward_comm_s + ahead_s,
        )
        for candidate, (ahead_s, back_s) in zip(choice.candidates, boundary_seconds(choice), strict=True)
    ]
    for name, shared in choice.shared_costs.items():
        readers = first_readers(choice, name)
        for index in readers:
            costs[index] = _add_shared(costs[index], shared, len(readers) - 1)
    return costs


def first_readers(choice: Choice, name: str) -> tuple[int, ...]:
    """The first layer of each device group that reads the shared parameter of this name."""
    first: dict[int, int] = {}
    for index, layer in enumerate(choice.scene.program.layers):
        if name in layer.held:
            first.setdefault(choice.group_of[index], index)
    return tuple(first.values())


def _add_shared(cost: LayerCost, shared: SharedCost, num_others: int) -> LayerCost:
    exchange_s = num_others * shared.exchange_s
    return replace(
        cost,
        optimizer_s=cost.optimizer_s + shared.step_s,
        parameter_comm_s=cost.parameter_comm_s + exchange_s,
        step_comm_s=cost.step_comm_s + exchange_s,
        parameter_bytes=cost.parameter_bytes + shared.memory.parameter_bytes,
        gradient_bytes=cost.gradient_bytes + shared.memory.gradient_bytes,
        optimizer_bytes=cost.optimizer_bytes + shared.memory.optimizer_bytes,
    )


def assemble_plan(choice: Choice, program: Program, prices: Prices, training: TrainingSpec) -> Plan:
    """The plan of this choice; limits, gap, constraints and notes are the caller's to fill in."""
    costs = layer_costs(choice)
    strategies: list[LayerStrategy] = []
    planned: list[PlannedLayer] = []
    entries: dict[tuple[int, LayerStrategy, LayerCost], int] = {}
    first_of_kind = {layer.kind: layer for layer in program.kinds}
    used: list[LayerCost] = []
    for layer, candidate, cost in zip(program.layers, choice.candidates, costs, strict=True):
        key = (layer.kind, candidate.strategy, cost)
        if key not in entries:
            entries[key] = len(strategies)
            strategies.append(_finish(program, candidate, first_of_kind[layer.kind]))
            used.append(cost)
        planned.append(PlannedLayer(layer.name, layer.kind, entries[key]))
    return Plan(
        fingerprint=program.fingerprint,
        world_size=choice.world_size,
        device=prices.device,
        num_microbatches=choice.scene.num_microbatches,
        layers=tuple(planned),
        strategies=tuple(strategies),
        costs=tuple(used),
        shared_mesh=choice.shared_mesh,
        shared_storage=_shared_storage(program, choice),
        step_time_s=sum(cost.total_s for cost in costs),
        peak_memory_bytes=sum(cost.persistent_bytes for cost in costs) + max(cost.transient_bytes for cost in costs),
        memory_limit_bytes=prices.memory_bytes,
        samples_per_step=choice.num_samples,
        optimality_gap=0.0,
        price_source=_price_sources(choice, costs, training),
    )


def _shared_storage(program: Program, choice: Choice) -> tuple[tuple[str, Layout], ...]:
    return tuple((program.parameters[name], layout) for name, (_, layout) in choice.scene.shared.items())


def _finish(program: Program, candidate: Candidate, first: Layer) -> LayerStrategy:
    """The candidate's strategy with its axes' labels, naming values of the first layer of the kind."""
    strategy, layer = candidate.strategy, candidate.layer
    names = dict(zip(_value_names(layer), _value_names(first), strict=True))
    copies = tuple((names[name], layout) for name, layout in strategy.copies)
    return replace(strategy, copies=copies, labels=axis_labels(program, layer, strategy))


def _value_names(layer: Layer) -> tuple[str, ...]:
    return (*layer.inputs, *layer.held, *(name for op in layer.ops for name in op.results))


def _price_sources(choice: Choice, costs: list[LayerCost], training: TrainingSpec) -> tuple[tuple[str, float], ...]:
    """Shares of the step's seconds by what their prices rest on; they add up to 1.

    What crosses between layers is taken to rest on the same as the collectives inside of them.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    inside: defaultdict[str, float] = defaultdict(float)
    prices = choice.scene.prices
    counts = Counter(map(id, choice.candidates))

    def sources(placed: PlacedLayer) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
        runs = placed_collectives(placed, training)
        return list(_computing_s(choice.scene, placed, training)), [
            (
                prices.collective_source(run.kind, run.axis),
                run.times * prices.collective_s(run.kind, run.axis, run.num_bytes),
            )
            for run in runs
        ]

    for candidate in {id(c): c for c in choice.candidates}.values():
        times = counts[id(candidate)]
        computing, communicating = choice.scene.find("sources", candidate, sources)
        for source, each in computing:
            seconds[source] += times * each
        for source, each in communicating:
            inside[source] += times * each
    communication_s = sum(cost.activation_comm_s + cost.parameter_comm_s for cost in costs)
    if not any(inside.values()):
        group = choice.world_size // (1 + max(choice.group_of, default=0))
        inside[prices.collective_source("all_gather", Axis(group, 1))] = 1.0
    for source, each in inside.items():
        seconds[source] += communication_s * each / sum(inside.values())
    seconds[prices.optimizer_source] += sum(cost.optimizer_s for cost in costs)
    total = sum(seconds.values())
    return tuple((name, each / total) for name, each in seconds.items() if each) if total else ()


def _computing_s(scene: Scene, placed: PlacedLayer, training: TrainingSpec) -> Iterator[tuple[str, float]]:
    """What the price of each op rests on, and its seconds in all microbatches, run again in backward included."""
    own = own_training(scene.program, placed.layer, training)
    for op, state in zip(placed.layer.ops, placed.states, strict=True):
        differentiable = is_differentiable(scene.program, op, training)
        time = scene.prices.op_s(op, state.operand_types, state.result_types, differentiable)
        runs = 2 if is_rerun(op, placed.recompute, own) else 1
        yield time.source, scene.num_microbatches * (runs * time.forward_s + time.backward_s)
