"""Pipelines of one candidate set: where layers are cut into stages, what each group runs, and which is fastest.

A few paths through all layers (`lagrangian`) give numbers from which `stage_cuts` estimates where to cut and how long a
step takes.  In the order of these estimates, as long as they may be right, `group_strategies` chooses the candidates of
every group under its memory, and the schedule's own action list says what comes of it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.plan import Decisions, Stage
from autopar.schedules import Flight, Shape
from autopar.schedules.action_lists import ScheduleActions, ScheduleSource, StageCost
from autopar.search.chain import cost_tables
from autopar.search.chain.candidate_sets import CandidateSet
from autopar.search.chain.cost_tables import CostTables, path_begins_s, path_host_bytes, path_stages
from autopar.search.chain.lagrangian import fastest_paths
from autopar.search.pipeline.group_strategies import GroupSolver
from autopar.search.pipeline.relaxed_pipelines import relaxed_bounds
from autopar.search.pipeline.schedule_estimates import Idle, held_shares, idle_of, is_small
from autopar.search.pipeline.stage_cuts import PipelineCuts, SpanCosts, StageEstimates, largest_first, span_costs
from autopar.search.pipeline.stage_weights import StageWeights
from autopar.step.costs.stage_costs import pipeline_step_s

__all__ = ["OVERCOUNTED", "PipelineCandidate", "PipelineResults", "PipelineTables", "ShapeBound", "search_pipelines"]

Indices = npt.NDArray[np.intp]

# The paths only guide the cuts, so their hulls are followed less closely than those of plans without stages.
_GUIDE_PRICES = 8
_GUIDE_CAPS = 2
_ENDLESS_BYTES = 1e30  # stands for no limit, in products
_TRIED_CUTS = 4  # ways to cut for each schedule: of 240 made-up pipelines 6 were faster in none, and slower in 2
# How far estimates of steps may be too high: of a decoder of 126 layers on 8 to 32 groups, 43 shapes, they were by up
# to 20 % (1F1B, whose first stages differ most), of those that were the best of their numbers by up to 4 %.
_ESTIMATE_ERROR = 0.1
_NEAR = 1.03  # of the first estimate of a shape: other cuts that seem to take no longer are tried too
_MOST_SHAPES = 6  # of one pair of numbers are looked at: each takes 0.1 to 0.3 s
_UNEVEN = 2.0  # the largest stage, in layers, over the mean: 61 layers in 32 stages make one of 2 and no more than that
# Searches count all that a device holds at some moment of a step, which is more than it holds at any one: of 110 paths
# of a decoder, a mixture of experts and a function on 4 devices by up to 54 %.
OVERCOUNTED = 1.6
# So small pipelines are also sought with more memory, relative to the limit.
_LARGER = (OVERCOUNTED, 1.25)


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

    def with_all(self) -> PipelineTables:
        """All candidates of every layer."""
        own = self.tables
        tables = replace(self.candidates.tables, limit_bytes=own.limit_bytes, split_gain=own.split_gain)
        return PipelineTables(self.candidates, tables, tuple(np.arange(len(each.state_in)) for each in tables.layers))

    def with_one(self, kind: int, row: int) -> PipelineTables:
        """The candidate `row` alone for the layers whose costs have this id, all candidates for the others."""
        own = self.tables
        kept = {id(each): np.arange(len(each.state_in)) for each in own.layers} | {kind: np.array([row])}
        rows = tuple(before[kept[id(each)]] for before, each in zip(self.rows, own.layers, strict=True))
        return PipelineTables(self.candidates, own.keep(kept), rows)

    def pipeline(
        self, cuts: PipelineCuts, guide: Sequence[int], schedules: ScheduleSource, weights: StageWeights | None = None
    ) -> PipelineCandidate:
        """Choose the candidates of all layers; `guide` and `weights` as in `GroupSolver.solve`."""
        return PipelineCandidate.of(
            self, cuts, self.solver.solve(cuts, guide, cuts.shape.actions(schedules), weights), schedules
        )

    def indices_of(self, path: Sequence[int], other: PipelineTables) -> list[int]:
        """Where the candidates of a path through these tables are in `other`."""
        known = [int(own[index]) for own, index in zip(self.rows, path, strict=True)]
        return [int(np.searchsorted(own, row)) for own, row in zip(other.rows, known, strict=True)]


@dataclass(frozen=True, eq=False)
class PipelineCandidate:
    """A pipeline: where it is cut, which of the tables' candidates each layer has, and what its stages cost; its step's
    seconds are those of the schedule's action list.
    """

    choices: PipelineTables
    cuts: PipelineCuts
    rows: tuple[int, ...]
    stages: tuple[StageCost, ...]
    begins_s: tuple[float, ...]  # of each device group, as of `path_begins_s`
    step_s: float
    host_bytes: float
    actions: ScheduleActions = field(repr=False)

    @classmethod
    def of(
        cls, choices: PipelineTables, cuts: PipelineCuts, rows: tuple[int, ...], schedules: ScheduleSource
    ) -> PipelineCandidate:
        """What comes of these candidates."""
        actions = cuts.shape.actions(schedules)
        stages = path_stages(choices.tables, cuts.shape, cuts.bounds, rows, actions)
        begins_s = path_begins_s(choices.tables, cuts.shape, cuts.bounds, rows)
        step_s = pipeline_step_s(cuts.shape, actions, stages, begins_s)
        host_bytes = path_host_bytes(choices.tables, cuts.shape, cuts.bounds, rows, actions)
        return cls(choices, cuts, rows, stages, tuple(begins_s), step_s, host_bytes, actions)

    @property
    def candidates(self) -> CandidateSet:
        """Of all layers."""
        return self.choices.candidates

    @property
    def shape(self) -> Shape:
        """How it runs, wherever it is cut."""
        return self.cuts.shape

    @property
    def path(self) -> tuple[int, ...]:
        """Per layer the index of its candidate."""
        return tuple(int(own[index]) for own, index in zip(self.choices.rows, self.rows, strict=True))

    def solved_again(
        self, choices: PipelineTables, schedules: ScheduleSource, weights: StageWeights | None = None
    ) -> PipelineCandidate:
        """The same cuts with other candidates; `weights` as in `GroupSolver.solve`."""
        return choices.pipeline(self.cuts, self.choices.indices_of(self.rows, choices), schedules, weights)

    def levelled(self, kind: int, row: int, schedules: ScheduleSource) -> PipelineCandidate:
        """The same cuts with one candidate for all layers whose costs in the candidate set's tables have this id, and
        those that suit it best for the others.
        """
        choices = self.choices.with_all().with_one(kind, row)
        layers = self.candidates.tables.layers
        guide = [0 if id(layer) == kind else own for own, layer in zip(self.path, layers, strict=True)]
        return choices.pipeline(self.cuts, guide, schedules)

    def shrunk(self, excess_bytes: Mapping[int, float], schedules: ScheduleSource) -> PipelineCandidate:
        """The same cuts with candidates that make the peak of these device groups smaller, by so many bytes."""
        peaks_bytes = dict(zip(self.shape.groups, (each.peak_memory_bytes for each in self.stages), strict=True))
        limits_bytes = {group: peaks_bytes[group] - excess for group, excess in excess_bytes.items()}
        return self.within(limits_bytes, schedules)

    def within(self, limits_bytes: Mapping[int, float], schedules: ScheduleSource) -> PipelineCandidate:
        """The same cuts with candidates for these limits of device groups, others than the tables' one."""
        rows = self.choices.solver.solve(self.cuts, self.rows, self.actions, limits_bytes=limits_bytes)
        return PipelineCandidate.of(self.choices, self.cuts, rows, schedules)

    def decisions(self) -> Decisions:
        """As a plan has them."""
        spans = zip(itertools.pairwise(self.cuts.bounds), self.shape.groups, strict=True)
        stages = tuple(Stage(start, stop, group) for (start, stop), group in spans)
        return self.candidates.decisions(self.path, stages, self.shape.schedule)

    @cached_property
    def least_s(self) -> float:
        """Seconds of a step if all is overlapped that may be."""
        tables, shape, bounds = self.candidates.least_tables, self.shape, self.cuts.bounds
        stages = path_stages(tables, shape, bounds, self.path)
        return pipeline_step_s(shape, self.actions, stages, path_begins_s(tables, shape, bounds, self.path))

    @property
    def inner_sizes(self) -> frozenset[int]:
        """Devices of the inner axes of its usual layers' meshes."""
        ((mesh, _),) = Counter(each.strategy.mesh for each in self.candidates.along(self.path)).most_common(1)
        return frozenset({math.prod(mesh[1:])})

    @property
    def longest_group(self) -> int:
        """The most layers of a device group."""
        spans = [[stop - start for start, stop, _ in self.cuts.stages_of(g)] for g in range(self.shape.num_groups)]
        return max(map(sum, spans))

    @property
    def peak_bytes(self) -> float:
        """Of the group that takes most."""
        return max(stage.peak_memory_bytes for stage in self.stages)

    @property
    def has_host_room(self) -> bool:
        """Whether the hosts have room for the activations that it offloads."""
        return self.host_bytes <= self.choices.tables.host_limit_bytes


@dataclass(eq=False)
class ShapeBound:
    """No pipeline of this shape that fits takes fewer seconds than `bound_s`.

    `candidates` are those of all layers, None if they are not known; `cuts` are the first layers of the stages but the
    first, if they are demanded.  `any_memory_s` is a bound that holds whatever the limit is.
    """

    shape: Shape
    bound_s: float
    any_memory_s: float
    candidates: CandidateSet | None = None
    cuts: tuple[int, ...] = ()


@dataclass(eq=False)
class PipelineResults:
    """The pipelines of a search, and lower bounds on the seconds of everything that was looked at.

    `oversized` are small ones that were sought with more memory than the limit: some fit by the walk through the step.
    `largest_bytes` is the most that was counted for a pipeline of these, or one made from them, that fits by the walk
    through the step.
    """

    schedules: ScheduleSource
    limit_bytes: float
    candidates: list[PipelineCandidate] = field(default_factory=list[PipelineCandidate])
    bounds: list[ShapeBound] = field(default_factory=list[ShapeBound])
    oversized: list[PipelineCandidate] = field(default_factory=list[PipelineCandidate])
    largest_bytes: float = 0.0

    @property
    def lower_bound_s(self) -> float:
        """No pipeline that was looked at and fits is faster."""
        return min((each.bound_s for each in self.bounds), default=np.inf)

    @property
    def fitting(self) -> list[PipelineCandidate]:
        """Those that fit on devices and hosts."""
        return [each for each in self.candidates if self.fits(each)]

    def fits(self, pipeline: PipelineCandidate) -> bool:
        """Whether it fits on devices and hosts."""
        return pipeline.peak_bytes <= self.limit_bytes and pipeline.has_host_room

    @property
    def best(self) -> PipelineCandidate | None:
        """The fastest that fits, of equals the smallest."""
        return min(self.fitting, key=lambda each: (each.step_s, each.peak_bytes), default=None)

    @property
    def smallest(self) -> PipelineCandidate | None:
        """The smallest of those that don't fit."""
        too_large = (each for each in self.candidates if each.peak_bytes > self.limit_bytes)
        return min(too_large, key=lambda each: each.peak_bytes, default=None)

    @property
    def short_of_host(self) -> PipelineCandidate | None:
        """Of those that fit on devices alone, the one that offloads least."""
        short = (each for each in self.candidates if each.peak_bytes <= self.limit_bytes and not each.has_host_room)
        return min(short, key=lambda each: each.host_bytes, default=None)

    @property
    def best_s(self) -> float:
        """Seconds of the best, infinite if there is none."""
        return self.best.step_s if self.best else np.inf

    def bound_up_to(self, counted_bytes: float) -> None:
        """Let the bounds hold for pipelines that are counted as so large, too."""
        if counted_bytes > self.limit_bytes:
            self.limit_bytes = counted_bytes
            for each in self.bounds:
                each.bound_s = each.any_memory_s

    def raise_bounds(self, enough_s: float) -> None:
        """Make `lower_bound_s` at least so much, as far as that is possible: always the least of the bounds a little,
        until it is as high as it gets.
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
                tables = replace(each.candidates.least_tables, limit_bytes=self.limit_bytes)
                actions = each.shape.actions(self.schedules)
                begun[number] = relaxed_bounds(tables, each.shape, actions, enough_s, each.cuts)
            next_s = todo[0][0] if todo else enough_s
            for bound_s in begun[number]:
                each.bound_s = max(each.bound_s, bound_s)
                if each.bound_s >= next_s:
                    break
            else:
                return  # this one is the least, and can't be raised
            heapq.heappush(todo, (each.bound_s, number))


def search_pipelines(
    candidates: CandidateSet,
    bounds: Mapping[Shape, float],
    demanded_cuts: tuple[int, ...],
    results: PipelineResults,
    enough_s: float = math.inf,
) -> float:
    """Add to `results` the pipelines of some shapes with these candidates that look best.

    Args:
        candidates: of all layers.
        bounds: for each shape, seconds that none of them is faster than.
        demanded_cuts: the first layers of the stages but the first; without them all cuts are possible.
        results: to add to.
        enough_s: pipelines that clearly seem to take so long are not looked at, if any were.

    Returns:
        The seconds of the fastest that fits; if none was simulated, an estimate of the most promising one.
    """
    shapes = list(bounds)
    lower_bound_s = _least_chain_s(replace(candidates.least_tables, limit_bytes=results.limit_bytes), shapes)
    results.bounds += [
        ShapeBound(shape, max(bound_s, lower_bound_s), bound_s, candidates, demanded_cuts)
        for shape, bound_s in bounds.items()
    ]
    idle = {shape: idle_of(shape, shape.actions(results.schedules)) for shape in shapes}
    if not candidates.tables.splits_backward:
        idle = {shape: each._replace(split_gain=0.0) for shape, each in idle.items()}
    guided = _guided_tables(candidates, replace(candidates.tables, limit_bytes=results.limit_bytes), idle)
    best_s, is_short = _look(guided, idle, demanded_cuts, results, enough_s)
    small = {shape: own for shape, own in idle.items() if is_small(shape)}
    for share in _LARGER if small and is_short else ():
        larger = PipelineResults(results.schedules, share * results.limit_bytes)
        rival_s = min(enough_s, best_s)
        _look(_within(guided, larger.limit_bytes), small, demanded_cuts, larger, rival_s)
        if larger.best_s >= rival_s:
            break  # nor is any faster with less of it
        results.oversized += larger.candidates
    return best_s


def _look(
    guided: _Guided,
    idle: Mapping[Shape, Idle],
    demanded_cuts: tuple[int, ...],
    results: PipelineResults,
    enough_s: float,
) -> tuple[float, bool]:
    """Of these shapes, as `search_pipelines`; also whether with more memory some stages would seem faster."""
    if demanded_cuts:
        tables = next(iter(guided.values()))[0].tables
        cuts = (0, *demanded_cuts, len(tables.layers))
        solved = [_solve(guided, idle, PipelineCuts(shape, cuts), results) for shape in idle]
        return min((each.step_s for each in solved if results.fits(each)), default=math.inf), True
    best_s, estimates = math.inf, list(_stage_estimates(guided, idle, results.schedules))
    is_short = any(each.is_short_of_memory for each in estimates)
    ranked = sorted(((each.ways_to_cut(), each) for each in estimates), key=lambda pair: pair[0][0][0])
    for seen, (ways, own) in enumerate(ranked):
        estimated_s = ways[0][0]
        least_s = estimated_s * (1 - _ESTIMATE_ERROR)
        if results.candidates and (seen >= _MOST_SHAPES or least_s >= min(best_s, enough_s) < math.inf):
            return min(best_s, estimated_s), is_short
        tried: list[PipelineCuts] = []
        first = left = _nearly_fastest(ways)
        while left:
            pipeline = _solve(guided, idle, left[0], results)
            best_s = min(best_s, pipeline.step_s) if results.fits(pipeline) else best_s
            tried.append(left[0])
            if len(tried) == _TRIED_CUTS:
                break
            peaks_bytes = [each.peak_memory_bytes for each in pipeline.stages]
            own.correct(pipeline.choices.tables, pipeline.cuts, pipeline.rows, peaks_bytes)
            left = [cuts for cuts in (*first, *_nearly_fastest(own.ways_to_cut())) if cuts not in tried]
    return best_s, is_short


def _nearly_fastest(ways: Sequence[tuple[float, PipelineCuts]]) -> list[PipelineCuts]:
    """The ways to cut that seem fastest, or nearly so."""
    return [cuts for seconds, cuts in ways if seconds <= ways[0][0] * _NEAR]


def _solve(
    guided: _Guided, idle: Mapping[Shape, Idle], cuts: PipelineCuts, results: PipelineResults
) -> PipelineCandidate:
    """Choose the candidates for these cuts, and add them to the results."""
    choices, guides = guided[idle[cuts.shape].split_gain]
    choices.candidates.context.request.check_time()
    pipeline = choices.pipeline(cuts, guides[0].tolist(), results.schedules)
    results.candidates.append(pipeline)
    return pipeline


# By the gain of split backwards: tables that take it into account, and the paths that guide cuts.
_Guided = dict[float, tuple[PipelineTables, Indices]]


def _guided_tables(candidates: CandidateSet, whole: CostTables, idle: Mapping[Shape, Idle]) -> _Guided:
    """For each gain of split backwards the most useful candidates, which are the same for all, and their fast paths."""
    shapes, gains = list(idle), sorted({each.split_gain for each in idle.values()})
    by_gain = {gain: _guide_paths(replace(whole, split_gain=gain), shapes) for gain in gains}
    paths, flights = np.concatenate(list(by_gain.values())), _typical_flights(shapes)
    is_host_short = _is_host_short(whole, shapes, paths)
    if is_host_short:
        paths = np.concatenate([paths, _guide_paths(_without_offloads(whole), shapes)])
    tables, rows = cost_tables.useful_candidates(whole, paths, flights, gains, is_host_short=is_host_short)
    guided: _Guided = {}
    for gain, paths in by_gain.items():
        guides = np.stack([np.searchsorted(own, paths[:, layer]) for layer, own in enumerate(rows)], axis=1)
        choices = PipelineTables(candidates, replace(tables, split_gain=gain), rows)
        guided[gain] = choices, largest_first(tables, guides)
    return guided


def _within(guided: _Guided, limit_bytes: float) -> _Guided:
    """The same candidates and paths under another limit."""
    return {
        gain: (replace(choices, tables=replace(choices.tables, limit_bytes=limit_bytes)), guides)
        for gain, (choices, guides) in guided.items()
    }


def _without_offloads(tables: CostTables) -> CostTables:
    """The tables with candidates that offload so slow that they are only taken where there is no other."""
    slow_s = sum(float(layer.total_s(1).max()) for layer in tables.layers)
    known = {
        key: replace(layer, forward_s=layer.forward_s + slow_s * (layer.host_bytes > 0))
        for key, layer in tables.distinct_layers.items()
    }
    return replace(tables, layers=tuple(known[id(layer)] for layer in tables.layers))


def _is_host_short(tables: CostTables, shapes: Sequence[Shape], paths: Indices) -> bool:
    """Whether one of these paths may offload more than a host has room for, cut into stages of equal layers or nearly
    so.
    """
    chosen = (layer.host_bytes[paths[:, index]] for index, layer in enumerate(tables.layers))
    whole_bytes = float(sum(chosen, np.zeros(len(paths))).max())
    loads = [0.0]  # of device groups: parts of the layers, times microbatches in flight
    for shape in shapes:
        by_group = Counter[int]()
        for group, (in_flight, _) in zip(shape.groups, shape.flights, strict=True):
            by_group[group] += in_flight
        loads.append(max(by_group.values()) / shape.num_stages)
    return _UNEVEN * max(loads) * whole_bytes > tables.host_limit_bytes


def _stage_estimates(
    guided: _Guided, idle: Mapping[Shape, Idle], schedules: ScheduleSource
) -> Iterator[StageEstimates]:
    """For each shape how long its stages seem to take."""
    spans: dict[tuple[float, int], SpanCosts] = {}
    for shape, (fill_share, gain) in idle.items():
        choices, guides = guided[gain]
        if (gain, shape.num_stages) not in spans:
            spans[gain, shape.num_stages] = span_costs(choices.tables, guides, shape.num_stages)
        held_share = max(held_shares(shape, shape.actions(schedules)))
        yield StageEstimates.of(choices.tables, spans[gain, shape.num_stages], shape, fill_share, held_share)


def _guide_paths(tables: CostTables, shapes: list[Shape]) -> Indices:
    """Paths for different numbers of microbatches in flight."""
    aim = min(shapes[0].num_groups * tables.limit_bytes, _ENDLESS_BYTES)
    paths: list[Indices] = []
    for flight in _typical_flights(shapes):
        pool = fastest_paths(
            tables.chain(flight), max_prices=_GUIDE_PRICES, max_caps=_GUIDE_CAPS, mixes=False, aim_bytes=aim
        )
        paths.append(np.unique(np.stack(pool.paths), axis=0))
    return np.unique(np.concatenate(paths), axis=0)


def _least_chain_s(tables: CostTables, shapes: list[Shape]) -> float:
    """No pipeline of these shapes that fits takes less.

    All groups together hold at least one microbatch of every layer and have the memory of all: no path that they
    divide among themselves is faster than the chain's bound for so much memory.
    """
    groups = shapes[0].num_groups
    aim = min(groups * tables.limit_bytes, _ENDLESS_BYTES)
    chain = tables.chain(Flight())
    pool = fastest_paths(chain, max_prices=_GUIDE_PRICES, max_caps=_GUIDE_CAPS, mixes=False, aim_bytes=aim)
    return pool.lower_bound_s(aim) / groups


def _typical_flights(shapes: list[Shape]) -> list[Flight]:
    """One microbatch, and what is usual in these shapes, neighbors no nearer than a quarter."""
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
