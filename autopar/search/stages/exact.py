"""The best pipeline of a small problem, by branch and bound: over cuts, then stage by stage over what a stage can be.

The seconds of a step never fall if any part of a stage takes longer (every group works through its list in order), nor
its bytes if any part takes more.  So of the ways to run a stage between the same surroundings, those suffice that no
other beats in all parts (`stage_menu`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.schedule import ScheduleActions, Shape
from autopar.search.stages.problem import Move, StageProblem, measure
from autopar.step.stage_costs import pipeline_step_s

__all__ = ["Exact", "Option", "stage_menu"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MAX_MENU = 400
_EPSILON = 1e-12
_PARTS = ("forward_s", "backward_s", "weight_s", "step_s", "static_bytes", "saved_bytes")  # what adds up over layers


@dataclass(frozen=True)
class Option:
    """A way to run a stage: a candidate per layer, and what they take.

    `parts` are the seconds of a microbatch's forward, of its backward's two parts, and once per step; bytes always, of
    a microbatch in flight, and the largest transients.
    """

    path: tuple[int, ...]
    parts: tuple[float, ...]

    @property
    def unit_s(self) -> float:
        """Seconds of one microbatch."""
        return sum(self.parts[:3])


def stage_menu(problem: StageProblem, start: int, stop: int) -> tuple[Option, ...]:
    """All ways to run these layers that may be of use; ``()`` if there are too many to say."""
    inside = [m for m in (*problem.moves, *problem.skips) if m and start <= m.producer and m.reader < stop]
    paths, parts = np.zeros((1, 0), np.intp), np.zeros((1, len(_PARTS) + 1))
    for layer in range(start, stop):
        table = problem.tables[layer]
        own = np.column_stack([
            table.forward_s, table.backward_s - table.weight_s,
            *(getattr(table, name) for name in _PARTS[2:]), table.transient_bytes,
        ])  # fmt: skip
        # Every way so far with every candidate of this layer.
        before, row = (each.ravel() for each in np.indices((len(paths), len(own))))
        paths = np.column_stack([paths[before], row])
        largest = np.maximum(parts[before, -1], own[row, -1])
        parts = np.column_stack([parts[before, :-1] + own[row, :-1], largest])
        for move in inside:
            if move.reader == layer:
                source = problem.tables[move.producer].state_out[paths[:, move.producer - start]]
                target = table.state_in[row]
                parts[:, 0] += move.forward_s[source, target]
                parts[:, 1] += move.backward_s[source, target]
        kept: list[int] = []
        for group in _like_groups(_surroundings(problem, paths, start, layer + 1)):
            kept += _unbeaten(parts, group)
            if len(kept) > _MAX_MENU:
                return ()
        paths, parts = paths[kept], parts[kept]
    found = [Option(tuple(path), tuple(each)) for path, each in zip(paths.tolist(), parts.tolist(), strict=True)]
    return tuple(sorted(found, key=lambda option: option.unit_s))


def _surroundings(problem: StageProblem, paths: Indices, start: int, stop: int) -> Indices:
    """Per path, the boundary states that anything outside of it depends on."""

    def is_inside(layer: int) -> bool:
        return start <= layer < stop

    moves: list[Move] = [move for move in (*problem.moves, *problem.skips) if move is not None]
    leaving = {move.producer for move in moves if is_inside(move.producer) and not is_inside(move.reader)}
    leaving |= {t.producer for t in problem.travellers if is_inside(t.producer) and max(t.readers) >= stop}
    entering = {move.reader for move in moves if is_inside(move.reader) and not is_inside(move.producer)}
    columns = [problem.tables[layer].state_out[paths[:, layer - start]] for layer in sorted(leaving)]
    columns += [problem.tables[layer].state_in[paths[:, layer - start]] for layer in sorted(entering)]
    return np.column_stack([np.zeros(len(paths), np.intp), *columns])


def _like_groups(keys: Indices) -> list[Indices]:
    """The rows with equal keys, group by group."""
    _, group = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    return np.split(order, np.cumsum(np.bincount(group.ravel()))[:-1])


def _unbeaten(parts: Array, rows: Indices) -> list[int]:
    """Those of the rows that no other of them beats in all parts."""
    rows = rows[np.lexsort(parts[rows].T[::-1])]
    rest = parts[rows]
    kept: list[int] = []
    while len(rows):
        kept.append(int(rows[0]))
        alive = (rest < rest[0]).any(axis=1)
        rows, rest = rows[alive], rest[alive]
    return kept


@dataclass(eq=False)
class Exact:
    """One search: the best pipeline of `shape` that beats `limit_s`, giving up after so many steps.

    After `run`, `path` and `bounds` are the best that was found, if any, and `is_complete` says whether nothing else
    is faster.
    """

    problem: StageProblem
    shape: Shape
    actions: ScheduleActions
    limit_s: float
    max_steps: int
    bounds: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    is_complete: bool = True

    def run(self, cuts: tuple[int, ...] = ()) -> None:
        """Search over all cuts, or only these."""
        num_layers, num_stages = len(self.problem.tables), self.shape.num_stages
        inner = (cuts,) if cuts else itertools.combinations(range(1, num_layers), num_stages - 1)
        menus: dict[tuple[int, int], tuple[Option, ...]] = {}
        drawn: list[tuple[float, tuple[int, ...], list[tuple[Option, ...]]]] = []
        for each in inner:
            bounds = (0, *each, num_layers)
            for start, stop in itertools.pairwise(bounds):
                if (start, stop) not in menus:
                    menus[start, stop] = stage_menu(self.problem, start, stop)
                    if not menus[start, stop]:
                        self.is_complete = False
                        return
            own = [menus[span] for span in itertools.pairwise(bounds)]
            drawn.append((self._bound_s(_least(own)), bounds, own))
        for bound_s, bounds, own in sorted(drawn, key=lambda each: each[0]):
            if bound_s < self.limit_s and self.is_complete:
                self._branch(bounds, own, [])

    @cached_property
    def _groups(self) -> tuple[int, ...]:
        return self.shape.groups

    def _branch(self, bounds: tuple[int, ...], menus: list[tuple[Option, ...]], chosen: list[Option]) -> None:
        self.max_steps -= 1
        if self.max_steps < 0:
            self.is_complete = False
            return
        if len(chosen) == len(menus):
            self._measure(bounds, tuple(row for option in chosen for row in option.path))
            return
        rest = _least(menus[len(chosen) + 1 :])
        before = [option.parts for option in chosen]
        for option in menus[len(chosen)]:
            if self._bound_s([*before, option.parts, *rest]) < self.limit_s * (1 - _EPSILON):
                self._branch(bounds, menus, [*chosen, option])

    def _measure(self, bounds: tuple[int, ...], path: tuple[int, ...]) -> None:
        stages = measure(self.problem, self.shape, bounds, path, self.actions)
        if max(stage.peak_memory_bytes for stage in stages) > self.problem.limit_bytes:
            return
        seconds = pipeline_step_s(self.shape, self.actions, stages)
        if seconds < self.limit_s * (1 - _EPSILON):
            self.limit_s, self.bounds, self.path = seconds, bounds, path

    def _bound_s(self, parts: Sequence[tuple[float, ...]]) -> float:
        """No step is shorter, infinite if a device group's parts don't fit.

        Each group works for all microbatches, after the first one has come through all stages before the group's first.
        """
        count = self.shape.num_microbatches
        splits = self.shape.schedule in ("zbv", "interleaved_zero_bubble")
        longest = once = 0.0
        for group in range(self.shape.num_groups):
            own = [each for each, owner in zip(parts, self._groups, strict=True) if owner == group]
            ahead = parts[: self._groups.index(group)]
            waiting = sum(each[0] if splits else sum(each[:3]) for each in ahead)
            longest = max(longest, waiting + count * sum(sum(each[:3]) for each in own))
            once = max(once, sum(each[3] for each in own))
            static = sum(each[4] for each in own)
            if static + max(each[5] for each in own) + max(each[6] for each in own) > self.problem.limit_bytes:
                return np.inf
        return longest + once


def _least(menus: Sequence[tuple[Option, ...]]) -> list[tuple[float, ...]]:
    """Per stage, the least of each part that any way to run it takes."""
    return [tuple(min(values) for values in zip(*(option.parts for option in menu), strict=True)) for menu in menus]
