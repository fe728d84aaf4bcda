"""All work of a plan's step: of every layer, between stages, and at the end."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedules.action_lists import ScheduleSource
from autopar.step.actions import StepActions, step_actions
from autopar.step.layer_cost import PricedCollective, TrainingSpec, optimizer_s
from autopar.step.layer_work import Around, Item, LayerWork, collective_item, layer_work, value_names
from autopar.step.plan_collectives import (
    boundary_collectives,
    returning_collectives,
    sent_collectives,
    tied_collectives,
    told_collectives,
)
from autopar.step.planned_layers import PlannedLayers
from autopar.step.prices import Prices
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
