"""Short descriptions of the plans that a search considered: all fast ones, and a sample of the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.plan import Plan
from autopar.plan.headline import describe_usual
from autopar.search.chain.lagrangian import pareto_indices
from autopar.search.chain.single_stage import SingleStagePaths
from autopar.search.pipeline.pipeline_candidates import PipelineCandidate
from autopar.search.settings.request import ConsideredPlan

__all__ = ["describe_paths", "describe_pipeline", "describe_plan"]

# Points of one candidate set in a plot of seconds against bytes: enough to draw its front and the cloud behind it.
_MOST_ON_FRONT = 40
_MOST_BEHIND = 60


def describe_paths(paths: SingleStagePaths) -> Iterator[ConsideredPlan]:
    """Paths that no other beats in time and memory, and some that are beaten."""
    time_s, peak = paths.pool.time_s, paths.pool.peak_bytes
    front = pareto_indices(time_s, peak)
    on_front = set(front)
    behind = [index for index in np.lexsort((peak, time_s)).tolist() if index not in on_front]
    shown = [*_spread(front, _MOST_ON_FRONT), *_spread(behind, _MOST_BEHIND)]
    for index, seconds in zip(shown, paths.sums_s(shown).tolist(), strict=True):
        yield ConsideredPlan(seconds, peak[index], describe_usual(paths.decisions(index)))


def describe_pipeline(pipeline: PipelineCandidate) -> ConsideredPlan:
    """A pipeline whose schedule was simulated, with communication and compute one after the other."""
    return ConsideredPlan(pipeline.step_s, pipeline.peak_bytes, describe_usual(pipeline.decisions()))


def describe_plan(plan: Plan) -> ConsideredPlan:
    """A plan whose step was simulated."""
    return ConsideredPlan(plan.step_time_s, plan.peak_memory_bytes, describe_usual(plan.decisions), is_simulated=True)


def _spread(indices: list[int], most: int) -> list[int]:
    """At most so many of them, the first and the last included."""
    if len(indices) <= most:
        return indices
    return [indices[number * (len(indices) - 1) // (most - 1)] for number in range(most)]
