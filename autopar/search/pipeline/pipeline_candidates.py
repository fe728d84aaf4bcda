"""Pipelines of one candidate set: where layers are cut into stages, what each group runs, and which is fastest.

A few paths through all layers (`lagrangian`) give numbers from which `stage_cuts` chooses where to cut;
`group_strategies` then chooses the candidates of every group under its memory.  What comes out is estimated, and
simulated with the schedule's own action list where it may be the fastest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.plan import Decisions, Stage
from autopar.schedules import Flight, Shape
from autopar.schedules.action_lists import ScheduleSource, StageCost
from autopar.search.candidate_sets import CandidateSet
from autopar.search.cost_tables import CostTables, path_stages, useful_candidates
from autopar.search.lagrangian import fastest_paths
from autopar.search.pipeline.group_strategies import SHORT_CHAIN, GroupSolver
from autopar.search.pipeline.relaxed_pipelines import relaxed_bounds, takes_longer
from autopar.search.pipeline.schedule_estimates import estimate_s, is_small
from autopar.search.pipeline.stage_cuts import PipelineCuts, SpanCosts, choose_cuts, largest_first, span_costs
from autopar.step.stage_costs import pipeline_step_s

__all__ = ["PipelineCandidate", "PipelineEstimate", "PipelineResults", "ShapeBound", "search_pipelines"]

Indices = npt.NDArray[np.intp]

# The paths only guide the cuts, so their hulls are followed less closely than those of plans without stages.
_GUIDE_PRICES = 8
_GUIDE_CAPS = 2
_TRIED_CUTS = 4  # ways to cut for each schedule: those for the other bounds on the slowest stage are seldom different
_ENDLESS_BYTES = 1e30  # stands for no limit, in products
_WORTH = 1.15  # cuts that seem slower by more are left out: the paths only guide, strategies change with the cut
_SIMULATED = 10  # large schedules that are simulated in the end, if one of them fits: each takes up to a second
# How far estimates may be too high.  With few microbatches those of split backwards are by up to 20 %, but such
# pipelines were never the best.
_ESTIMATE_ERROR = 0.1
_REFINED = 4  # of the fastest that were simulated, so many are looked around: about half a second each
# Paths of equal seconds may divide them differently among the stages of a group, which makes up to 2 % of a step.  So
# the first stages, or the last ones, are made to seem this much slower: enough to choose among equals, and little more.
_LEANS = (0.005, -0.005)


@dataclass(eq=False)
class PipelineTables:
    """The candidates that the layers of pipelines are chosen from: all of a candidate set, or the most useful ones.

    `rows` has per layer the candidate set's index of each candidate in the tables.
    """

    candidates: CandidateSet
    tables: CostTables
    rows: tuple[Indices, ...]
    solver: GroupSolver = field(init=False)

    def __post_init__(self) -> None:
        self.solver = GroupSolver(self.tables)

    @classmethod
    def of_all(cls, candidates: CandidateSet, limit_bytes: float) -> PipelineTables:
        """All candidates of every layer."""
        tables = replace(candidates.tables, limit_bytes=limit_bytes)
        return cls(candidates, tables, tuple(np.arange(len(layer.state_in)) for layer in tables.layers))

    def estimate(self, cuts: PipelineCuts, guide: Sequence[int], lean: float = 0.0) -> PipelineEstimate:
        """Choose the candidates of all layers; `guide` and `lean` as in `GroupSolver.solve`."""
        path = self.solver.solve(cuts, guide, lean)
        stages = path_stages(self.tables, cuts.shape, cuts.bounds, path)
        return PipelineEstimate(self, cuts, path, estimate_s(cuts.shape, stages))

    def indices_of(self, path: Sequence[int], other: PipelineTables) -> list[int]:
        """Where the candidates of a path through these tables are in `other`."""
        known = [int(own[index]) for own, index in zip(self.rows, path, strict=True)]
        return [int(np.searchsorted(own, row)) for own, row in zip(other.rows, known, strict=True)]


@dataclass(frozen=True, eq=False)
class PipelineEstimate:
    """A pipeline that has not been simulated: `path` has indices of the tables' candidates, `step_s` is estimated."""

    choices: PipelineTables
    cuts: PipelineCuts
    path: tuple[int, ...]
    step_s: float

    def simulate(self, schedules: ScheduleSource) -> PipelineCandidate:
        """What the schedule's own action list makes of it."""
        shape, actions = self.cuts.shape, self.cuts.shape.actions(schedules)
        stages = path_stages(self.choices.tables, shape, self.cuts.bounds, self.path, actions)
        return PipelineCandidate(self, stages, pipeline_step_s(shape, actions, stages))

    def solved_again(self, choices: PipelineTables, lean: float) -> PipelineEstimate:
        """The same cuts with other candidates; `lean` as in `GroupSolver.solve`."""
        return choices.estimate(self.cuts, self.choices.indices_of(self.path, choices), lean)


@dataclass(frozen=True, eq=False)
class PipelineCandidate:
    """A pipeline: where it is cut, which candidate each layer has, and what its stages cost, as simulated."""

    estimate: PipelineEstimate
    stages: tuple[StageCost, ...]
    step_s: float

    @property
    def candidates(self) -> CandidateSet:
        """Of all layers."""
        return self.estimate.choices.candidates

    @property
    def cuts(self) -> PipelineCuts:
        """Where it is cut."""
        return self.estimate.cuts

    @property
    def shape(self) -> Shape:
        """How it runs, wherever it is cut."""
        return self.cuts.shape

    @property
    def path(self) -> tuple[int, ...]:
        """Per layer the index of its candidate."""
        return tuple(
            int(rows[index]) for rows, index in zip(self.estimate.choices.rows, self.estimate.path, strict=True)
        )

    def decisions(self) -> Decisions:
        """As a plan has them."""
        spans = zip(itertools.pairwise(self.cuts.bounds), self.shape.groups, strict=True)
        stages = tuple(Stage(start, stop, group) for (start, stop), group in spans)
        return self.candidates.decisions(self.path, stages, self.shape.schedule)

    @property
    def least_s(self) -> float:
        """Seconds of a step if all collectives of parameters are overlapped."""
        return self.step_s - sum(each.cost.parameter_comm_s for each in self.candidates.along(self.path))

    @property
    def longest_group(self) -> int:
        """The most layers of a device group."""
        spans = [[stop - start for start, stop, _ in self.cuts.stages_of(g)] for g in range(self.shape.num_groups)]
        return max(map(sum, spans))

    @property
    def peak_bytes(self) -> float:
        """Of the group that takes most."""
        return max(stage.peak_memory_bytes for stage in self.stages)


@dataclass(eq=False)
class ShapeBound:
    """No pipeline of this shape that fits takes fewer seconds than `bound_s`.

    `candidates` are those of all layers, None if they are not known; `cuts` are the first layers of the stages but the
    first, if they are demanded.
    """

    shape: Shape
    bound_s: float
    candidates: CandidateSet | None = None
    cuts: tuple[int, ...] = ()


@dataclass(eq=False)
class PipelineResults:
    """The pipelines of a search: those that were simulated, those that have yet to be, and lower bounds on the seconds
    of everything that was looked at.
    """

    schedules: ScheduleSource
    limit_bytes: float
    simulated: list[PipelineCandidate] = field(default_factory=list[PipelineCandidate])
    estimated: list[PipelineEstimate] = field(default_factory=list[PipelineEstimate])
    bounds: list[ShapeBound] = field(default_factory=list[ShapeBound])

    @property
    def lower_bound_s(self) -> float:
        """No pipeline that was looked at and fits is faster."""
        return min((each.bound_s for each in self.bounds), default=np.inf)

    @property
    def fitting(self) -> list[PipelineCandidate]:
        """Those that fit."""
        return [each for each in self.simulated if each.peak_bytes <= self.limit_bytes]

    @property
    def best(self) -> PipelineCandidate | None:
        """The fastest that fits, of equals the smallest."""
        return min(self.fitting, key=lambda each: (each.step_s, each.peak_bytes), default=None)

    @property
    def smallest(self) -> PipelineCandidate | None:
        """The smallest of those that don't fit."""
        too_large = (each for each in self.simulated if each.peak_bytes > self.limit_bytes)
        return min(too_large, key=lambda each: each.peak_bytes, default=None)

    @property
    def best_s(self) -> float:
        """Seconds of the best, infinite if there is none."""
        return self.best.step_s if self.best else np.inf

    @property
    def hoped_s(self) -> float:
        """As `best_s`, with what has yet to be simulated."""
        return min([self.best_s, *(each.step_s for each in self.estimated)])

    def add(self, estimate: PipelineEstimate) -> None:
        """Simulate a pipeline, now if that takes next to no time."""
        if is_small(estimate.cuts.shape):
            self.simulated.append(estimate.simulate(self.schedules))
        else:
            self.estimated.append(estimate)

    def merge(self, other: PipelineResults) -> None:
        """Take over those of `other`."""
        self.simulated += other.simulated
        self.estimated += other.estimated
        self.bounds += other.bounds

    def finish(self) -> None:
        """Simulate those that may still be the best."""
        for number, estimate in enumerate(sorted(self.estimated, key=lambda each: each.step_s)):
            is_hopeful = estimate.step_s * (1 - _ESTIMATE_ERROR) < self.best_s
            if is_hopeful and (number < _SIMULATED or self.best is None):
                self.simulated.append(estimate.simulate(self.schedules))
        self.estimated.clear()
        self._refine()

    def raise_bounds(self, enough_s: float, rival_s: float = np.inf) -> None:
        """Make `lower_bound_s` at least so much, as far as that is possible: always the least of the bounds a little,
        until it is as high as it gets.  Shapes that take at least `rival_s` whatever is overlapped are left out.
        """
        todo = [(each.bound_s, number) for number, each in enumerate(self.bounds)]
        heapq.heapify(todo)
        begun: dict[int, Iterator[float]] = {}
        while todo and todo[0][0] < enough_s:
            number = heapq.heappop(todo)[1]
            each = self.bounds[number]
            if each.candidates is None:
                return
            if number not in begun:
                actions = each.shape.actions(self.schedules)
                least, tables = self._within_limit(each.candidates.least_tables, each.candidates.tables)
                if math.isfinite(rival_s) and takes_longer(least, each.shape, actions, rival_s, each.cuts):
                    each.bound_s = math.inf
                    continue
                begun[number] = relaxed_bounds(tables, each.shape, actions, enough_s, each.cuts)
            next_s = todo[0][0] if todo else enough_s
            for bound_s in begun[number]:
                each.bound_s = max(each.bound_s, bound_s)
                if each.bound_s >= next_s:
                    break
            else:
                return  # this one is the least, and can't be raised
            heapq.heappush(todo, (each.bound_s, number))

    def _within_limit(self, *tables: CostTables) -> Iterator[CostTables]:
        return (replace(each, limit_bytes=self.limit_bytes) for each in tables)

    def _refine(self) -> None:
        """Look around the fastest: other shares of the work among the stages of a group, then all candidates."""
        for pipeline in sorted(self.simulated, key=lambda each: each.step_s)[:_REFINED]:
            estimate = pipeline.estimate
            for lean in _LEANS if estimate.cuts.shape.num_stages > estimate.cuts.shape.num_groups else ():
                self._try(estimate.solved_again(estimate.choices, lean), estimate)
        if self.best is not None and self.best.longest_group <= SHORT_CHAIN:
            estimate = self.best.estimate
            choices = PipelineTables.of_all(estimate.choices.candidates, self.limit_bytes)
            for lean in (0.0, *_LEANS):
                self._try(estimate.solved_again(choices, lean), estimate)

    def _try(self, estimate: PipelineEstimate, known: PipelineEstimate) -> None:
        if estimate.path != known.path or estimate.choices is not known.choices:
            self.simulated.append(estimate.simulate(self.schedules))


def search_pipelines(
    candidates: CandidateSet, shapes: list[Shape], demanded_cuts: tuple[int, ...], results: PipelineResults
) -> None:
    """Add to `results` the pipelines of these shapes with these candidates that look best.

    `demanded_cuts` are the first layers of the stages but the first; without them all cuts are possible.
    """
    whole = replace(candidates.tables, limit_bytes=results.limit_bytes)
    paths, lower_bound_s = _guide_paths(whole, shapes)
    tables, rows = useful_candidates(whole, paths, _typical_flights(shapes))
    paths = np.stack([np.searchsorted(rows[layer], paths[:, layer]) for layer in range(paths.shape[1])], axis=1)
    paths = largest_first(tables, paths)
    results.bounds += [ShapeBound(shape, lower_bound_s, candidates, demanded_cuts) for shape in shapes]
    choices = PipelineTables(candidates, tables, rows)
    spans: dict[int, SpanCosts] = {}
    tried: list[tuple[float, PipelineCuts]] = []
    for shape in shapes:
        if demanded_cuts:
            tried.append((0.0, PipelineCuts(shape, (0, *demanded_cuts, len(tables.layers)))))
            continue
        if shape.num_stages not in spans:
            spans[shape.num_stages] = span_costs(tables, paths, shape.num_stages)
        tried += choose_cuts(tables, spans[shape.num_stages], shape)[:_TRIED_CUTS]
    least_s = min((seconds for seconds, _ in tried), default=0.0)
    for seconds, cuts in tried:
        if seconds <= least_s * _WORTH or not np.isfinite(seconds) or is_small(cuts.shape):
            results.add(choices.estimate(cuts, paths[0].tolist()))


def _guide_paths(tables: CostTables, shapes: list[Shape]) -> tuple[Indices, float]:
    """Paths for different numbers of microbatches in flight, and a lower bound on the seconds of a step.

    All groups together hold at least one microbatch of every layer and have the memory of all: no path that they
    divide among themselves is faster than the chain's bound for so much memory.
    """
    groups = shapes[0].num_groups
    paths: list[Indices] = []
    lower_bound_s = 0.0
    for flight in _typical_flights(shapes):
        aim = min(groups * tables.limit_bytes, _ENDLESS_BYTES)
        pool = fastest_paths(
            tables.chain(flight), max_prices=_GUIDE_PRICES, max_caps=_GUIDE_CAPS, mixes=False, aim_bytes=aim
        )
        if flight == Flight():
            lower_bound_s = pool.lower_bound_s(aim) / groups
        paths.append(np.unique(np.stack(pool.paths), axis=0))
    return np.unique(np.concatenate(paths), axis=0), lower_bound_s


def _typical_flights(shapes: list[Shape]) -> list[Flight]:
    """One microbatch, and what is usual in these shapes, neighbours no nearer than a quarter."""
    usual: set[Flight] = set()
    for shape in shapes:
        counts, splits = zip(*shape.flights, strict=True)
        mean = Flight(round(sum(counts) / len(counts)), round(sum(splits) / len(splits)))
        usual |= {Flight(max(counts), splits[counts.index(max(counts))]), mean}
    typical = [Flight()]
    for flight in sorted(usual):
        if sum(flight) > 1.25 * sum(typical[-1]):
            typical.append(flight)
    return typical
