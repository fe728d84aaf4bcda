"""Made-up pipelines as numbers, and every one of them measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.schedules import Shape
from autopar.search import SearchRequest
from autopar.search.chain.candidate_sets import CandidateSet
from autopar.search.chain.cost_tables import (
    CostTables,
    LayerCosts,
    PipelineSend,
    TiedParameter,
    Transfer,
    path_begins_s,
    path_stages,
)
from autopar.search.pipeline.pipeline_candidates import PipelineResults, search_pipelines
from autopar.search.pipeline.refinement import refine
from autopar.step.costs.stage_costs import pipeline_step_s

NUM_STATES = 2


def make_tables(
    seed: int,
    num_layers: int,
    num_candidates: int,
    num_microbatches: int,
    *,
    limit_bytes: float = np.inf,
    longest_begin_s: float = 0.0,
) -> CostTables:
    """Random layers, a value from each to the next, one that skips layers, and a parameter of the two ends.

    A layer does up to `longest_begin_s` before its group's first action.
    """
    random, shares = np.random.default_rng(seed), np.random.default_rng(1000 + seed)
    tables: list[LayerCosts] = []
    for _ in range(num_layers):
        saved = random.uniform(1.0, 8.0, num_candidates).round(1)
        forward = (random.uniform(0.2, 1.5, num_candidates) + 1.0 / saved).round(2)
        backward = forward * random.uniform(1.0, 3.0, num_candidates)
        tables.append(
            LayerCosts(
                forward,
                backward,
                backward * random.uniform(0.2, 0.6, num_candidates),
                random.uniform(0.0, 2.0, num_candidates),
                random.uniform(1.0, 10.0, num_candidates),
                saved,
                random.uniform(0.0, 3.0, num_candidates),
                shares.uniform(0.0, 0.4, num_candidates) * saved,
                random.integers(0, NUM_STATES, num_candidates),
                random.integers(0, NUM_STATES, num_candidates),
                shares.uniform(0.0, 0.1, num_candidates),
                shares.uniform(0.0, 0.1, num_candidates),
                longest_begin_s * np.random.default_rng(2000 + seed + len(tables)).uniform(size=num_candidates),
                np.zeros(num_candidates),
            )
        )

    def transfer(producer: int, reader: int) -> Transfer:
        ahead, back = random.uniform(0.0, 0.4, (2, NUM_STATES, NUM_STATES))
        return Transfer(producer, reader, ahead, back)

    def send(producer: int, *readers: int) -> PipelineSend:
        seconds, size = random.uniform(0.0, 0.3, NUM_STATES), random.uniform(0.1, 1.0, NUM_STATES)
        return PipelineSend(producer, readers, seconds, seconds, size)

    last = num_layers - 1
    return CostTables(
        num_microbatches,
        NUM_STATES,
        tuple(tables),
        tuple(transfer(index, index + 1) for index in range(last)),
        (transfer(0, last),),
        (send(0, 1, last), *(send(index, index + 1) for index in range(1, last))),
        (TiedParameter((0, last), 2.0, 0.3, 0.2),),
        0.05,
        limit_bytes,
    )


def every_pipeline(tables: CostTables, shape: Shape) -> Iterator[tuple[float, float]]:
    """(seconds, peak bytes) of every way to cut and every choice of candidates."""
    num_layers = len(tables.layers)
    actions = schedule_actions(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
    for cuts in itertools.combinations(range(1, num_layers), shape.num_stages - 1):
        for path in itertools.product(*(range(len(layer.forward_s)) for layer in tables.layers)):
            stages = path_stages(tables, shape, (0, *cuts, num_layers), path, actions)
            begins_s = path_begins_s(tables, shape, (0, *cuts, num_layers), path)
            step_s = pipeline_step_s(shape, actions, stages, begins_s)
            yield step_s, max(stage.peak_memory_bytes for stage in stages)


def search_shapes(tables: CostTables, *shapes: Shape, cuts: tuple[int, ...] = ()) -> PipelineResults:
    """The pipelines that the search finds for these numbers."""
    results = PipelineResults(schedule_actions, tables.limit_bytes)
    context = SimpleNamespace(request=SearchRequest())
    candidates = cast(CandidateSet, SimpleNamespace(tables=tables, least_tables=tables, context=context))
    search_pipelines(candidates, dict.fromkeys(shapes, 0.0), cuts, results)
    refine(results, adds_variants=False)
    return results
