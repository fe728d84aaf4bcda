"""Plans for device groups of different sizes that run at the same time in one step (`Plan.groups`).

A group of d devices computes rows of t tokens one after the other and accumulates their gradients; a group of d / 2
devices computes rows of t / 2 tokens, and so on down to one device.  The largest group takes the longest sequence.
Each group's plan comes from the same search as any plan, for one row on d devices, with the memory that is left by the
parameters, gradients and optimizer state of the plan for all devices (the global plan).  Groups may also run rows of
lengths in between, which need less padding, by the same decisions (`autopar.balance.group_kinds`).

A device may also be in several groups of a step, whose rows it computes one after the other
(`autopar.balance.nested_groups`), if there is memory for the parts of parameters and gradients that all kinds of groups
have.  Kinds that shard a parameter alike share its part.  With pipeline stages this is not planned: the time to fill
and drain them would come with every kind.

Once a step all devices unshard the parameters from where the global plan stores them, and reduce the gradients to
there.  `coupling_seconds` predicts the time of this and of the optimizer.

If the global plan has pipeline stages, groups have the same stages.  Then d counts a group's devices in each stage, and
each row is a microbatch of the schedule 1F1B, which has at most as many rows in flight as there are stages.  If device
groups have several stages each, that is interleaved 1F1B, which runs rows in rounds of as many as there are device
groups: the last round is filled up with rows that don't count (`schedules.rows_schedule`), and no more are in flight
than with three rounds.  The search is for one row; time and memory of several rows are predicted as those of a plan
with as many microbatches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.balance.group_kinds import kinds_worth_having, with_more_lengths
from autopar.errors import ConstraintError, ExampleInputsError, InfeasibleError, TraceError
from autopar.lower.groups.group_program import part_layouts
from autopar.lower.groups.target_count import loss_count
from autopar.lower.parameters.store import storage_layouts
from autopar.lower.run.stage_map import StageMap
from autopar.placement import BROADCAST, Axis, Layout, local_shape, refine_mesh, reshard
from autopar.plan import GroupPlan, Plan
from autopar.plan.headline import describe_usual
from autopar.plan.prediction import GroupRow, Prediction
from autopar.planning.sequence_separation import why_not_packed
from autopar.planning.splitting import variant_like
from autopar.program import Layer, Program
from autopar.schedules import rows_schedule
from autopar.search import SearchRequest, check_known, reuse_plan, search, stage_constraints
from autopar.search.microbatches.row_sums import row_pieces, sums_over_rows
from autopar.search.microbatches.time_assignment import why_not_row_by_row
from autopar.step.costs.parameter_costs import gradient_sums_s
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.prices import Prices, reshard_calls
from autopar.step.pricing import predict
from autopar.step.training import TrainingSpec

__all__ = [
    "GroupKind",
    "PlannedGroups",
    "coupling_seconds",
    "nested_peak_bytes",
    "part_bytes",
    "plan_groups",
    "plans_of_other_calls",
    "why_no_groups",
]

# Constraints that also hold for groups, which have the same stages.
_KEPT = ("pipeline=", "stages=", "cuts=", "schedule=1f1b", "schedule=interleaved_1f1b")
_PEAK_ROUNDS = 3  # of interleaved stages: more rows wait for those in flight (`schedules.torch_schedules`)
_MOST_TRIES = 4  # searches, each with a lower memory limit for one row, until all rows in flight fit
_FEWEST_DEVICES = 4  # 2 + 1 + 1: fewer devices can't form groups of different sizes
_MOST_SEARCHES = 6  # groups of 32 devices down to 1; rows of other lengths reuse these decisions


@dataclass(frozen=True)
class PlannedGroups:
    """The plans of groups, the predicted costs of their rows, the seconds a step adds for coupling the groups, and
    whether a device may be in several of them.
    """

    plans: tuple[GroupPlan, ...] = ()
    rows: tuple[GroupRow, ...] = ()
    coupling_s: float = 0.0
    nests: bool = False


Parts = Mapping[tuple[str, object], float]
"""Name of a parameter, and how a group shards it -> bytes of this part and of its gradient on a device."""


class GroupKind(NamedTuple):
    """A kind of group: the cost of a row, its plan, what it holds of parameters, and the peak bytes of a device in
    addition to what the plan for all devices keeps.
    """

    row: GroupRow
    plan: Plan
    parts: Parts
    peak_bytes: float


def why_no_groups(program: Program, plan: Plan, request: SearchRequest) -> str:
    """The reason why a step can't use device groups of different sizes; ``""`` if it can."""
    in_rounds = tuple(stage % plan.num_groups for stage in range(len(plan.stages)))
    if plan.stages and plan.decisions.groups != in_rounds:
        return f"the schedule {plan.schedule} has other stages on its device groups than interleaved_1f1b"
    if plan.decisions.host_storage:
        return "parameters are stored in the host's memory"
    if program.updates:
        return "the model updates buffers"
    if any(not text.replace(" ", "").startswith(_KEPT) for text in request.constraints):
        return f"it has constraints that only apply to all devices together (groups can keep {', '.join(_KEPT)})"
    reason = _why_not_counted(program)
    # With pieces it is known from the loss: images are not rows, and are put in these in the order of all rows.
    if reason or row_pieces(program):
        return reason
    reason = why_not_row_by_row(program)
    return f"rows can't be computed one by one ({reason})" if reason else ""


def _why_not_counted(program: Program) -> str:
    """The reason why the loss is no sum over rows, divided by what their inputs count; ``""`` if it is."""
    counted = loss_count(program)
    if counted is None:
        return (
            "the loss is not divided by what inputs count, as a cross entropy averaged over its targets is, or "
            "(errors * mask).sum() / mask.sum()"
        )
    if counted.of_targets and row_pieces(program) is None:
        return ""
    if program.batch_size < 2:
        return "an example with one row doesn't show whether the loss is a sum over rows: pass one with several"
    sums = sums_over_rows(program)
    unlike = [name for name in (counted.terms, *counted.sums) if name not in sums]
    own = " that are computed with their own images alone" if row_pieces(program) else ""
    return f"the loss, or what it is divided by, is no sum over rows{own} ({', '.join(unlike)})" if unlike else ""


def plan_groups(
    program: Program,
    plan: Plan,
    batches: Sequence[np.ndarray],
    trace: Callable[[int, int], Program],
    prices: Prices,
    request: SearchRequest,
    time_layers: Callable[[Program, Plan], Prices] | None = None,
) -> PlannedGroups:
    """Plan groups in addition to `plan`, the plan for all devices; the result is empty if groups don't fit in memory.

    Args:
        program: the model on the longest rows.
        plan: the plan for all devices, which also says where parameters are stored.
        batches: expected batches, each ``[n]`` lengths of sequences in tokens.
        trace: ``(rows, tokens)`` -> the program for a batch of this shape.
        prices: of the devices.
        request: the request that `plan` was searched with.
        time_layers: measures layers of a plan, as in `FamilyPlanner`.
    """
    planner = _GroupPlanner(program, plan, trace, prices, _request(program, plan, request), request, time_layers)
    share = plan.prediction.row.tokens / float(np.mean([batch.sum() for batch in batches]))
    searched = planner.search(_largest_degree(plan.group_size, share))
    if not searched:
        return PlannedGroups()
    known = {kind.row: kind for kind in searched}
    packs = not why_not_packed(program)
    chosen = kinds_worth_having(with_more_lengths(tuple(known)), plan.group_size, batches, packs=packs)
    tried = [known[row] if row in known else planner.cut(row, searched) for row in chosen]
    made = [kind for kind in tried if kind is not None]
    if len(made) < 2:
        return PlannedGroups()
    groups = tuple(GroupPlan(kind.row.tokens, kind.plan.decisions) for kind in made)
    coupling_s = coupling_seconds(program, plan, prices, planner.group_request.training)
    return PlannedGroups(groups, tuple(kind.row for kind in made), coupling_s, planner.can_nest(made))


def plans_of_other_calls(
    ones: Sequence[Program], program: Program, plan: Plan, prices: Prices, request: SearchRequest
) -> tuple[Plan, ...]:
    """Plans for `Plan.groups` in calls with other inputs than the example, such as without an optional one.

    Args:
        ones: what such a call does with a row, of each group in order.
        program: the model on the example.
        plan: the plan for all devices.
        prices: of the devices.
        request: the request that `plan` was searched with.

    Raises:
        InfeasibleError: no plan of a group fits in the memory that `plan` leaves.
    """
    planner = _GroupPlanner(
        program, plan, lambda rows, tokens: program, prices, _request(program, plan, request), request, None
    )
    kinds: list[GroupKind] = []
    for group, one in zip(plan.groups, ones, strict=True):
        known = replace(plan, decisions=group.decisions, prediction=Prediction(), other_calls=(), groups=())
        reused = None if known.stages else reuse_plan(known, 1, one, prices, planner.group_request)
        kinds.append(planner.kind(one, planner.best(one, known.group_size) if reused is None else reused))
    if plan.prediction.lengths.nests and not planner.can_nest(kinds):
        raise InfeasibleError(
            f"devices are in several groups of a step, and calls with the inputs {list(ones[0].inputs)} have no plans "
            "whose parts of parameters fit in memory together, so a step would run out of memory. Pass the inputs of "
            "the example in every step"
        )
    return tuple(kind.plan for kind in kinds)


def part_bytes(one: Program, found: Plan, training: TrainingSpec) -> Parts:
    """What `autopar.lower.groups.group_parts` holds for a group that runs the plan `found` of a row."""
    mesh, layouts = part_layouts(one, found)
    values = {name: value for value, name in one.parameters.items()}
    parts: dict[tuple[str, object], float] = {}
    for name, layout in layouts.items():
        kept = one.values[values[name]]
        itemsize = training.storage_itemsize(kept.type.dtype)
        itemsize += training.gradient_itemsize(kept.type.dtype) if kept.requires_grad else 0
        steps = reshard((BROADCAST,) * len(mesh), layout, mesh)
        parts[name, steps] = math.prod(local_shape(kept.type.shape, layout, mesh)) * itemsize
    return parts


def nested_peak_bytes(kinds: Sequence[GroupKind]) -> float:
    """Peak bytes of a device that is in a group of each kind, one after the other, without what the plan for all
    devices keeps: parts that kinds share are there once.
    """
    parts_bytes = sum({part: num_bytes for kind in kinds for part, num_bytes in kind.parts.items()}.values())
    return parts_bytes + max(kind.peak_bytes - sum(kind.parts.values()) for kind in kinds)


@dataclass(frozen=True)
class _GroupPlanner:
    """Searches for the plan of one group; the fields are the arguments of `plan_groups`, and a group's own request."""

    program: Program
    plan: Plan
    trace: Callable[[int, int], Program]
    prices: Prices
    group_request: SearchRequest
    request: SearchRequest
    time_layers: Callable[[Program, Plan], Prices] | None

    def can_nest(self, kinds: Sequence[GroupKind]) -> bool:
        """Whether a device has memory to be in a group of each kind in one step."""
        limit = self.group_request.memory_limit_bytes
        assert limit is not None
        # Of the stage that needs the most, where the peak of a kind may be that of another one.
        stages = StageMap(self.program, self.plan, 0)
        peaks = (
            nested_peak_bytes([_of_stage(kind, stages, number) for kind in kinds]) for number in set(stages.groups)
        )
        return max(peaks) * (1 + self.group_request.memory_error) <= limit

    def search(self, degree: int) -> list[GroupKind]:
        """Plans for groups of `degree` devices with the longest rows, of half as many with rows half as long, and on.

        Starts with more devices where `degree` devices don't have enough memory for the longest rows.
        """
        kinds: list[GroupKind] = []
        tokens = self.plan.prediction.row.tokens
        while degree and len(kinds) < _MOST_SEARCHES:
            try:
                one = self._traced(tokens)
                best = self.best(one, degree)
            except (ExampleInputsError, TraceError):
                break
            except (InfeasibleError, ConstraintError):
                if kinds:
                    break  # smaller groups are optional: the largest takes sequences of any length
                degree = degree * 2 if self.plan.group_size % (degree * 2) == 0 else 0
                continue
            kinds.append(self.kind(one, best))
            if degree == 1 or tokens % 2:
                break
            degree, tokens = degree // 2, tokens // 2
        return kinds

    def cut(self, row: GroupRow, searched: Sequence[GroupKind]) -> GroupKind | None:
        """`row` by the decisions of a searched plan: of as many devices, with the shortest rows that are as long as
        `row` or longer.  None: these decisions can't run it, or it does not fit in memory.
        """
        longer = (each for each in searched if each.row.degree == row.degree and each.row.tokens >= row.tokens)
        base = min(longer, key=lambda each: each.row.tokens).plan
        with suppress(ExampleInputsError, TraceError):
            one = self._traced(row.tokens)
            reused = reuse_plan(base, 1, one, self.prices, self.group_request)
            if reused is not None and self._excess_bytes(one, reused) <= 0:
                return self.kind(one, reused)
        return None

    def kind(self, one: Program, plan: Plan) -> GroupKind:
        """What a group with this plan for a row costs, and holds."""
        row, parts = self._row(one, plan), part_bytes(one, plan, self.group_request.training)
        return GroupKind(row, plan, parts, row.peak_bytes - _kept_bytes(self.program, self.plan, self.request))

    def best(self, one: Program, degree: int) -> Plan:
        """The best plan for a row on `degree` devices (in each stage, if there are stages)."""
        group_request = self.group_request
        if not self.plan.stages:
            return search(one, degree, self.prices, group_request)
        num_stages = self.plan.num_groups
        schedule = rows_schedule(num_stages, len(self.plan.stages), 1).name
        own = (f"schedule={schedule}", *stage_constraints(one, self.program, self.plan))
        group_request = replace(group_request, constraints=(*group_request.constraints, *own))
        for _ in range(_MOST_TRIES):
            plan = search(one, degree * num_stages, self.prices, group_request)
            excess_bytes = self._excess_bytes(one, plan)
            if excess_bytes <= 0:
                return plan
            room = plan.peak_memory_bytes * (1 + group_request.memory_error) - excess_bytes / num_stages
            group_request = replace(group_request, memory_limit_bytes=max(1.0, room))
        tokens = one.type_of(one.inputs[0]).shape[1]
        raise InfeasibleError(f"{num_stages} rows of {tokens} tokens in flight would run out of memory.")

    def _excess_bytes(self, one: Program, plan: Plan) -> float:
        """The bytes by which the rows in flight may exceed the memory limit; negative if they fit."""
        limit = self.group_request.memory_limit_bytes
        assert limit is not None
        peak_bytes = self._of_rows(one, plan, self.prices, self._most_in_flight(plan)).peak_memory_bytes
        return peak_bytes * (1 + self.group_request.memory_error) - limit

    @staticmethod
    def _most_in_flight(plan: Plan) -> int:
        """A number of rows with which as many are in flight as with any other."""
        return plan.num_groups * (_PEAK_ROUNDS if len(plan.stages) > plan.num_groups else 1)

    def _of_rows(self, one: Program, plan: Plan, prices: Prices, rows: int) -> Prediction:
        """The prediction for a step of `rows` rows, each a microbatch."""
        schedule, microbatches = rows_schedule(plan.num_groups, len(plan.stages), rows) if plan.stages else ("", rows)
        decisions = replace(plan.decisions, num_microbatches=microbatches, schedule=schedule)
        return predict(one, decisions, prices, self.group_request.training, self.group_request.schedules)

    def _traced(self, tokens: int) -> Program:
        # The same program that `CallPlanner` makes when such a group first runs.
        return variant_like(self.trace(1, tokens), self.program)

    def _row(self, one: Program, plan: Plan) -> GroupRow:
        prices = self.prices if self.time_layers is None else self.time_layers(one, plan)
        cost, axes = check_known(plan, one, prices, self.group_request).prediction.row, describe_usual(plan.decisions)
        kept_bytes = _kept_bytes(self.program, self.plan, self.request)
        if plan.stages:
            return self._staged_row(one, plan, prices, kept_bytes)
        row_s = cost.place_s * cost.tokens + _adding_s(one, plan, self.prices, self.group_request.training)
        peak_bytes = kept_bytes + plan.peak_memory_bytes
        return GroupRow(plan.world_size, cost.tokens, row_s, cost.pair_s, axes, peak_bytes)

    def _staged_row(self, one: Program, plan: Plan, prices: Prices, kept_bytes: float) -> GroupRow:
        few = 2 * plan.num_groups
        short, long = (self._of_rows(one, plan, prices, rows) for rows in (few, 2 * few))
        slowest_s = (long.step_time_s - short.step_time_s) / few  # of one more row, in the slowest stage
        # `RowCost` has means over stages, which the slowest stage exceeds by this ratio.
        ratio = slowest_s / (short.step_time_s - short.row.step_s)
        in_step_s = max(sum(short.costs[layer].in_step_s for layer in own) for own in _layers_of_groups(plan))
        # Where the last round is filled up, it is half a round on average.
        added = (plan.num_groups - 1) / 2 if len(plan.stages) > plan.num_groups else 0.0
        return GroupRow(
            plan.group_size,
            short.row.tokens,
            ratio * short.row.place_s * short.row.tokens,
            ratio * short.row.pair_s,
            describe_usual(replace(plan.decisions, stages=(), schedule="")),
            kept_bytes + long.peak_memory_bytes,
            max(0.0, short.step_time_s - in_step_s - few * slowest_s) + added * slowest_s,
        )


def _largest_degree(world: int, share: float) -> int:
    """The smallest power of two of devices for which a row with this `share` of a step's tokens is no more work than a
    device's share; at least 2, less than all devices, and a divisor of `world`.  0: there is none.
    """
    if world < _FEWEST_DEVICES:
        return 0
    degree = 2
    while degree < world * share and degree * 2 < world:
        degree *= 2
    while world % degree:
        degree //= 2
    return degree if degree > 1 else 0


def _request(program: Program, plan: Plan, request: SearchRequest) -> SearchRequest:
    """The request for a group's plan: parameters stay unsharded for a step, there is no optimizer state, and the memory
    limit is what the plan for all devices leaves.
    """
    limit = plan.memory_limit_bytes - _kept_bytes(program, plan, request)
    training = replace(
        request.training.by(plan.decisions), optimizer_state_bytes_per_element=0.0, whole_states=(-1, -1)
    )
    return replace(
        request, memory_limit_bytes=max(1.0, limit), training=training, constraints=("zero=0",), max_microbatches=1,
        schedules=request.schedules if plan.stages else None, stored=(), on_final=None, on_considered=None,
    )  # fmt: skip


def _kept_bytes(program: Program, plan: Plan, request: SearchRequest) -> float:
    """Bytes that the plan for all devices keeps between steps, and two unsharded layers: one that is unsharded or whose
    gradients are reduced, and the next one.  Of the stage with the most.
    """
    layers = [_whole_bytes(program, layer, request.training) for layer in range(len(program.layers))]
    static_bytes = (sum(plan.costs[layer].static_bytes for layer in own) for own in _layers_of_groups(plan))
    return max(static_bytes) + 2 * max(layers, default=0.0)


def _layers_of_groups(plan: Plan) -> list[list[int]]:
    """The indices of the layers on each device group, in all of its stages."""
    stages = list(zip(plan.decisions.groups, plan.decisions.ranges, strict=True))
    return [[layer for own, layers in stages if own == group for layer in layers] for group in range(plan.num_groups)]


def _of_stage(kind: GroupKind, stages: StageMap, number: int) -> GroupKind:
    """The same with the parts of parameters that device group `number` reads."""
    own = {
        part: num_bytes for part, num_bytes in kind.parts.items() if number in stages.holders.get(part[0], (number,))
    }
    return kind._replace(parts=own)


def _adding_s(program: Program, plan: Plan, prices: Prices, training: TrainingSpec) -> float:
    """Seconds to accumulate the gradients of one row into those of earlier rows."""
    return sum(gradient_sums_s(placed, 2, prices, training) for placed in PlannedLayers(program, plan.decisions).placed)


def _whole_bytes(program: Program, layer: int, training: TrainingSpec) -> float:
    types = [program.type_of(n) for n in program.layers[layer].state if program.values[n].role == "parameter"]
    return sum(each.num_elements * training.storage_itemsize(each.dtype) for each in types)


def coupling_seconds(program: Program, plan: Plan, prices: Prices, training: TrainingSpec) -> float:
    """Seconds to unshard all parameters, layer by layer, from where `plan` stores them, to reduce their gradients to
    there, and to run the optimizer; of the slowest stage.
    """
    mesh = refine_mesh(plan.shared_mesh, *(strategy.mesh for strategy in plan.strategies))
    layouts = storage_layouts(program, plan, mesh)
    stages = StageMap(program, plan, 0)
    of_stages = (
        sum(plan.costs[layer].optimizer_s for layer in layers)
        + _moving_s([program.layers[layer] for layer in layers], layouts, mesh, stages, prices, training)
        for layers in _layers_of_groups(plan)
    )
    return max(of_stages)


def _moving_s(
    layers: Sequence[Layer],
    layouts: Mapping[str, Layout],
    mesh: tuple[int, ...],
    stages: StageMap,
    prices: Prices,
    training: TrainingSpec,
) -> float:
    """Seconds of communication for the parameters of a stage and their gradients."""
    program = stages.program
    seen: set[str] = set()
    seconds = 0.0
    for layer in layers:
        buckets: Counter[tuple[str, Axis]] = Counter()
        for value in layer.state:
            name = program.parameters.get(value, "")
            if name not in layouts or name in seen:
                continue
            seen.add(name)
            kept = program.type_of(value)
            calls = reshard_calls(
                reshard(layouts[name], (BROADCAST,) * len(mesh), mesh),
                kept.num_elements * training.storage_itemsize(kept.dtype),
                gradient_bytes=kept.num_elements * training.sum_itemsize(kept.dtype),
                has_gradient=program.values[value].requires_grad,
            )
            for call in calls:
                buckets[call.kind, call.axis] += round(call.num_bytes)
            part = math.prod(local_shape(kept.shape, layouts[name], mesh))
            if program.values[value].requires_grad:
                others = len(stages.holders[name]) - 1  # stages that share the parameter and exchange its gradient
                part_bytes = part * training.storage_itemsize(kept.dtype)
                seconds += others * prices.collective_s("send", stages.axis, part_bytes) if others else 0.0
        seconds += sum(prices.collective_s(kind, axis, size) for (kind, axis), size in buckets.items())
    return seconds
