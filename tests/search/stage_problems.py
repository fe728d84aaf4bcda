"""Made-up pipelines as numbers, and every one of them measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import cast

import numpy as np

from autopar.lower.run.schedules import schedule_actions
from autopar.schedule import Shape
from autopar.search.stages.problem import Move, StageProblem, StageTable, Tie, Traveller, measure
from autopar.search.stages.solve import Found, search_problem
from autopar.search.trials import Setting
from autopar.step.stage_costs import pipeline_step_s

NUM_STATES = 2


def make_problem(
    seed: int, num_layers: int, num_candidates: int, num_microbatches: int, *, limit_bytes: float = np.inf
) -> StageProblem:
    """Random layers, a value from each to the next, one that skips layers, and a parameter of the two ends."""
    random = np.random.default_rng(seed)
    tables: list[StageTable] = []
    for _ in range(num_layers):
        saved = random.uniform(1.0, 8.0, num_candidates).round(1)
        forward = (random.uniform(0.2, 1.5, num_candidates) + 1.0 / saved).round(2)
        backward = forward * random.uniform(1.0, 3.0, num_candidates)
        tables.append(
            StageTable(
                forward,
                backward,
                backward * random.uniform(0.2, 0.6, num_candidates),
                random.uniform(0.0, 2.0, num_candidates),
                random.uniform(1.0, 10.0, num_candidates),
                saved,
                random.uniform(0.0, 3.0, num_candidates),
                random.integers(0, NUM_STATES, num_candidates),
                random.integers(0, NUM_STATES, num_candidates),
            )
        )

    def move(producer: int, reader: int) -> Move:
        ahead, back = random.uniform(0.0, 0.4, (2, NUM_STATES, NUM_STATES))
        return Move(producer, reader, ahead, back)

    def traveller(producer: int, *readers: int) -> Traveller:
        seconds, size = random.uniform(0.0, 0.3, NUM_STATES), random.uniform(0.1, 1.0, NUM_STATES)
        return Traveller(producer, readers, seconds, seconds, size)

    last = num_layers - 1
    return StageProblem(
        num_microbatches,
        NUM_STATES,
        tuple(tables),
        tuple(move(index, index + 1) for index in range(last)),
        (move(0, last),),
        (traveller(0, 1, last), *(traveller(index, index + 1) for index in range(1, last))),
        (Tie((0, last), 2.0, 0.3, 0.2),),
        0.05,
        limit_bytes,
    )


def every_pipeline(problem: StageProblem, shape: Shape) -> Iterator[tuple[float, float]]:
    """(seconds, peak bytes) of every way to cut and every choice of candidates."""
    num_layers = len(problem.tables)
    actions = schedule_actions(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
    for cuts in itertools.combinations(range(1, num_layers), shape.num_stages - 1):
        for path in itertools.product(*(range(len(table.forward_s)) for table in problem.tables)):
            stages = measure(problem, shape, (0, *cuts, num_layers), path, actions)
            yield pipeline_step_s(shape, actions, stages), max(stage.peak_memory_bytes for stage in stages)


def search_shapes(problem: StageProblem, *shapes: Shape, cuts: tuple[int, ...] = ()) -> Found:
    """What the search finds for these numbers."""
    found = Found(schedule_actions, problem.limit_bytes)
    search_problem(cast(Setting, None), problem, list(shapes), cuts, found)
    found.settle()
    return found
