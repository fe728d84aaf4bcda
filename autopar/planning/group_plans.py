"""Plans for groups of devices of unlike size, which run at the same time in one step (`Plan.groups`).

A group of d devices computes rows of t tokens, one after the other, and adds their gradients up; half as many devices
have rows half as long, down to one device.  The largest group holds the longest sequence.  Each plan is found by the
same search, for one row on d devices, in the memory that parameters, gradients and optimizer state of the plan for all
devices leave.  Groups may also have rows of lengths between, of which less is left empty, by the same decisions
(`autopar.balance.group_kinds`).

Once a step all devices gather parameters whole and reduce their gradients, from and to where the plan for all of them
stores them: that, and the optimizer, is what `coupling_seconds` has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autopar.balance.group_kinds import kinds_worth_having, with_more_lengths
from autopar.errors import ConstraintError, ExampleInputsError, InfeasibleError, TraceError
from autopar.lower.groups.target_count import counting_ops
from autopar.lower.parameters.store import storage_layouts
from autopar.placement import BROADCAST, Axis, refine_mesh, reshard
from autopar.plan import GroupPlan, Plan
from autopar.plan.headline import describe_usual
from autopar.plan.prediction import GroupRow
from autopar.planning.splitting import variant_like
from autopar.program import Program
from autopar.search import SearchRequest, check_known, reuse_plan, search
from autopar.step.parameter_costs import gradient_sums_s
from autopar.step.planned_layers import PlannedLayers
from autopar.step.prices import Prices, reshard_calls
from autopar.step.training import TrainingSpec

__all__ = ["PlannedGroups", "coupling_seconds", "plan_groups", "why_no_groups"]

_NO_STAGES = "pipeline=1"
_FEWEST_DEVICES = 4  # 2 + 1 + 1: of fewer no groups differ
_MOST_SEARCHES = 6  # from groups of 32 devices down to one; other lengths of rows run by the same decisions


@dataclass(frozen=True)
class PlannedGroups:
    """What groups run, what their rows cost, and what else a step with groups costs."""

    plans: tuple[GroupPlan, ...] = ()
    rows: tuple[GroupRow, ...] = ()
    coupling_s: float = 0.0


def why_no_groups(program: Program, plan: Plan, request: SearchRequest) -> str:
    """Why all devices run the same plan in every step; ``""``: they need not."""
    if plan.stages:
        return "it has pipeline stages"
    if plan.decisions.host_storage:
        return "parameters are stored in the host's memory"
    if program.updates:
        return "the model updates buffers"
    if set(request.constraints) - {_NO_STAGES}:
        return f"constraints are of all devices (groups keep {_NO_STAGES!r})"
    return "" if counting_ops(program) else "the loss is no mean over targets of a cross entropy"


def plan_groups(
    program: Program,
    plan: Plan,
    batches: Sequence[np.ndarray],
    trace: Callable[[int, int], Program],
    prices: Prices,
    request: SearchRequest,
    time_layers: Callable[[Program, Plan], Prices] | None = None,
) -> PlannedGroups:
    """Plans for groups in addition to `plan`, by which all devices run `program`; none if they don't fit in memory.

    Args:
        program: of the longest rows.
        plan: says where parameters are stored.
        batches: that steps are expected to have, each ``[n]`` lengths of sequences.
        trace: ``(rows, tokens)`` of a batch -> what the model does with it.
        prices: of the devices.
        request: what is asked of all plans.
        time_layers: as in `FamilyPlanner`.
    """
    planner = _GroupPlanner(program, plan, trace, prices, _request(program, plan, request), request, time_layers)
    share = plan.prediction.row.tokens / float(np.mean([batch.sum() for batch in batches]))
    searched = planner.search(_largest_degree(plan.world_size, share))
    if not searched:
        return PlannedGroups()
    known = dict(searched)
    chosen = kinds_worth_having(with_more_lengths(tuple(known)), plan.world_size, batches)
    made = [(row, known[row]) if row in known else planner.cut(row, searched) for row in chosen]
    rows, plans = zip(*filter(None, made), strict=True)
    if len(rows) < 2:
        return PlannedGroups()
    groups = tuple(GroupPlan(row.tokens, found.decisions) for row, found in zip(rows, plans, strict=True))
    return PlannedGroups(groups, rows, coupling_seconds(program, plan, prices, planner.asked.training))


@dataclass(frozen=True)
class _GroupPlanner:
    """Finds plans for single groups; its fields are the arguments of `plan_groups`, and what is asked of such plans."""

    program: Program
    plan: Plan
    trace: Callable[[int, int], Program]
    prices: Prices
    asked: SearchRequest
    request: SearchRequest
    time_layers: Callable[[Program, Plan], Prices] | None

    def search(self, degree: int) -> list[tuple[GroupRow, Plan]]:
        """Plans for groups of so many devices, or more if these have no room, with the longest rows; of half as many
        with rows half as long, and so on to one.
        """
        found: list[tuple[GroupRow, Plan]] = []
        tokens = self.plan.prediction.row.tokens
        while degree and len(found) < _MOST_SEARCHES:
            try:
                one = self._traced(tokens)
                best = search(one, degree, self.prices, self.asked)
            except (ExampleInputsError, TraceError):
                break
            except (InfeasibleError, ConstraintError):
                if found:
                    break  # what holds the longest sequence does without smaller groups
                degree = degree * 2 if self.plan.world_size % (degree * 2) == 0 else 0
                continue
            found.append((self._row(one, best), best))
            if degree == 1 or tokens % 2:
                break
            degree, tokens = degree // 2, tokens // 2
        return found

    def cut(self, row: GroupRow, searched: Sequence[tuple[GroupRow, Plan]]) -> tuple[GroupRow, Plan] | None:
        """The plan of the shortest rows of as large groups that are as long as `row`, for rows as long as it; None: it
        can't run them.
        """
        base = min((each for each in searched if each[0].degree == row.degree and each[0].tokens >= row.tokens),
                   key=lambda each: each[0].tokens)[1]  # fmt: skip
        with suppress(ExampleInputsError, TraceError):
            one = self._traced(row.tokens)
            found = reuse_plan(base, 1, one, self.prices, self.asked)
            return None if found is None else (self._row(one, found), found)
        return None

    def _traced(self, tokens: int) -> Program:
        # As `CallPlanner` makes it when such a group first runs.
        return variant_like(self.trace(1, tokens), self.program)

    def _row(self, one: Program, found: Plan) -> GroupRow:
        prices = self.prices if self.time_layers is None else self.time_layers(one, found)
        cost = check_known(found, one, prices, self.asked).prediction.row
        peak_bytes = _kept_bytes(self.program, self.plan, self.request) + found.peak_memory_bytes
        row_s = cost.token_s * cost.tokens + _adding_s(one, found, self.prices, self.asked.training)
        axes = describe_usual(found.decisions)
        return GroupRow(found.world_size, cost.tokens, row_s, cost.pair_s, axes, peak_bytes)


def _largest_degree(world: int, share: float) -> int:
    """The least power of two of devices, 2 or more and beside others if that can be, to which a row of this share of a
    step's tokens is no more work than others have; 0 if there are too few, or no two divide all.
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
    """What is asked of a group's plan: it keeps parameters whole for a step, without state of an optimizer, in what the
    plan for all devices leaves of their memory.
    """
    limit = plan.memory_limit_bytes - _kept_bytes(program, plan, request)
    training = replace(
        request.training.by(plan.decisions), optimizer_state_bytes_per_element=0.0, whole_states=(-1, -1)
    )
    return replace(
        request, memory_limit_bytes=max(1.0, limit), training=training, constraints=("zero=0",), max_microbatches=1,
        schedules=None, stored=(), on_final=None, on_considered=None,
    )  # fmt: skip


def _kept_bytes(program: Program, plan: Plan, request: SearchRequest) -> float:
    """What the plan for all devices holds between steps, and layers on their way from there and back: one whole,
    gathered or as terms of gradients, and the next one.
    """
    layers = [_whole_bytes(program, layer, request.training) for layer in range(len(program.layers))]
    return sum(cost.static_bytes for cost in plan.costs) + 2 * max(layers, default=0.0)


def _adding_s(program: Program, plan: Plan, prices: Prices, training: TrainingSpec) -> float:
    """Seconds to add the gradients of one row to those of the rows before it."""
    return sum(gradient_sums_s(placed, 2, prices, training) for placed in PlannedLayers(program, plan.decisions).placed)


def _whole_bytes(program: Program, layer: int, training: TrainingSpec) -> float:
    types = [program.type_of(n) for n in program.layers[layer].state if program.values[n].role == "parameter"]
    return sum(each.num_elements * training.storage_itemsize(each.dtype) for each in types)


def coupling_seconds(program: Program, plan: Plan, prices: Prices, training: TrainingSpec) -> float:
    """Seconds to gather parameters whole, from where `plan` of `program` stores them, to reduce whole gradients, layer
    by layer, and to update parameters.
    """
    mesh = refine_mesh(plan.shared_mesh, *(strategy.mesh for strategy in plan.strategies))
    layouts = storage_layouts(program, plan, mesh)
    seen: set[str] = set()
    seconds = 0.0
    for layer in program.layers:
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
        seconds += sum(prices.collective_s(kind, axis, size) for (kind, axis), size in buckets.items())
    return seconds + sum(cost.optimizer_s for cost in plan.costs)
