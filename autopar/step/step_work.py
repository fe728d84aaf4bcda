"""All work of a plan's step: of every layer, between layers and stages, and at the end.

Everything comes from where the plan's price comes from (`layer_cost`, `plan_collectives`), cut into items of one
microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.placement import Axis
from autopar.program import Layer, Program
from autopar.schedules.action_lists import ScheduleSource
from autopar.step.actions import StepActions, step_actions
from autopar.step.activation_policies import activation_policy
from autopar.step.layer_cost import is_rerun, running_collectives, stored_collectives, transfer_s, weight_share
from autopar.step.liveness import running_memory
from autopar.step.local_layer import PlacedLayer
from autopar.step.overlap_estimate import in_one_buffer
from autopar.step.parameter_costs import gradient_sums_s, optimizer_s, shared_costs
from autopar.step.plan_collectives import (
    boundary_collectives,
    returning_collectives,
    sent_collectives,
    tied_collectives,
    told_collectives,
)
from autopar.step.planned_layers import PlannedLayers
from autopar.step.prices import PricedCollective, Prices
from autopar.step.training import TrainingSpec, is_differentiable, own_training

__all__ = ["Around", "Item", "LayerWork", "StepWork", "collective_item", "layer_work", "step_work", "value_names"]


class Item(NamedTuple):
    """One thing that a stream does: `seconds` alone; `taken` of its speed is lost by overlapped compute."""

    category: str
    name: str
    seconds: float
    layer: int = -1
    num_bytes: float = 0.0
    detail: str = ""
    taken: float = 0.0

    @property
    def is_collective(self) -> bool:
        """Whether it is communication."""
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
    """

    forward: tuple[Item, ...]
    again: tuple[Item, ...]
    backward: tuple[Item, ...]
    inputs: tuple[Item, ...]
    weights: tuple[Item, ...]
    gathers: tuple[Item, ...]
    reduces: tuple[Item, ...]

    def items(self, kind: str) -> tuple[Item, ...]:
        """What a `LayerAction` of this kind runs on the computing stream."""
        by_kind = {"F": self.forward, "B": self.again + self.backward, "I": self.again + self.inputs, "W": self.weights}
        return by_kind.get(kind, ())

    def of(self, layer: int, name: str, names: Mapping[str, str], around: Around) -> LayerWork:
        """The same of the layer of this index and name, its values named as `names` says, with what is around it."""

        def own(items: Iterable[Item]) -> tuple[Item, ...]:
            return tuple(
                item._replace(layer=layer, name=names.get(item.name, item.name) if item.is_collective else name)
                for item in items
            )

        return LayerWork(
            (*around.arriving, *own(self.forward), *around.returning),
            own(self.again),
            (*around.returning_back, *own(self.backward), *around.arriving_back),
            (*around.returning_back, *own(self.inputs), *around.arriving_back),
            own(self.weights),
            own(self.gathers),
            own(self.reduces),
        )


@dataclass
class Around:
    """The collectives around a layer: of what arrives, of what the caller gets, and of their gradients; and, once per
    step when all microbatches are done, of outputs other than the loss (`at_end`).
    """

    arriving: tuple[Item, ...] = ()
    arriving_back: tuple[Item, ...] = ()
    returning: tuple[Item, ...] = ()
    returning_back: tuple[Item, ...] = ()
    at_end: tuple[Item, ...] = ()


def collective_item(run: PricedCollective, prices: Prices, layer: int = -1) -> Item:
    """One run of this collective."""
    category = _CATEGORIES.get(run.purpose, "activation communication")
    if run.purpose == "parameter" and run.phase == "backward":
        category = "reduce"
    seconds = prices.collective_s(run.kind, run.axis, run.num_bytes)
    taken = prices.interference(run.kind, run.axis)
    return Item(category, run.value, seconds, layer, run.num_bytes, _describe(run.kind, run.axis), taken)


_CATEGORIES = {"parameter": "gather", "stage": "send", "tied": "send", "output": "broadcast"}


def _describe(kind: str, axis: Axis) -> str:
    where = "neighbours" if axis.stride == 1 else f"devices, each {axis.stride}th"
    return f"{kind} over {axis.size} {where}"


def layer_work(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> LayerWork:
    """The work of a layer that a strategy has been applied to."""
    training = own_training(placed.program, placed.layer, training)
    runs = list(running_collectives(placed, training))
    back = [run for run in runs if run.phase == "backward"]
    ahead_s, rerun_s, back_s, weight_s = _op_seconds(placed, prices, training)
    inputs_s = [whole - part for whole, part in zip(back_s, weight_s, strict=True)]
    stored = list(stored_collectives(placed, training))
    sum_s = gradient_sums_s(placed, prices, training) / placed.view.num_microbatches
    return LayerWork(
        forward=_in_order("forward", ahead_s, [run for run in runs if run.phase == "forward"], prices),
        again=(
            *_in_order("recompute", rerun_s, [run for run in runs if run.phase == "recompute"], prices),
            *_computing("recompute", _transfer_s(placed, training)),
        ),
        backward=(*_in_order("backward", back_s, back, prices), *_computing("backward", sum_s)),
        inputs=_in_order("backward", inputs_s, [run for run in back if run.purpose != "parameter"], prices),
        weights=(
            *_in_order("weight", weight_s, [run for run in back if run.purpose == "parameter"], prices),
            *_computing("weight", sum_s),
        ),
        gathers=_travelling_together(placed.program, [run for run in stored if run.phase == "forward"], prices),
        reduces=_travelling_together(placed.program, [run for run in stored[::-1] if run.phase == "backward"], prices),
    )


def _transfer_s(placed: PlacedLayer, training: TrainingSpec) -> float:
    if activation_policy(placed.recompute).transfer_s is None:
        return 0.0
    return transfer_s(running_memory(placed, (placed.recompute,), training)[placed.recompute], placed.recompute)


def _computing(category: str, seconds: float) -> tuple[Item, ...]:
    return (Item(category, "", seconds),) if seconds else ()


def _travelling_together(program: Program, runs: Sequence[PricedCollective], prices: Prices) -> tuple[Item, ...]:
    """The collectives of one layer's parameters: those of a kind share a buffer, and its seconds by their bytes."""
    found: list[Item] = []
    for together in in_one_buffer(program, runs):
        whole = replace(together[0], num_bytes=sum(run.num_bytes for run in together))
        item = collective_item(whole, prices)
        found += [
            item._replace(
                name=run.value, num_bytes=run.num_bytes, seconds=item.seconds * run.num_bytes / whole.num_bytes
            )
            for run in together
        ]
    return tuple(found)


def _op_seconds(
    placed: PlacedLayer, prices: Prices, training: TrainingSpec
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Per op, for one microbatch: forward, forward again, backward, the part of the latter for parameters."""
    ahead_s: list[float] = []
    rerun_s: list[float] = []
    back_s: list[float] = []
    weight_s: list[float] = []
    for op, state in zip(placed.layer.ops, placed.states, strict=True):
        differentiable = is_differentiable(placed.program, op, training)
        time = prices.op_s(op, state.operand_types, state.result_types, differentiable)
        ahead_s.append(time.forward_s)
        rerun_s.append(time.forward_s if is_rerun(op, placed.recompute, training) else 0.0)
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
    found: list[Item] = []
    waiting_s = 0.0
    for position in positions:
        for run in at.get(position, ()):
            found += _computing(category, waiting_s)
            waiting_s = 0.0
            found.append(collective_item(run, prices))
        op = position - 1 if is_backward else position
        waiting_s += seconds[op] if 0 <= op < len(seconds) else 0.0
    return (*found, *_computing(category, waiting_s))


def value_names(layer: Layer, other: Layer) -> dict[str, str]:
    """From the values and ops of a layer to those of another one of its kind."""
    return {} if layer is other else dict(zip(_names(layer), _names(other), strict=True))


def _names(layer: Layer) -> tuple[str, ...]:
    made = (name for op in layer.ops for name in (op.name, *op.results))
    return (*layer.inputs, *layer.state, *made)


@dataclass(frozen=True)
class StepWork:
    """Everything that one step does.

    Args:
        actions: their order.
        layers: the work of each layer.
        sends: per stage, what it sends to the next one (nothing if that is on the same group), one microbatch,
        sends_back: and to the one before.
        optimizer: per layer, what the optimizer takes.
        at_end: per group, collectives of outputs other than the loss.
        ties: per parameter that several groups hold: the groups, and what each of them sends.
        told: what is broadcast to all groups.
    """

    actions: StepActions
    layers: tuple[LayerWork, ...]
    sends: tuple[tuple[Item, ...], ...]
    sends_back: tuple[tuple[Item, ...], ...]
    optimizer: tuple[Item, ...]
    at_end: tuple[tuple[Item, ...], ...]
    ties: tuple[tuple[tuple[int, ...], tuple[Item, ...]], ...]
    told: tuple[Item, ...]


def step_work(
    layers: PlannedLayers, prices: Prices, training: TrainingSpec, schedules: ScheduleSource | None
) -> StepWork:
    """The work of a step by the plan's own decisions; `schedules` is needed for stages."""
    maker = _Maker(layers, prices, training)
    actions = step_actions(layers.program, layers.decisions, training, schedules)
    arounds = maker.arounds()
    sends, sends_back = maker.sends()
    return StepWork(
        actions,
        tuple(maker.layer(index, around) for index, around in enumerate(arounds)),
        sends,
        sends_back,
        maker.optimizer(),
        tuple(
            tuple(item for index in actions.own(own) for item in arounds[index].at_end)
            for own in range(layers.decisions.num_groups)
        ),
        maker.ties(),
        maker.told(),
    )


class _Maker:
    """Makes the parts of a `StepWork`."""

    def __init__(self, layers: PlannedLayers, prices: Prices, training: TrainingSpec) -> None:
        self.layers, self.program, self.plan = layers, layers.program, layers.decisions
        self.prices = prices
        self.training = training
        self.count = self.plan.num_microbatches
        self.works = layers.find(
            "work", lambda placed: (layer_work(placed, prices, training), optimizer_s(placed, prices, training))
        )

    def arounds(self) -> list[Around]:
        """What is moved around each layer."""
        arounds = [Around() for _ in self.program.layers]
        strategies = self.layers.strategies
        for reader, run in boundary_collectives(self.program, list(strategies), self.count, self.training):
            around, item = arounds[reader], self._item(run, reader)
            if run.phase == "forward":
                around.arriving += (item,)
            else:
                around.arriving_back = (item, *around.arriving_back)
        for index, (layer, strategy) in enumerate(zip(self.program.layers, strategies, strict=True)):
            around = arounds[index]
            for run in returning_collectives(self.program, layer, strategy, self.count, self.training):
                item = self._item(run, index)
                if run.times != self.count:
                    around.at_end += (item,)
                elif run.phase == "forward":
                    around.returning += (item,)
                else:
                    around.returning_back = (item, *around.returning_back)
        return arounds

    def layer(self, index: int, around: Around) -> LayerWork:
        """The work of the layer of this index."""
        layer = self.program.layers[index]
        first, work = self.layers.placed[index].layer, self.works[index][0]
        return work.of(index, layer.name, value_names(first, layer), around)

    def optimizer(self) -> tuple[Item, ...]:
        """What the optimizer takes; of shared parameters in the first layer of each group that reads them."""
        if not self.training.is_training:
            return ()
        seconds = [each_s for _, each_s in self.works]
        costs = shared_costs(self.program, self.layers.shared, self.prices, self.training, self.plan.group_size, 1)
        for name, cost in costs.items():
            for index in self.layers.first_readers(name).values():
                seconds[index] += cost.step_s
        named = zip(self.program.layers, seconds, strict=True)
        return tuple(Item("optimizer", layer.name, each, index) for index, (layer, each) in enumerate(named))

    def sends(self) -> tuple[tuple[tuple[Item, ...], ...], tuple[tuple[Item, ...], ...]]:
        """Per stage, what it sends to the next one, and to the one before."""
        ahead: list[tuple[Item, ...]] = [()] * len(self.plan.ranges)
        back = list(ahead)
        for stage, run in sent_collectives(self.layers.crossings, self.plan, self.training) if self.plan.stages else ():
            (ahead if run.phase == "forward" else back)[stage] += (self._item(run),)
        return tuple(ahead), tuple(back)

    def ties(self) -> tuple[tuple[tuple[int, ...], tuple[Item, ...]], ...]:
        """The exchange of gradients of parameters that several groups hold."""
        tied = tied_collectives(self.program, self.plan, self.training)
        return tuple((groups, (self._item(run),) * run.times) for groups, run in tied)

    def told(self) -> tuple[Item, ...]:
        """What all groups are told."""
        return tuple(self._item(run) for run in told_collectives(self.program, self.plan))

    def _item(self, run: PricedCollective, layer: int = -1) -> Item:
        return collective_item(run, self.prices, layer)
