"""A small model with plans for groups of unlike degrees, and documents shared out among them by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

import autopar
from autopar.data.packed_rows import RowPacking
from autopar.lower.communication.communicator import Communicator
from autopar.plan import GroupPlan, Plan
from autopar.planning.call_plans import CallPlanner
from autopar.planning.caller_inputs import call_inputs
from autopar.search import SearchRequest, search
from autopar.trace import Traced
from autopar.verify.rehearsal import keep_double_program, planner_for
from tests.data.test_balanced import Documents, rows_of_tokens
from tests.lower.runs import build
from tests.zoo import quick_prices

TOKENS = 16
PACKING = RowPacking({"input_ids": 0, "labels": -100}, "position_ids", "", ("labels",))


@dataclass(frozen=True)
class Family:
    """A model's program for all ranks, and a plan whose groups have rows of `tokens` of their degree."""

    model: nn.Module
    world: int
    example: Mapping[str, Tensor]
    traced: Traced
    plan: Plan
    tokens: Mapping[int, int]

    @cached_property
    def planner(self) -> CallPlanner:
        """What has planned for groups before simulated ranks ask, which can't trace."""
        others = [rows_of_tokens(2 * self.world, TOKENS // 2)]
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


def family(model: nn.Module, world: int, degrees: Mapping[int, str], asked: str) -> Family:
    """`degrees` with the constraint of each one's plan; the largest has rows of `TOKENS`, each other one half as long.

    `asked` is of the plan for all ranks.
    """
    example = rows_of_tokens(world, TOKENS)
    traced = keep_double_program(autopar.api.trace_model(model, example))
    plan = search(traced.program, world, quick_prices(world), SearchRequest(constraints=tuple(asked.split())))
    tokens = {degree: TOKENS >> place for place, degree in enumerate(sorted(degrees, reverse=True))}
    groups: list[GroupPlan] = []
    for degree, room in tokens.items():
        row = keep_double_program(autopar.api.trace_model(model, rows_of_tokens(1, room)))
        texts = tuple(degrees[degree].split())
        found = search(row.program, degree, quick_prices(degree), SearchRequest(constraints=texts))
        groups.append(GroupPlan(room, found.decisions))
    return Family(model, world, example, traced, replace(plan, groups=tuple(groups)), tokens)


def shared_out(
    lengths: Sequence[int], degrees: Sequence[int], tokens: Mapping[int, int], random: np.random.Generator
) -> list[list[list[int]]]:
    """Documents given at random to groups whose rows hold them: of each group its rows, each the numbers of its
    documents.
    """
    rows: list[list[list[int]]] = [[] for _ in degrees]
    for number, length in enumerate(lengths):
        fits = [group for group, degree in enumerate(degrees) if tokens[degree] >= length]
        group = int(random.choice(fits))
        last = rows[group][-1] if rows[group] else []
        if last and sum(lengths[each] for each in last) + length <= tokens[degrees[group]]:
            last.append(number)
        else:
            rows[group].append([number])
    return rows


def batches_of(
    lengths: Sequence[int], degrees: Sequence[int], tokens: Mapping[int, int], random: np.random.Generator
) -> list[dict[str, Tensor]]:
    """What each rank passes of these documents."""
    documents = Documents(list(lengths))
    found: list[dict[str, Tensor]] = []
    for degree, rows in zip(degrees, shared_out(lengths, degrees, tokens, random), strict=True):
        samples = [[documents[number] for number in row] for row in rows]
        found += [PACKING.rows(samples, tokens[degree], documents[0])] * degree
    return found
