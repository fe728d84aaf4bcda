"""The prediction of any plan, searched, edited or made by hand: all its numbers from its decisions and prices alone.

The step's seconds are those of its simulation (`simulate`), its bytes those of its memory (`memory`).  A layer's
cost is that of `layer_cost`, with the moves from other layers to it, and with the cost of parameters that several
layers share (counted at the first layer of each device group that reads them).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.placement import Axis
from autopar.plan import Decisions
from autopar.plan.prediction import LayerCost, Prediction
from autopar.program import Program
from autopar.schedules.action_lists import ScheduleSource, StageCost, count_flights
from autopar.step.activation_policies import splits_backward
from autopar.step.costs.layer_cost import computing_seconds, placed_collectives, placed_cost
from autopar.step.costs.model_flops import model_flops
from autopar.step.costs.optimizer_costs import gather_s, layer_gathers_s
from autopar.step.costs.parameter_costs import shared_costs
from autopar.step.costs.plan_collectives import StepCollectives, output_gathers, step_collectives
from autopar.step.costs.row_cost import row_cost
from autopar.step.costs.stage_costs import CostColumns, pipeline_step_s, stage_costs
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.planned_layers import LayerFacts, PlannedLayers
from autopar.step.prices import Prices, run_s
from autopar.step.simulation.simulate import step_seconds
from autopar.step.simulation.step_memory import Moment, peak_bytes, step_memory
from autopar.step.training import TrainingSpec

__all__ = ["StepPricing", "layer_costs", "predict"]

_NOTHING = 1e-12  # share of the step: less is rounding


def predict(
    program: Program, decisions: Decisions, prices: Prices, training: TrainingSpec, schedules: ScheduleSource | None
) -> Prediction:
    """The prediction of a step by these decisions; arguments and errors are those of `StepPricing`."""
    return StepPricing(program, decisions, prices, training, schedules).prediction


@dataclass(eq=False)
class StepPricing:
    """What a step by a plan's decisions takes: its seconds alone, or all that is predicted of it.

    Attributes:
        program: that the decisions fit (`autopar.step.plan_check.check_fit`).
        decisions: of any plan.
        prices: of the devices that it is to run on.
        requested: how the caller trains; the decisions add to it.
        schedules: where the action lists of its schedule come from; needed for a plan with stages.
        facts: those of a search with the same arguments.

    Properties raise:
        ValueError: a strategy does not fit its layer.
        MissingPriceError: an op or collective has no price.
    """

    program: Program
    decisions: Decisions
    prices: Prices
    requested: TrainingSpec
    schedules: ScheduleSource | None
    facts: LayerFacts = field(default_factory=LayerFacts)

    @cached_property
    def training(self) -> TrainingSpec:
        """How it is trained by the decisions."""
        return self.requested.by(self.decisions)

    @cached_property
    def layers(self) -> PlannedLayers:
        """The layers under their strategies."""
        return PlannedLayers(self.program, self.decisions, self.facts)

    @cached_property
    def between(self) -> StepCollectives:
        """The collectives outside of layers."""
        return step_collectives(self.layers, self.training)

    @cached_property
    def step_s(self) -> float:
        """The seconds of the simulated step."""
        return step_seconds(self.layers, self.prices, self.training, self.schedules, self.between)

    @cached_property
    def memory(self) -> tuple[tuple[Moment, ...], ...]:
        """Per device group, the moments of the step."""
        return step_memory(self.layers, self.training, self.schedules)

    @property
    def peak_memory_bytes(self) -> float:
        """The most that a device holds at any moment."""
        return max(map(peak_bytes, self.memory))

    @cached_property
    def prediction(self) -> Prediction:
        """Seconds and bytes, by layer and by stage."""
        layers, prices, training = self.layers, self.prices, self.training
        costs = layer_costs(layers, self.between, prices, training)
        peaks = [peak_bytes(moments) for moments in self.memory]
        stages, sum_s = self._stages(costs, peaks)
        outputs_s = sum(_output_seconds(layers, prices)) if training.is_training else 0.0
        is_same = abs(sum_s - self.step_s) <= _NOTHING * sum_s
        step_s = sum_s if is_same else self.step_s
        flops = model_flops(self.program, training)
        dtype = max(flops, key=lambda name: flops[name], default="")
        return Prediction(
            device=prices.device,
            price_source=_price_source(layers, costs, prices, training),
            step_time_s=step_s,
            overlapped_s=sum_s - step_s,
            peak_memory_bytes=max(peaks),
            host_memory_bytes=max((moment.host_bytes for moments in self.memory for moment in moments), default=0.0),
            samples_per_step=self.program.batch_size,
            costs=costs,
            stages=stages,
            optimizer_gathers_s=_optimizer_gathers_s(layers, prices, training),
            output_gathers_s=outputs_s if training.gathers_outputs else 0.0,
            output_reads_s=0.0 if training.gathers_outputs else outputs_s,
            tokens_per_step=self.program.num_tokens,
            dtype=dtype,
            model_flops=sum(flops.values()),
            peak_flops_per_s=prices.peak_flops_per_s(dtype),
            row=row_cost(layers, costs, prices, training, step_s, max(peaks)),
        )

    def _stages(self, costs: tuple[LayerCost, ...], peaks: Sequence[float]) -> tuple[tuple[StageCost, ...], float]:
        """The cost of every stage, and the seconds of the step if nothing overlaps in a layer."""
        decisions = self.decisions
        if not decisions.stages:
            return (), sum(cost.total_s for cost in costs)
        assert self.schedules is not None
        actions = decisions.shape.actions(self.schedules)
        stages = _stage_costs(self.layers, costs, self.between, self.prices, self.training)
        flights = count_flights(actions, len(stages))
        measured = tuple(
            replace(cost, peak_memory_bytes=peaks[stage.group], in_flight=flight)
            for stage, cost, flight in zip(decisions.stages, stages, flights, strict=True)
        )
        return measured, pipeline_step_s(decisions.shape, actions, stages)


def layer_costs(
    layers: PlannedLayers, between: StepCollectives, prices: Prices, training: TrainingSpec
) -> tuple[LayerCost, ...]:
    """The cost of every layer, with moves to it (of `between`) and the parameters that it shares."""
    costs = layers.find("cost", lambda placed: placed_cost(placed, prices, training))
    for index, runs in enumerate(between.arriving):
        ahead_s, back_s = (
            layers.decisions.num_microbatches * sum(run_s(run, prices) for run in runs if run.phase == phase)
            for phase in ("forward", "backward")
        )
        costs[index] += LayerCost(activation_comm_s=ahead_s + back_s, forward_comm_s=ahead_s)
    size, groups = layers.decisions.group_size, layers.decisions.num_groups
    for name, shared in shared_costs(layers.program, layers.shared, prices, training, size, groups).items():
        readers = layers.first_readers(name).values()
        exchange_s = (len(readers) - 1) * shared.exchange_s
        own = LayerCost(optimizer_s=shared.step_s, parameter_comm_s=exchange_s, step_comm_s=exchange_s) + shared.memory
        for index in readers:
            costs[index] += own
    if training.gathers_outputs:
        for index, seconds in enumerate(_output_seconds(layers, prices)):
            costs[index] += LayerCost(activation_comm_s=seconds, step_comm_s=seconds)
    return tuple(costs)


def _output_seconds(layers: PlannedLayers, prices: Prices) -> list[float]:
    """Per layer, seconds to make the caller's outputs of it, other than the loss, whole on every rank."""
    runs = (output_gathers(layers, index) for index in range(len(layers.placed)))
    return [sum(run_s(run, prices) for run in own) for own in runs]


def _optimizer_gathers_s(layers: PlannedLayers, prices: Prices, training: TrainingSpec) -> float:
    """Seconds in which a device gathers whole parameters for the optimizer, the mean over device groups."""
    if max(training.whole_states) < 0:
        return 0.0
    seconds = sum(layers.find("gathers", lambda placed: layer_gathers_s(placed, prices, training)))
    for name, where in layers.shared.items():
        value = layers.program.values[name]
        if value.requires_grad and training.is_training:
            seconds += len(layers.first_readers(name)) * gather_s(value, *where, prices, training)
    return seconds / layers.decisions.num_groups


def _stage_costs(
    layers: PlannedLayers,
    costs: tuple[LayerCost, ...],
    between: StepCollectives,
    prices: Prices,
    training: TrainingSpec,
) -> tuple[StageCost, ...]:
    decisions = layers.decisions
    sends_s = [[0.0, 0.0] for _ in decisions.stages]  # over the cut behind each stage, and back
    for stage, run in between.sent:
        is_back = run.phase == "backward"
        sends_s[stage - is_back][is_back] += run_s(run, prices)
    splits = [splits_backward(strategy, compiled=training.compiled) for strategy in layers.strategies]
    return stage_costs(
        decisions.shape,
        [*(stage.start for stage in decisions.stages), len(costs)],
        CostColumns.of(costs, splits, decisions.num_microbatches),
        [(ahead_s, back_s) for ahead_s, back_s in sends_s],
        sum(run_s(run, prices) for run in between.broadcasts),
    )


def _price_source(
    layers: PlannedLayers, costs: tuple[LayerCost, ...], prices: Prices, training: TrainingSpec
) -> tuple[tuple[str, float], ...]:
    """Shares of the step's seconds by what their prices rest on; they add up to 1.

    What crosses between layers is taken to rest on the same as the collectives inside of them.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    inside: defaultdict[str, float] = defaultdict(float)
    sources = layers.find("sources", lambda placed: _sources(placed, prices, training))
    for (computing, communicating), times in Counter(sources).items():
        for source, each_s in computing:
            seconds[source] += times * each_s
        for source, each_s in communicating:
            inside[source] += times * each_s
    if not any(inside.values()):
        inside[prices.collective_source("all_gather", Axis(layers.decisions.group_size, 1))] = 1.0
    communication_s = sum(cost.activation_comm_s + cost.parameter_comm_s for cost in costs)
    for source, each_s in inside.items():
        seconds[source] += communication_s * each_s / sum(inside.values())
    seconds[prices.optimizer_source] += sum(cost.optimizer_s for cost in costs)
    total = sum(seconds.values())
    return tuple((name, each_s / total) for name, each_s in seconds.items() if each_s) if total else ()


Seconds = tuple[tuple[str, float], ...]


def _sources(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> tuple[Seconds, Seconds]:
    """Seconds of a layer's ops and of its collectives, by what their prices rest on."""
    communicating: defaultdict[str, float] = defaultdict(float)
    for run in placed_collectives(placed, training, prices):
        each_s = run.times * run_s(run, prices)
        communicating[prices.collective_source(run.kind, run.axis)] += each_s
    computing: defaultdict[str, float] = defaultdict(float)
    for source, each_s in computing_seconds(placed, prices, training):
        computing[source] += each_s
    return tuple(computing.items()), tuple(communicating.items())
