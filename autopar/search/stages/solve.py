"""The search over pipeline stages: device groups, stages, cuts, microbatches and schedules.

For every number of device groups and of microbatches there is a setting of candidates on the devices of one group.
A pool of paths through all its layers (`chain`) gives numbers from which `cuts` chooses where to cut;
`paths` then chooses the candidates of every group under its memory, and what comes out is simulated with the
schedule's own action list (`prediction`): the fastest is the plan.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.plan import Decisions, Stage
from autopar.schedule import ScheduleSource, Shape, StageCost
from autopar.search.chain import fastest_paths
from autopar.search.stages.constraints import PipelineDemands
from autopar.search.stages.cuts import Cut, Pool, choose_cuts, make_pool
from autopar.search.stages.estimates import estimate_flights, estimate_s, is_small
from autopar.search.stages.exact import Exact
from autopar.search.stages.paths import GroupSolver, Layout
from autopar.search.stages.problem import StageProblem, measure, restrict
from autopar.search.stages.setting import stage_problem
from autopar.search.trials import Setting
from autopar.step.stage_costs import pipeline_step_s

__all__ = ["Draft", "Found", "Staged", "search_problem", "search_setting"]

Indices = npt.NDArray[np.intp]

_POOL_PRICES = 8
_POOL_CAPS = 2
_TRIED_CUTS = 4
_ENDLESS_BYTES = 1e30
_FEW_LAYERS = 8
_FEW_CANDIDATES = 8
_STEPS_FEW, _STEPS_MANY = 30_000, 300  # of branch and bound, with few candidates and with many
_WORTH = 1.15  # what seems slower than the fastest by more is not looked at again
_SETTLED = 4  # larger schedules that are simulated in the end, if one of them fits
_DOUBT = 0.05  # how far estimates may be too high


@dataclass(frozen=True, eq=False)
class Staged:
    """A pipeline: where it is cut, which candidate each layer has, and what its stages cost."""

    setting: Setting
    shape: Shape
    bounds: tuple[int, ...]
    path: tuple[int, ...]
    stages: tuple[StageCost, ...]
    step_s: float

    @property
    def decisions(self) -> Decisions:
        """As a plan has them."""
        cuts = zip(itertools.pairwise(self.bounds), self.shape.groups, strict=True)
        stages = tuple(Stage(start, stop, group) for (start, stop), group in cuts)
        return self.setting.decisions(self.path, stages, self.shape.schedule)

    @property
    def peak_bytes(self) -> float:
        """Of the group that takes most."""
        return max(stage.peak_memory_bytes for stage in self.stages)


@dataclass(eq=False)
class Draft:
    """A pipeline that has not been simulated: `path` has indices of the problem's candidates, `seconds` are estimated.

    `rows` has per layer the setting's index of each candidate of the problem.
    """

    setting: Setting
    problem: StageProblem
    rows: tuple[Indices, ...]
    shape: Shape
    bounds: tuple[int, ...]
    path: tuple[int, ...]
    seconds: float

    def simulate(self, source: ScheduleSource) -> Staged:
        """What the schedule's own action list makes of it."""
        shape, actions = self.shape, self.shape.actions(source)
        stages = measure(self.problem, shape, self.bounds, self.path, actions)
        path = tuple(int(self.rows[layer][index]) for layer, index in enumerate(self.path))
        return Staged(self.setting, shape, self.bounds, path, stages, pipeline_step_s(shape, actions, stages))


@dataclass(eq=False)
class Found:
    """What a search has found so far: the fastest that fits, the smallest that doesn't, what has yet to be simulated,
    what was, and a lower bound on everything that was looked at.
    """

    source: ScheduleSource
    limit_bytes: float
    best: Staged | None = None
    smallest: Staged | None = None
    drafts: list[Draft] = field(default_factory=list[Draft])
    lower_s: float = np.inf
    simulated: list[Staged] = field(default_factory=list[Staged])

    @property
    def best_s(self) -> float:
        """Seconds of the best, infinite if there is none."""
        return self.best.step_s if self.best else np.inf

    @property
    def hoped_s(self) -> float:
        """As `best_s`, with what has yet to be simulated."""
        return min([self.best_s, *(draft.seconds for draft in self.drafts)])

    def add(self, draft: Draft) -> None:
        """Simulate a draft, now if that takes no time."""
        if is_small(draft.shape):
            self._simulate(draft)
        else:
            self.drafts.append(draft)

    def settle(self) -> None:
        """Simulate the drafts that may still be the best."""
        self.drafts.sort(key=lambda draft: draft.seconds)
        for number, draft in enumerate(self.drafts):
            is_hopeful = draft.seconds * (1 - _DOUBT) < self.best_s
            if (self.best is None or number < _SETTLED) and is_hopeful:
                self._simulate(draft)
        self.drafts.clear()

    def merge(self, other: Found) -> None:
        """Take over what `other` has found."""
        for staged in (other.best, other.smallest):
            if staged is not None:
                self._keep(staged)
        self.drafts += other.drafts
        self.simulated += other.simulated
        self.lower_s = min(self.lower_s, other.lower_s)

    def _simulate(self, draft: Draft) -> None:
        staged = draft.simulate(self.source)
        self.simulated.append(staged)
        self._keep(staged)

    def _keep(self, staged: Staged) -> None:
        if staged.peak_bytes <= self.limit_bytes:
            if (staged.step_s, staged.peak_bytes) < (self.best_s, self.best.peak_bytes if self.best else np.inf):
                self.best = staged
        elif self.smallest is None or staged.peak_bytes < self.smallest.peak_bytes:
            self.smallest = staged


def search_setting(setting: Setting, shapes: list[Shape], demands: PipelineDemands, found: Found) -> None:
    """Add to `found` the pipelines of these shapes with the setting's candidates that look best."""
    search_problem(setting, stage_problem(setting, found.limit_bytes), shapes, demands.cuts, found)


def search_problem(
    setting: Setting, problem: StageProblem, shapes: list[Shape], given: tuple[int, ...], found: Found
) -> None:
    """As `search_setting`, of the setting's numbers; `given` are the cuts, if they are demanded.

    Small problems are solved exactly.
    """
    paths, lower_s = _path_pool(problem, shapes)
    small, rows = restrict(problem, paths, _typical_flights(shapes))
    paths = np.stack([np.searchsorted(rows[layer], paths[:, layer]) for layer in range(paths.shape[1])], axis=1)
    found.lower_s = min(found.lower_s, lower_s)
    solver = GroupSolver(small)
    cuts: list[tuple[float, Shape, Cut]] = []
    pools: dict[int, Pool] = {}
    for shape in shapes:
        if shape.num_stages not in pools:
            pools[shape.num_stages] = make_pool(small, paths, shape.num_stages)
        chosen = choose_cuts(small, pools[shape.num_stages], shape, estimate_flights(shape), given)
        cuts += [(cut.seconds, shape, cut) for cut in chosen[:_TRIED_CUTS]]
    least = min((seconds for seconds, _, _ in cuts), default=0.0)
    for seconds, shape, cut in cuts:
        if seconds <= least * _WORTH or not np.isfinite(seconds) or is_small(shape):
            in_flight = estimate_flights(shape)
            path = solver.solve(Layout(shape, cut.bounds, in_flight), pools[shape.num_stages].paths[0].tolist())
            stages = measure(small, shape, cut.bounds, path)
            found.add(Draft(setting, small, rows, shape, cut.bounds, path, estimate_s(shape, stages, in_flight)))
    for shape in shapes:
        if len(problem.tables) <= _FEW_LAYERS and is_small(shape):
            _solve_exactly(setting, problem, small, rows, shape, given, found)


def _solve_exactly(
    setting: Setting,
    problem: StageProblem,
    small: StageProblem,
    rows: tuple[Indices, ...],
    shape: Shape,
    given: tuple[int, ...],
    found: Found,
) -> None:
    """Add what is faster than all that is known, with all candidates if there are few, else with the useful ones."""
    steps = _STEPS_MANY
    if max(len(table.state_in) for table in problem.tables) <= _FEW_CANDIDATES:
        steps = _STEPS_FEW
        small, rows = problem, tuple(np.arange(len(table.state_in)) for table in problem.tables)
    exact = Exact(small, shape, shape.actions(found.source), found.best_s, steps)
    exact.run(given)
    if exact.path:
        found.add(Draft(setting, small, rows, shape, exact.bounds, exact.path, exact.limit_s))


def _path_pool(problem: StageProblem, shapes: list[Shape]) -> tuple[Indices, float]:
    """Paths for different numbers of microbatches in flight, and a lower bound on the seconds of a step.

    All groups together hold at least one microbatch of every layer and have the memory of all: no path that they
    divide among themselves is faster than the chain's bound for so much memory.
    """
    groups = shapes[0].num_groups
    found: list[Indices] = []
    lower_s = 0.0
    for flight in _typical_flights(shapes):
        chain = problem.chain(flight)
        aim = min(groups * problem.limit_bytes, _ENDLESS_BYTES)
        paths = fastest_paths(chain, max_prices=_POOL_PRICES, max_caps=_POOL_CAPS, mixes=False, aim_bytes=aim)
        if flight == 1:
            lower_s = paths.lower_bound_s(aim) / groups
        found.append(np.unique(np.stack(paths.paths), axis=0))
    return np.unique(np.concatenate(found), axis=0), lower_s


def _typical_flights(shapes: list[Shape]) -> list[int]:
    """1, and what is usual in these shapes, neighbours no nearer than a quarter."""
    usual: set[int] = set()
    for shape in shapes:
        flights = estimate_flights(shape)
        usual |= {max(flights), round(sum(flights) / len(flights))}
    found = [1]
    for flight in sorted(usual):
        if flight > 1.25 * found[-1]:
            found.append(flight)
    return found
