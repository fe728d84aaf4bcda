"""A small model with plans for groups of unlike degrees, and documents shared out among them by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from autopar.data.packed_rows import RowPacking
from autopar.lower.communication.communicator import Communicator
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import GroupPlan, Plan
from autopar.planning.call_plans import CallPlanner
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.search import SearchRequest, search
from autopar.trace import Traced
from autopar.verify.rehearsal import keep_double_program, planner_for
from tests.data.test_balanced import Documents, rows_of_tokens
from tests.lower.runs import build
from tests.zoo import quick, quick_prices, quick_search

TOKENS = 16
PACKING = RowPacking({"input_ids": 0, "labels": -100}, "position_ids", "", ("labels",))


@dataclass(frozen=True)
class Family:
    """A model's program for all ranks, and a plan whose groups have rows of the keys of `degrees`.

    `rows_of`: rows and tokens -> the inputs of a call.
    """

    model: nn.Module
    world: int
    example: Mapping[str, Tensor]
    traced: Traced
    plan: Plan
    degrees: Mapping[int, int]
    rows_of: Callable[[int, int], Mapping[str, Tensor]] = rows_of_tokens

    @cached_property
    def planner(self) -> CallPlanner:
        """What has planned for groups before simulated ranks ask, which can't trace."""
        others = [self.rows_of(2 * self.world, TOKENS // 2)]
        made = planner_for(self.model, self.traced, self.plan, others, keep_double_program, training=True)
        made.groups((), self.example, (self.world, TOKENS))
        return made

    def build(self, talk: Communicator) -> Any:
        """The parallel module of a simulated rank."""
        made: Any = build(self.model, self.traced, self.plan, talk, planner=self.planner)
        made.call_inputs = call_inputs(
            self.model, self.example, self.traced.program, made.data_split, talk, is_local=True
        )
        return made


def family(
    model: nn.Module,
    world: int,
    kinds: Sequence[tuple[int, str]],
    asked: str,
    rows_of: Callable[[int, int], Mapping[str, Tensor]] = rows_of_tokens,
) -> Family:
    """`kinds`: the degree of groups and the constraints of their plan; the first has rows of `TOKENS`, each other one
    half as long.  `asked` is of the plan for all ranks; degrees are those among the ranks of a stage.
    """
    stages = [text for text in asked.split() if text.startswith(("pipeline=", "cuts=", "schedule=interleaved"))]
    num_stages = int(stages[0].partition("=")[2]) if stages else 1
    example = rows_of(world, TOKENS)
    traced = keep_double_program(trace_model(model, example))
    schedules = schedule_actions if stages else None
    plan = search(
        traced.program, world, quick_prices(world),
        SearchRequest(constraints=quick(tuple(asked.split())), schedules=schedules),
    )  # fmt: skip
    groups: list[GroupPlan] = []
    for place, (degree, texts) in enumerate(kinds):
        row = keep_double_program(trace_model(model, rows_of(1, TOKENS >> place)))
        request = SearchRequest(constraints=quick((*texts.split(), *stages)), schedules=schedules)
        devices = degree * num_stages
        found = quick_search(row.program, devices, request)
        groups.append(GroupPlan(TOKENS >> place, found.decisions))
    degrees = {group.tokens: group.decisions.group_size for group in groups}
    return Family(model, world, example, traced, replace(plan, groups=tuple(groups)), degrees, rows_of)


def batches_of(
    lengths: Sequence[int],
    rooms: Sequence[int],
    degrees: Mapping[int, int],
    random: np.random.Generator,
    stages: int = 1,
) -> list[dict[str, Tensor]]:
    """What each rank passes of these documents, given at random to groups whose rows have tokens of `rooms`."""
    rows: list[list[list[int]]] = [[] for _ in rooms]  # with stages, the ranks of each pass the same
    for number, length in enumerate(lengths):
        group = int(random.choice([group for group, room in enumerate(rooms) if room >= length]))
        last = rows[group][-1] if rows[group] else []
        if last and sum(lengths[each] for each in last) + length <= rooms[group]:
            last.append(number)
        else:
            rows[group].append([number])
    documents = Documents(list(lengths))
    found: list[dict[str, Tensor]] = []
    for room, own in zip(rooms, rows, strict=True):
        samples = [[documents[number] for number in row] for row in own]
        found += [PACKING.rows(samples, room, documents[0])] * degrees[room]
    return found * stages


def nested_batches_of(lengths: Sequence[int], found: Family, random: np.random.Generator) -> list[dict[str, Tensor]]:
    """What each rank passes of these documents, each in a row of its own, given at random to any group of any degree.

    A rank is in a group of each degree, of which it passes rows for those that have documents.
    """
    stages = found.plan.num_groups
    ranks = found.world // stages
    rows: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # tokens of the row, the document
    for number, length in enumerate(lengths):
        room = int(random.choice([tokens for tokens in found.degrees if tokens >= length]))
        start = int(random.integers(ranks // found.degrees[room])) * found.degrees[room]
        for own in rows[start : start + found.degrees[room]]:
            own.append((room, number))
    documents = Documents(list(lengths))
    batches = [
        PACKING.jagged([[documents[n]] for _, n in own], [room for room, _ in own] or [min(found.degrees)],
                       documents[0])
        for own in rows
    ]  # fmt: skip
    return batches * stages
