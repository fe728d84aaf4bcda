"""All work of a plan's step: of every layer, between stages, and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.placement import Axis
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.schedule import ScheduleSource
from autopar.step.actions import StepActions, step_actions
from autopar.step.boundary_values import find_crossings
from autopar.step.layer_cost import PricedCollective, SharedStorage, TrainingSpec, optimizer_s
from autopar.step.layer_facts import LayerFacts
from autopar.step.layer_work import Around, Item, LayerWork, collective_item, layer_work, value_names
from autopar.step.plan_collectives import (
    crossing_collectives,
    own_strategy,
    returning_collectives,
    stage_collectives,
)
from autopar.step.prices import Prices
from autopar.step.sent_values import sent_values
from autopar.step.shared_parameters import shared_costs

__all__ = ["StepWork", "step_work"]


@dataclass(frozen=True)
class StepWork:
    """Everything that one step does.

    Args:
        actions: their order.
        layers: the work of each layer.
        sends: per stage, what it sends to the next one (nothing if that is on the same group), one microbatch,
        sends_back: and to the one before.
        optimizer: per layer, what the optimizer takes.
        at_end: per group, collectives of outputs beside the loss.
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
    program: Program,
    plan: Plan,
    prices: Prices,
    training: TrainingSpec,
    schedules: ScheduleSource | None,
    facts: LayerFacts | None = None,
) -> StepWork:
    """The work of `plan`, by the plan's own decisions."""
    maker = _Maker(program, plan, prices, training, facts or LayerFacts())
    actions = step_actions(program, plan, training, schedules)
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
            for own in range(plan.num_groups)
        ),
        maker.ties(),
        maker.told(),
    )


class _Maker:
    """Makes the parts of a `StepWork`."""

    def __init__(self, program: Program, plan: Plan, prices: Prices, training: TrainingSpec, facts: LayerFacts) -> None:
        self.facts = facts
        self.program = program
        self.plan = plan
        self.prices = prices
        self.training = training
        self.count = plan.num_microbatches
        self.strategies = [plan.strategies[planned.strategy] for planned in plan.layers]
        values = {name: value for value, name in program.parameters.items()}
        self.shared: SharedStorage = {values[name]: (plan.shared_mesh, layout) for name, layout in plan.shared_storage}
        self.time = {layer.kind: strategy.time for layer, strategy in zip(program.layers, self.strategies, strict=True)}
        self.group_of = [0] * len(plan.layers)
        for stage in plan.stages:
            self.group_of[stage.start : stage.stop] = [stage.group] * (stage.stop - stage.start)
        self._known: dict[tuple[object, ...], tuple[Layer, LayerWork, float]] = {}

    def arounds(self) -> list[Around]:
        """What is moved around each layer."""
        arounds = [Around() for _ in self.program.layers]
        for reader, run in crossing_collectives(self.program, self.strategies, self.count, self.training):
            around, item = arounds[reader], self._item(run, reader)
            if run.phase == "forward":
                around.arriving += (item,)
            else:
                around.arriving_back = (item, *around.arriving_back)
        for index, (layer, strategy) in enumerate(zip(self.program.layers, self.strategies, strict=True)):
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
        first, work, _ = self._own(index)
        return work.of(index, layer.name, value_names(first, layer), around)

    def optimizer(self) -> tuple[Item, ...]:
        """What the optimizer takes; of shared parameters in the first layer of each group that reads them."""
        if not self.training.is_training:
            return ()
        seconds = [self._own(index)[2] for index in range(len(self.program.layers))]
        costs = shared_costs(self.program, self.shared, self.prices, self.training, self.plan.group_size, 1)
        for name, cost in costs.items():
            met: set[int] = set()
            for index, layer in enumerate(self.program.layers):
                if name in layer.held and self.group_of[index] not in met:
                    met.add(self.group_of[index])
                    seconds[index] += cost.step_s
        named = zip(self.program.layers, seconds, strict=True)
        return tuple(Item("optimizer", layer.name, each, index) for index, (layer, each) in enumerate(named))

    def sends(self) -> tuple[tuple[tuple[Item, ...], ...], tuple[tuple[Item, ...], ...]]:
        """Per stage, what it sends to the next one, and to the one before."""
        stages = self.plan.stages
        ahead: list[tuple[Item, ...]] = [() for _ in stages] or [()]
        back: list[tuple[Item, ...]] = [() for _ in stages] or [()]
        if not stages:
            return tuple(ahead), tuple(back)
        axis = Axis(self.plan.num_groups, self.plan.group_size)
        crossings = find_crossings(self.program, self.time, self.count)
        for sent in sent_values(crossings, [stage.start for stage in stages], self.strategies):
            if stages[sent.stage].group == stages[sent.stage + 1].group:
                continue
            run = PricedCollective(sent.crossing.value, "send", axis, sent.num_bytes, self.count, "forward", "stage")
            ahead[sent.stage] += (self._item(run),)
            if sent.crossing.requires_grad and self.training.is_training:
                back[sent.stage + 1] += (self._item(run),)
        return tuple(ahead), tuple(back)

    def ties(self) -> tuple[tuple[tuple[int, ...], tuple[Item, ...]], ...]:
        """The exchange of gradients of parameters that several groups hold."""
        groups: dict[str, list[int]] = {}
        items: dict[str, tuple[Item, ...]] = {}
        for group in range(self.plan.num_groups):
            for run in self._between_groups(group, "tied"):
                groups.setdefault(run.value, []).append(group)
                items[run.value] = (self._item(run),) * run.times
        return tuple((tuple(groups[name]), items[name]) for name in groups)

    def told(self) -> tuple[Item, ...]:
        """What all groups are told."""
        return tuple(self._item(run) for run in self._between_groups(0, "output"))

    def _between_groups(self, group: int, purpose: str) -> Sequence[PricedCollective]:
        runs = stage_collectives(self.program, self.plan, self.training, group)
        return [run for run in runs if run.purpose == purpose]

    def _item(self, run: PricedCollective, layer: int = -1) -> Item:
        return collective_item(run, self.prices, layer)

    def _own(self, index: int) -> tuple[Layer, LayerWork, float]:
        """A layer like the one of this index, its work, and seconds of the optimizer."""
        layer, strategy = self.program.layers[index], self.strategies[index]
        key = (layer.kind, self.plan.layers[index].strategy, *(self.shared.get(name) for name in layer.held))
        if key not in self._known:
            own: LayerStrategy = own_strategy(self.program, layer, strategy)
            work, seconds = self.facts.find(
                "work", self.program, layer, own, self.count, self.shared,
                lambda placed: (
                    layer_work(placed, self.prices, self.training), optimizer_s(placed, self.prices, self.training)
                ),
            )  # fmt: skip
            self._known[key] = layer, work, seconds
        return self._known[key]
