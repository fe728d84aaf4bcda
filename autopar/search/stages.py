"""The search over pipeline stages: device groups, stages, cuts, microbatches and schedules.

For every number of device groups and of microbatches there is a setting of candidates on the devices of one group.
A pool of paths through all its layers (`chain`) gives numbers from which `stage_cuts` chooses where to cut;
`stage_paths` then chooses the candidates of every group under its memory, and what comes out is simulated with the
schedule's own action list (`stage_prediction`): the fastest is the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.plan import Stage
from autopar.schedule import ScheduleActions, ScheduleSource
from autopar.search.chain import fastest_paths
from autopar.search.stage_constraints import PipelineDemands, Shape
from autopar.search.stage_cuts import choose_cuts, make_pool
from autopar.search.stage_paths import GroupSolver, Layout
from autopar.search.stage_prediction import pipeline_step_s
from autopar.search.stage_problem import StageProblem, measure, restrict
from autopar.search.stage_setting import stage_problem
from autopar.search.trials import Setting

__all__ = ["Found", "Staged", "flights", "search_setting"]

Indices = npt.NDArray[np.intp]

_POOL_PRICES = 8
_POOL_CAPS = 2
_MAX_POOL = 48
_TRIED_CUTS = 4


@dataclass(frozen=True, eq=False)
class Staged:
    """A pipeline: where it is cut, which candidate each layer has, and what is predicted of it."""

    setting: Setting
    shape: Shape
    bounds: tuple[int, ...]
    path: tuple[int, ...]
    stages: tuple[Stage, ...]
    step_s: float

    @property
    def peak_bytes(self) -> float:
        """Of the group that takes most."""
        return max(stage.peak_memory_bytes for stage in self.stages)


@dataclass(eq=False)
class Found:
    """What a search has found so far: the fastest that fits, the smallest that doesn't, and a bound on everything."""

    best: Staged | None = None
    smallest: Staged | None = None
    lower_s: float = np.inf

    @property
    def best_s(self) -> float:
        """Seconds of the best, infinite if there is none."""
        return self.best.step_s if self.best else np.inf

    def add(self, staged: Staged, limit_bytes: float) -> None:
        """Keep what is better than what is known."""
        if staged.peak_bytes <= limit_bytes:
            if (staged.step_s, staged.peak_bytes) < (self.best_s, self.best.peak_bytes if self.best else np.inf):
                self.best = staged
        elif self.smallest is None or staged.peak_bytes < self.smallest.peak_bytes:
            self.smallest = staged

    def merge(self, other: Found, limit_bytes: float) -> None:
        """Take over what `other` has found."""
        for staged in (other.best, other.smallest):
            if staged is not None:
                self.add(staged, limit_bytes)
        self.lower_s = min(self.lower_s, other.lower_s)


def flights(actions: ScheduleActions, num_stages: int) -> tuple[int, ...]:
    """Per stage, the most microbatches between their forward and the end of their backward."""
    held, most = Counter[int](), [0] * num_stages
    for own in actions:
        for action in own:
            if action.kind == "F":
                held[action.stage] += 1
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.kind in ("B", "W"):
                held[action.stage] -= 1
    return tuple(most)


def search_setting(
    setting: Setting, shapes: list[Shape], demands: PipelineDemands, source: ScheduleSource, limit_bytes: float,
    found: Found,
) -> None:  # fmt: skip
    """Add to `found` the best pipeline of each shape with the setting's candidates."""
    problem = stage_problem(setting, limit_bytes)
    groups = setting.task.num_groups
    paths, lower_s = _path_pool(problem, groups)
    small, rows = restrict(problem, paths)
    paths = _renumber(paths, rows)
    found.lower_s = min(found.lower_s, lower_s)
    solver = GroupSolver(small)
    for shape in shapes:
        actions = source(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
        in_flight = flights(actions, shape.num_stages)
        pool = make_pool(small, paths, shape.num_stages)
        for cut in choose_cuts(small, pool, shape, in_flight, demands.cuts)[:_TRIED_CUTS]:
            path = solver.solve(Layout(shape, cut.bounds, in_flight), pool.paths[0].tolist())
            stages = measure(small, shape, cut.bounds, path, actions)
            original = tuple(int(rows[layer][index]) for layer, index in enumerate(path))
            step_s = pipeline_step_s(actions, stages)
            found.add(Staged(setting, shape, cut.bounds, original, stages, step_s), limit_bytes)


def _path_pool(problem: StageProblem, num_groups: int) -> tuple[Indices, float]:
    """Paths for different numbers of microbatches in flight, and a lower bound on the seconds of a step.

    All groups together hold at least one microbatch of every layer and have the memory of all: no path that they
    divide among themselves is faster than the chain's bound for so much memory.
    """
    found: list[Indices] = []
    lower_s = 0.0
    flight = 1
    while flight <= max(problem.num_microbatches, 1):
        paths = fastest_paths(problem.chain(flight), max_prices=_POOL_PRICES, max_caps=_POOL_CAPS, mixes=False)
        if flight == 1:
            lower_s = paths.lower_bound_s(num_groups * problem.limit_bytes) / num_groups
        found.append(np.unique(np.stack(paths.paths), axis=0))
        flight = max(flight * 4, flight + 1)
    merged = np.unique(np.concatenate(found), axis=0)
    return merged[np.linspace(0, len(merged) - 1, min(_MAX_POOL, len(merged))).astype(np.intp)], lower_s


def _renumber(paths: Indices, rows: tuple[Indices, ...]) -> Indices:
    return np.stack([np.searchsorted(rows[layer], paths[:, layer]) for layer in range(paths.shape[1])], axis=1)
