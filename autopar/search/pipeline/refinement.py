"""What is looked at around the pipelines that a search found: other shares of work, all candidates, and other cuts.

`stage_cuts` ranks cuts by the slowest stage, as if stages that take turns on a device group were equal.  With few
layers they are not, so where there are few ways to cut all of them are ranked here by the seconds of whole device
groups, on paths that were found, and schedules that others stand for are looked at as well.  What is found here is
added to what is there: it never makes a search's best slower.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.schedules import Shape, find_schedule, schedule_names, schedule_problem
from autopar.schedules.action_lists import ScheduleSource
from autopar.search.chain.cost_tables import path_columns
from autopar.search.chain.limited_paths import SHORT_CHAIN
from autopar.search.pipeline.moved_layers import fastest_of_shapes, move_layers
from autopar.search.pipeline.pipeline_candidates import PipelineCandidate, PipelineResults, PipelineTables, ShapeBound
from autopar.search.pipeline.schedule_estimates import is_small
from autopar.search.pipeline.stage_cuts import PipelineCuts
from autopar.search.pipeline.stage_weights import StageWeights

__all__ = ["refine"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_REFINED = 4  # of the fastest, so many are looked around: about half a second each
# Paths of equal seconds may divide them differently among the stages of a group, which makes up to 2 % of a step.  So
# the first stages, or the last ones, are made to seem this much slower: enough to choose among equals, and little more.
_LEANS = (0.005, -0.005)
_LEANING = 1.02  # of the fastest: what takes longer does not become the fastest by it
_LEVELLED = 2  # of the fastest shapes, so many are tried with equal layers
# Candidates that all of these may have, those in use first: 0.05 to 0.1 s each.  Of 56 made-up pipelines of
# equal layers, each in stages of its own, 22 are faster for it, by up to 5 %.
_LEVELS = 6
_SHORTENED = 1  # of the fastest shapes, so many are tried with the seconds of their longest chains
# How much of what counts is their longest chain.  405B on 512 devices: 22.32 s before, 22.10 with 0.8, 22.11 with 0.9,
# and nothing gained with 0.5 and 0.75.
_SHARES = (0.8, 0.9)
_MOST_CUTS = 2000  # of a shape, so many are all ranked: a millisecond
_GUIDES = 2  # paths of each candidate set on which cuts are ranked
_SIMULATED = 6  # cuts of each shape on each of these paths: 0.3 ms each
_SOLVED = 4  # of those, over all shapes: 10 ms each
_NEAR = 1.03  # of the fastest: cuts that take no longer on a path may be faster with candidates of their own


def refine(results: PipelineResults, *, adds_variants: bool = True) -> None:
    """Look around the fastest pipelines, and add what is found to the results.

    With `adds_variants`, small ones are also run by variants of their schedules (`PipelineSchedule.variant_of`).
    """
    move_layers(results)
    for pipeline in sorted(results.candidates, key=lambda each: each.step_s)[:_REFINED]:
        pipeline.candidates.context.request.check_time()
        takes_turns = pipeline.shape.num_stages > pipeline.shape.num_groups
        for lean in _LEANS if takes_turns and pipeline.step_s < _LEANING * results.best_s else ():
            results.candidates.append(_leaning(pipeline, pipeline.choices, results.schedules, lean))
    _try_equal_layers(results)
    _shorten_chains(results)
    _try_all_candidates(results)
    if adds_variants:
        _add_variants(results)
    before_s = results.best_s
    _try_other_cuts(results)
    if results.best_s < before_s:
        _try_all_candidates(results)


def _try_equal_layers(results: PipelineResults) -> None:
    """Let all layers of the most frequent kind run one candidate of the fastest pipelines, if that fits.

    A group's candidates are chosen by their sum, as if stages did not wait for each other.  Stages that are not equal
    do, which may cost more than a mix of candidates gains.
    """
    for pipeline in heapq.nsmallest(_LEVELLED, fastest_of_shapes(results), key=lambda each: each.step_s):
        pipeline.candidates.context.request.check_time()
        layers = pipeline.candidates.tables.layers
        ((kind, _),) = Counter(map(id, layers)).most_common(1)
        places = [place for place, layer in enumerate(layers) if id(layer) == kind]
        used = Counter(pipeline.path[place] for place in places)
        useful = pipeline.choices.rows[places[0]].tolist()
        rows = dict.fromkeys((*(row for row, _ in used.most_common()), *useful))
        for row in itertools.islice(rows, _LEVELS):
            if used[row] < len(places):
                levelled = pipeline.levelled(kind, row, results.schedules)
                levelled = levelled if results.fits(levelled) else _counted_apart(levelled, results.schedules)
                results.candidates += [levelled] if results.fits(levelled) else []


def _shorten_chains(results: PipelineResults) -> None:
    """Choose candidates by what is on the longest chains of actions, of the fastest pipelines.

    Where one group has time left, as the last one may, what it shares with its neighbor is better done there.
    """
    fastest = fastest_of_shapes(results, of_demanded_cuts=True)
    for pipeline in heapq.nsmallest(_SHORTENED, fastest, key=lambda each: each.step_s):
        pipeline.candidates.context.request.check_time()
        found = pipeline
        for share in _SHARES:
            found = _by_longest_chain(found, pipeline.choices, results.schedules, share)
            results.candidates += [found] if results.fits(found) else []


def _try_all_candidates(results: PipelineResults) -> None:
    best, schedules = results.best, results.schedules
    if best is not None and best.longest_group <= SHORT_CHAIN:
        choices = best.choices.with_all()
        results.candidates += [_leaning(best, choices, schedules, lean) for lean in (0.0, *_LEANS)]
        results.candidates.append(_by_longest_chain(best, choices, schedules, _SHARES[0]))


def _counted_apart(pipeline: PipelineCandidate, schedules: ScheduleSource) -> PipelineCandidate:
    """The same cuts with the candidates that fit if all stages of a group hold their most at the same time."""
    solver, actions = pipeline.choices.solver, pipeline.actions
    rows = solver.solve(pipeline.cuts, pipeline.rows, actions, counts_together=False)
    return PipelineCandidate.of(pipeline.choices, pipeline.cuts, rows, schedules)


def _leaning(
    pipeline: PipelineCandidate, choices: PipelineTables, schedules: ScheduleSource, lean: float
) -> PipelineCandidate:
    """The same cuts with other candidates, as if stages of a group were slower than those before by this share."""
    weights = StageWeights.equal(choices.tables, pipeline.shape).leaning(pipeline.shape, lean)
    return pipeline.solved_again(choices, schedules, weights)


def _by_longest_chain(
    pipeline: PipelineCandidate, choices: PipelineTables, schedules: ScheduleSource, share: float
) -> PipelineCandidate:
    """The same cuts with other candidates, by what is on the longest chain of this pipeline."""
    equal, own = StageWeights.equal(choices.tables, pipeline.shape), pipeline
    weights = equal.towards_longest(own.shape, own.actions, own.stages, own.begins_s, share)
    return pipeline.solved_again(choices, schedules, weights)


def _add_variants(results: PipelineResults) -> None:
    """The shapes of schedules that others stand for, where all their cuts are ranked."""
    ranked = [each for each in results.bounds if _has_few_cuts(each)]
    results.bounds += [replace(each, shape=shape) for each in ranked for shape in _variants(each.shape)]


def _try_other_cuts(results: PipelineResults) -> None:
    """Solve the cuts that are fastest on paths that were found."""
    tried = {each.cuts for each in results.candidates}
    near = [each for bound in results.bounds for each in _recut(results, bound) if each.cuts not in tried]
    for each in heapq.nsmallest(_SOLVED, near, key=lambda each: each.step_s):
        if each.cuts not in tried:
            tried.add(each.cuts)
            solved = each.solved_again(each.choices, results.schedules)
            results.candidates += [solved] if results.fits(solved) else []


def _recut(results: PipelineResults, bound: ShapeBound) -> Iterator[PipelineCandidate]:
    """Pipelines of this shape that cut paths which were found elsewhere, and so are about as fast as the best."""
    shape, enough_s = bound.shape, _NEAR * results.best_s
    own = (each for each in results.fitting if each.candidates is bound.candidates)
    guides = {each.rows: each for each in heapq.nsmallest(2 * _GUIDES, own, key=lambda each: each.step_s)}
    if not guides or bound.bound_s >= results.best_s or not _has_few_cuts(bound):
        return
    num_layers = len(next(iter(guides)))
    starts = _all_cuts(num_layers, shape.num_stages)
    for guide in list(guides.values())[:_GUIDES]:
        least_s = _least_s(guide, shape, starts)
        for index in np.argsort(least_s, kind="stable")[:_SIMULATED].tolist():
            if least_s[index] >= enough_s:
                break
            cuts = PipelineCuts(shape, (*starts[index].tolist(), num_layers))
            pipeline = PipelineCandidate.of(guide.choices, cuts, guide.rows, results.schedules)
            if pipeline.step_s < enough_s:
                yield pipeline


def _has_few_cuts(bound: ShapeBound) -> bool:
    """Whether all ways to cut are ranked: they are not demanded, and are few; and predicting a step is cheap."""
    if bound.candidates is None or bound.cuts or not is_small(bound.shape):
        return False
    places, cuts = len(bound.candidates.tables.layers) - 1, bound.shape.num_stages - 1
    return cuts <= places and math.comb(places, cuts) <= _MOST_CUTS


def _least_s(guide: PipelineCandidate, shape: Shape, starts: Indices) -> Array:
    """For each way to cut (the first layers of its stages), seconds that this path takes at least: those of a device
    group, what it waits for at first and, unless backwards are split, at last, and what is done once per step.
    """
    columns = path_columns(guide.choices.tables, guide.rows)
    both_s = columns.forward_s + columns.backward_s
    splits = shape.record.splits_backward and columns.weight_s.any()
    waits_s = columns.forward_s if splits else both_s
    works_s = shape.num_microbatches * both_s + columns.step_s
    first = [shape.groups.index(group) for group in range(shape.num_groups)]
    is_of_group = (np.array(shape.groups)[:, None] == np.arange(shape.num_groups)).astype(float)
    before = np.concatenate([[0.0], np.cumsum(waits_s)])
    until = np.concatenate([[0.0], np.cumsum(works_s)])
    stops = np.column_stack([starts[:, 1:], np.full(len(starts), len(both_s))])
    return (before[starts[:, first]] + (until[stops] - until[starts]) @ is_of_group).max(axis=1)


@lru_cache(maxsize=16)
def _all_cuts(num_layers: int, num_stages: int) -> Indices:
    """``[cut, stage]``: the first layers of the stages."""
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    return np.array([(0, *cut) for cut in cuts], dtype=np.intp)


def _variants(shape: Shape) -> Iterator[Shape]:
    """The same stages under schedules that this one stands for."""
    numbers = shape.num_groups, shape.num_stages, shape.num_microbatches
    for name in schedule_names():
        if find_schedule(name).variant_of == shape.schedule and not schedule_problem(name, *numbers):
            yield replace(shape, schedule=name)
