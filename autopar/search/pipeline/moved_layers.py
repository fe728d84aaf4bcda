"""Pipelines with a layer moved from stage to stage, around those that a search found.

`stage_cuts` takes no account of which stages wait for which.  Where stages have two layers each and one of them must
have one, any of them seems as good, but as the stage at which a V turns it makes a step 5 % shorter than as another.
There are too many ways to cut large pipelines to rank all (`refinement`), but few that differ by one layer.  These are
ranked by chains of actions that wait for each other (`autopar.schedules.critical_paths`), a product of matrices that
costs less than to simulate one of them, and the most promising ones are solved.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from autopar.schedules.action_lists import COSTS, ScheduleSource
from autopar.schedules.critical_paths import schedule_paths
from autopar.search.chain.cost_tables import path_columns
from autopar.search.pipeline.pipeline_candidates import PipelineCandidate, PipelineResults
from autopar.search.pipeline.stage_cuts import PipelineCuts

__all__ = ["fastest_of_shapes", "move_layers"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_NEAR = 1.05  # of the fastest: what moving one layer may gain (measured: up to 5 %)
_SHAPES = 3  # of those, so many are looked around: about 0.3 s each, half of it for the chains
_ROUNDS = 4  # in which a shape's fastest pipeline is looked around again, as long as there is a faster one
_SOLVED = 4  # of one round: 10 to 20 ms each
_KINDS = [COSTS[kind] for kind in ("F", "B", "I", "W")]


def move_layers(results: PipelineResults) -> None:
    """Add pipelines with a layer moved to another stage, which may be faster than the fastest, to the results."""
    for pipeline in heapq.nsmallest(_SHAPES, fastest_of_shapes(results), key=lambda each: each.step_s):
        around: PipelineCandidate | None = pipeline
        for _ in range(_ROUNDS):
            if around is None or around.step_s > _NEAR * results.best_s:
                break
            around.candidates.context.request.check_time()
            around = _look_around(results, around)


def fastest_of_shapes(results: PipelineResults, *, of_demanded_cuts: bool = False) -> list[PipelineCandidate]:
    """The fastest that fits of each shape, or of each whose cuts are not demanded."""
    demanded = {bound.shape for bound in results.bounds if bound.cuts and not of_demanded_cuts}
    fastest: dict[object, PipelineCandidate] = {}
    for each in sorted(results.fitting, key=lambda each: each.step_s):
        if each.shape not in demanded:
            fastest.setdefault(each.shape, each)
    return list(fastest.values())


def _look_around(results: PipelineResults, pipeline: PipelineCandidate) -> PipelineCandidate | None:
    """Solve the most promising moves of a layer; the fastest of them if it is faster than `pipeline`."""
    known = {each.cuts for each in results.candidates if each.candidates is pipeline.candidates}
    solved: list[PipelineCandidate] = []
    for cuts in _promising(pipeline, results.best_s):
        if cuts not in known:
            solved.append(_solve(pipeline, cuts, results.schedules))
        if len(solved) == _SOLVED:
            break
    results.candidates += [each for each in solved if results.fits(each)]
    faster = [each for each in solved if results.fits(each) and each.step_s < pipeline.step_s]
    return min(faster, key=lambda each: each.step_s, default=None)


def _solve(guide: PipelineCandidate, cuts: PipelineCuts, schedules: ScheduleSource) -> PipelineCandidate:
    return guide.choices.pipeline(cuts, guide.rows, schedules)


def _promising(pipeline: PipelineCandidate, enough_s: float) -> Iterator[PipelineCuts]:
    """Cuts that move one layer and seem to take less than `enough_s` with the same candidates, the fastest first."""
    starts, num_layers = _moved(pipeline.cuts.bounds), pipeline.cuts.bounds[-1]
    chain_s = _longest_chains_s(pipeline, np.concatenate([[pipeline.cuts.bounds[:-1]], starts]))
    seems_s = pipeline.step_s + chain_s[1:] - chain_s[0]
    for index in np.argsort(seems_s, kind="stable").tolist():
        if seems_s[index] >= enough_s:
            return
        yield PipelineCuts(pipeline.shape, (*starts[index].tolist(), num_layers))


def _moved(bounds: tuple[int, ...]) -> Indices:
    """``[way, stage]``: the first layers of the stages if one layer moves from a stage to another, those between them
    shifting by one.
    """
    widths = np.diff(bounds)
    num_stages = len(widths)
    pairs = [(i, j) for i in range(num_stages) for j in range(num_stages) if i != j and widths[i] > 1]
    starts = np.tile(np.array(bounds[:-1], dtype=np.intp), (len(pairs), 1))
    for row, (giver, taker) in zip(starts, pairs, strict=True):
        row[giver + 1 : taker + 1] -= 1
        row[taker + 1 : giver + 1] += 1
    return starts


def _longest_chains_s(pipeline: PipelineCandidate, starts: Indices) -> Array:
    """For each way to cut, the seconds of the longest chain, and of what its device group does once per step; without
    what moves between stages.
    """
    splits = pipeline.choices.tables.splits_backward
    chains = schedule_paths(pipeline.actions, pipeline.shape.num_stages, splits=splits)
    columns = path_columns(pipeline.choices.tables, pipeline.rows)
    inputs_s = columns.backward_s - columns.weight_s
    layers = np.stack([columns.forward_s, columns.backward_s, inputs_s, columns.weight_s, columns.step_s])
    before = np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, axis=1)], axis=1)
    stops = np.column_stack([starts[:, 1:], np.full(len(starts), layers.shape[1])])
    *stages, once = before[:, stops] - before[:, starts]  # [cost][way, stage]
    by_chain = np.einsum("psk,kws->wp", chains.counts[:, :, _KINDS], np.stack(stages), optimize=True)
    owner = np.array(pipeline.shape.groups)[:, None] == chains.group
    return (by_chain + once @ owner).max(axis=1)
