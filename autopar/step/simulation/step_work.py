"""All work of a plan's step: of every layer, between layers and stages, and at the end.

Everything comes from where the plan's price comes from (`layer_cost`, `plan_collectives`), cut into items of one
microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.placement import Axis, Links
from autopar.program import Program
from autopar.schedules.action_lists import ScheduleSource
from autopar.step.activation_policies import activation_policy
from autopar.step.costs.layer_cost import are_rerun, offload_s, running_collectives, stored_collectives, weight_share
from autopar.step.costs.op_seconds import op_seconds
from autopar.step.costs.optimizer_costs import optimizer_s
from autopar.step.costs.overlap_estimate import in_one_buffer
from autopar.step.costs.parameter_costs import brought_s, gradient_sums_s, layer_parameters, shared_costs
from autopar.step.costs.plan_collectives import StepCollectives, step_collectives
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.layer_tensors.liveness import running_memory
from autopar.step.prices import PricedCollective, Prices, run_s
from autopar.step.simulation.actions import StepActions, step_actions
from autopar.step.training import TrainingSpec, own_training

__all__ = ["Item", "LayerWork", "StepWork", "collective_item", "layer_work", "step_work"]


class Item(NamedTuple):
    """One thing that a stream does: `seconds` alone; `taken` of its speed is lost by overlapped compute.

    A collective keeps `links` busy; copies from the host's memory take turns with every collective.
    """

    category: str
    name: str
    seconds: float
    layer: int = -1
    num_bytes: float = 0.0
    detail: str = ""
    taken: float = 0.0
    links: Links = Links.NODE | Links.NETWORK

    @property
    def is_collective(self) -> bool:
        """Whether it is communication: it moves data, and computes nothing."""
        return bool(self.detail)


@dataclass(frozen=True)
class LayerWork:
    """A layer's items for one microbatch, in order.

    Args:
        forward: of the forward.
        again: what runs again before the backward.
        backward: of the whole backward.
        inputs: the part of `backward` for the gradients of the layer's inputs,
        weights: and the rest of it.
        gathers: what brings its parameters from their storage.
        reduces: what brings their gradients back.
        offload: what copies its saved tensors to the host's memory.
        fetch: what copies them back.
    """

    forward: tuple[Item, ...]
    again: tuple[Item, ...]
    backward: tuple[Item, ...]
    inputs: tuple[Item, ...]
    weights: tuple[Item, ...]
    gathers: tuple[Item, ...]
    reduces: tuple[Item, ...]
    offload: tuple[Item, ...] = ()
    fetch: tuple[Item, ...] = ()

    def started(self, kind: str) -> tuple[Item, ...]:
        """What a `LayerAction` of this kind starts on a stream of its own."""
        by_kind = {"UNSHARD": self.gathers, "REDUCE": self.reduces, "OFFLOAD": self.offload, "FETCH": self.fetch}
        return by_kind.get(kind, ())

    def items(self, kind: str) -> tuple[Item, ...]:
        """What a `LayerAction` of this kind runs on the computing stream."""
        by_kind = {"F": self.forward, "B": self.again + self.backward, "I": self.again + self.inputs, "W": self.weights}
        return by_kind.get(kind, ())


def collective_item(run: PricedCollective, prices: Prices, layer: int = -1) -> Item:
    """One run of this collective."""
    category = _CATEGORIES.get(run.purpose, "activation communication")
    if run.purpose == "parameter" and run.phase == "backward":
        category = "reduce"
    seconds = run_s(run, prices)
    taken = prices.interference(run.kind, run.axis)
    detail, links = _describe(run.kind, run.axis), run.axis.links(prices.devices_per_node)
    return Item(category, run.value, seconds, layer, run.num_bytes, detail, taken, links)


_CATEGORIES = {"parameter": "gather", "stage": "send", "tied": "send", "output": "broadcast"}


def _describe(kind: str, axis: Axis) -> str:
    where = "neighbors" if axis.stride == 1 else f"devices, each {axis.stride}th"
    return f"{kind} over {axis.size} {where}"


def layer_work(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> LayerWork:
    """The work of a layer that a strategy has been applied to."""
    training = own_training(placed.program, placed.layer, training)
    runs = list(running_collectives(placed, training, prices))
    back = [run for run in runs if run.phase == "backward"]
    ahead_s, rerun_s, back_s, weight_s = _op_seconds(placed, prices, training)
    inputs_s = [whole - part for whole, part in zip(back_s, weight_s, strict=True)]
    stored = list(stored_collectives(placed, training))
    sum_s = gradient_sums_s(placed, placed.view.num_microbatches, prices, training) / placed.view.num_microbatches
    return LayerWork(
        forward=_in_order("forward", ahead_s, [run for run in runs if run.phase == "forward"], prices),
        again=_in_order("recompute", rerun_s, [run for run in runs if run.phase == "recompute"], prices),
        backward=(*_in_order("backward", back_s, back, prices), *_computing("backward", sum_s)),
        inputs=_in_order("backward", inputs_s, [run for run in back if run.purpose != "parameter"], prices),
        weights=(
            *_in_order("weight", weight_s, [run for run in back if run.purpose == "parameter"], prices),
            *_computing("weight", sum_s),
        ),
        gathers=(
            *_brought(placed, prices, training),
            *_traveling_together(placed.program, [run for run in stored if run.phase == "forward"], prices),
        ),
        reduces=_traveling_together(placed.program, [run for run in stored[::-1] if run.phase == "backward"], prices),
        offload=_copies("offload", placed, prices, training),
        fetch=_copies("fetch", placed, prices, training),
    )


def _copies(category: str, placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> tuple[Item, ...]:
    """The copies of what a layer saves to the host's memory, or back."""
    if not activation_policy(placed.recompute).offloads or not training.is_training:
        return ()
    memory = running_memory(placed, (placed.recompute,), training)[placed.recompute]
    seconds, num_bytes = offload_s(memory, prices), memory.offloaded_bytes
    detail = f"{len(memory.saved)} tensors"
    return (
        (Item(category, "", seconds, num_bytes=num_bytes, detail=detail, taken=prices.host.taken),) if num_bytes else ()
    )


def _brought(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> tuple[Item, ...]:
    """The copies of a layer's parameters from the host's memory; they take turns with collectives."""
    seconds = brought_s(placed, prices, training)
    if not seconds:
        return ()
    sizes = [part.brought_bytes for _, part in layer_parameters(placed, training)]
    detail, taken = f"{len(sizes)} parameters from the host's memory", prices.host.taken
    return (Item("gather", "", seconds, num_bytes=sum(sizes), detail=detail, taken=taken),)


def _computing(category: str, seconds: float) -> tuple[Item, ...]:
    return (Item(category, "", seconds),) if seconds else ()


def _traveling_together(program: Program, runs: Sequence[PricedCollective], prices: Prices) -> tuple[Item, ...]:
    """The collectives of one layer's parameters: those of a kind share a buffer, and its seconds by their bytes."""
    items: list[Item] = []
    for together in in_one_buffer(program, runs):
        whole = replace(together[0], num_bytes=sum(run.num_bytes for run in together))
        item = collective_item(whole, prices)
        items += [
            item._replace(
                name=run.value, num_bytes=run.num_bytes, seconds=item.seconds * run.num_bytes / whole.num_bytes
            )
            for run in together
        ]
    return tuple(items)


def _op_seconds(
    placed: PlacedLayer, prices: Prices, training: TrainingSpec
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Per op, for one microbatch: forward, forward again, backward, the part of the latter for parameters."""
    ahead_s: list[float] = []
    rerun_s: list[float] = []
    back_s: list[float] = []
    weight_s: list[float] = []
    times = op_seconds(placed, prices, training)
    again = are_rerun(placed, placed.recompute, training)
    for op, is_again, time in zip(placed.layer.ops, again, times, strict=True):
        ahead_s.append(time.forward_s)
        rerun_s.append(time.forward_s if is_again else 0.0)
        back_s.append(time.backward_s)
        weight_s.append(time.backward_s * weight_share(placed.program, op))
    return ahead_s, rerun_s, back_s, weight_s


def _in_order(
    category: str, seconds: Sequence[float], runs: Sequence[PricedCollective], prices: Prices
) -> tuple[Item, ...]:
    """Computing cut by its collectives; whatever is not forward goes from the last op to the first, reruns apart."""
    is_backward = category not in ("forward", "recompute")
    positions = range(len(seconds), -1, -1) if is_backward else range(len(seconds) + 1)
    at: dict[int, list[PricedCollective]] = {}
    for run in reversed(runs) if is_backward else runs:
        at.setdefault(run.before, []).append(run)
    items: list[Item] = []
    waiting_s = 0.0
    for position in positions:
        for run in at.get(position, ()):
            items += _computing(category, waiting_s)
            waiting_s = 0.0
            items.append(collective_item(run, prices))
        op = position - 1 if is_backward else position
        waiting_s += seconds[op] if 0 <= op < len(seconds) else 0.0
    return (*items, *_computing(category, waiting_s))


@dataclass(frozen=True)
class StepWork:
    """Everything that one step does.

    Args:
        actions: their order.
        layers: the work of each layer.
        sends: per stage, what it sends to the next one (nothing if that is on the same group), one microbatch,
        sends_back: and to the one before.
        optimizer: the work of the optimizer, per layer.
        at_end: per group, collectives of outputs other than the loss.
        ties: per parameter that several groups hold: the groups, and what each of them sends.
        broadcasts: what is broadcast to all groups.
    """

    actions: StepActions
    layers: tuple[LayerWork, ...]
    sends: tuple[tuple[Item, ...], ...]
    sends_back: tuple[tuple[Item, ...], ...]
    optimizer: tuple[Item, ...]
    at_end: tuple[tuple[Item, ...], ...]
    ties: tuple[tuple[tuple[int, ...], tuple[Item, ...]], ...]
    broadcasts: tuple[Item, ...]


def step_work(
    layers: PlannedLayers,
    prices: Prices,
    training: TrainingSpec,
    schedules: ScheduleSource | None,
    between: StepCollectives | None = None,
    *,
    is_named: bool = True,
) -> StepWork:
    """The work of a step by the plan's own decisions; `schedules` is needed for stages.

    `between` is `step_collectives` of the same layers, for a caller that has them.
    Without `is_named` items of layers don't say of which layer and value they are, for a caller that asks for seconds
    alone: a search simulates hundreds of steps.
    """
    actions = step_actions(layers.program, layers.decisions, training, schedules)
    between = between or step_collectives(layers, training)
    own = layers.find(
        "work", lambda placed: (layer_work(placed, prices, training), optimizer_s(placed, prices, training))
    )
    ends = [
        [collective_item(run, prices, index) for run in runs if run.times != layers.decisions.num_microbatches]
        for index, runs in enumerate(between.returning)
    ]
    return StepWork(
        actions,
        tuple(_layer(layers, index, work, between, prices, is_named=is_named) for index, (work, _) in enumerate(own)),
        *_sends(layers, between, prices),
        _optimizer(layers, [each_s for _, each_s in own], prices, training) if training.is_training else (),
        tuple(
            tuple(item for index in actions.own(group) for item in ends[index])
            for group in range(layers.decisions.num_groups)
        ),
        tuple((groups, (collective_item(run, prices),) * run.times) for groups, run in between.tied),
        tuple(collective_item(run, prices) for run in between.broadcasts),
    )


def _layer(
    layers: PlannedLayers, index: int, work: LayerWork, between: StepCollectives, prices: Prices, *, is_named: bool
) -> LayerWork:
    """The work of the layer of this index, with what arrives before it and what the caller gets after it."""
    if not (is_named or between.arriving[index] or between.returning[index]):
        return work
    names, name = (layers.names(index) if is_named else {}), layers.program.layers[index].name

    def own(items: tuple[Item, ...]) -> tuple[Item, ...]:
        if not is_named:
            return items
        return tuple(
            item._replace(layer=index, name=names.get(item.name, item.name) if item.is_collective else name)
            for item in items
        )

    def moved(runs: Sequence[PricedCollective], phase: str) -> tuple[Item, ...]:
        return tuple(collective_item(run, prices, index) for run in runs if run.phase == phase)

    count = layers.decisions.num_microbatches
    arriving, returning = between.arriving[index], [run for run in between.returning[index] if run.times == count]
    before, after = moved(returning[::-1], "backward"), moved(arriving[::-1], "backward")
    return LayerWork(
        (*moved(arriving, "forward"), *own(work.forward), *moved(returning, "forward")),
        own(work.again),
        (*before, *own(work.backward), *after),
        (*before, *own(work.inputs), *after),
        own(work.weights),
        own(work.gathers),
        own(work.reduces),
        own(work.offload),
        own(work.fetch),
    )


def _sends(
    layers: PlannedLayers, between: StepCollectives, prices: Prices
) -> tuple[tuple[tuple[Item, ...], ...], tuple[tuple[Item, ...], ...]]:
    """Per stage, what it sends to the next one, and to the one before."""
    ahead: list[tuple[Item, ...]] = [()] * len(layers.decisions.ranges)
    back = list(ahead)
    for stage, run in between.sent:
        (ahead if run.phase == "forward" else back)[stage] += (collective_item(run, prices),)
    return tuple(ahead), tuple(back)


def _optimizer(layers: PlannedLayers, seconds: list[float], prices: Prices, training: TrainingSpec) -> tuple[Item, ...]:
    """What the optimizer takes; of shared parameters in the first layer of each group that reads them."""
    costs = shared_costs(layers.program, layers.shared, prices, training, layers.decisions.group_size, 1)
    for name, cost in costs.items():
        for index in layers.first_readers(name).values():
            seconds[index] += cost.step_s
    named = zip(layers.program.layers, seconds, strict=True)
    return tuple(Item("optimizer", layer.name, each, index) for index, (layer, each) in enumerate(named))
