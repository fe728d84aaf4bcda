"""The best pipeline of a small problem, by branch and bound: over cuts, then stage by stage over what a stage can be.

The seconds of a step never fall if any part of a stage takes longer (every group works through its list in order), nor
its bytes if any part takes more.  So of the ways to run a stage between the same surroundings, those suffice that no
other beats in all parts (`stage_menu`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.plan import Stage
from autopar.schedule import ScheduleActions, stage_group
from autopar.search.stages.constraints import Shape
from autopar.search.stages.prediction import pipeline_step_s
from autopar.search.stages.problem import Move, StageProblem, measure

__all__ = ["Exact", "Option", "stage_menu"]

Array = npt.NDArray[np.float64]

_MAX_MENU = 400
_EPSILON = 1e-12


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
    options: list[tuple[tuple[int, ...], Array]] = [((), np.zeros(7))]
    inside = [m for m in (*problem.moves, *problem.skips) if m and start <= m.producer and m.reader < stop]
    for layer in range(start, stop):
        table = problem.tables[layer]
        own = [
            np.array([
                table.forward_s[row], table.backward_s[row] - table.weight_s[row], table.weight_s[row],
                table.step_s[row], table.static_bytes[row], table.saved_bytes[row], table.transient_bytes[row],
            ])
            for row in range(len(table.forward_s))
        ]  # fmt: skip
        moves = [move for move in inside if move.reader == layer]
        grown: dict[tuple[int, ...], list[tuple[tuple[int, ...], Array]]] = {}
        for (path, parts), row in itertools.product(options, range(len(own))):
            longer = (*path, row)
            total = parts + own[row]
            total[6] = max(parts[6], own[row][6])
            for move in moves:
                source = problem.tables[move.producer].state_out[longer[move.producer - start]]
                target = table.state_in[row]
                total[:2] += move.forward_s[source, target], move.backward_s[source, target]
            grown.setdefault(_surroundings(problem, longer, start, layer + 1), []).append((longer, total))
        options = [option for group in grown.values() for option in _unbeaten(group)]
        if len(options) > _MAX_MENU:
            return ()
    found = [Option(path, tuple(parts.tolist())) for path, parts in options]
    return tuple(sorted(found, key=lambda option: option.unit_s))


def _surroundings(problem: StageProblem, path: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
    """The boundary states of this path that anything outside of it depends on."""

    def is_inside(layer: int) -> bool:
        return start <= layer < stop

    moves: list[Move] = [move for move in (*problem.moves, *problem.skips) if move is not None]
    leaving = {move.producer for move in moves if is_inside(move.producer) and not is_inside(move.reader)}
    leaving |= {t.producer for t in problem.travellers if is_inside(t.producer) and max(t.readers) >= stop}
    entering = {move.reader for move in moves if is_inside(move.reader) and not is_inside(move.producer)}
    return (
        *(int(problem.tables[layer].state_out[path[layer - start]]) for layer in sorted(leaving)),
        *(int(problem.tables[layer].state_in[path[layer - start]]) for layer in sorted(entering)),
    )


def _unbeaten(options: list[tuple[tuple[int, ...], Array]]) -> Iterator[tuple[tuple[int, ...], Array]]:
    parts = np.array([each for _, each in options])
    kept: list[int] = []
    for index in np.lexsort(parts.T[::-1]).tolist():
        if not kept or not (parts[kept] <= parts[index]).all(axis=1).any():
            kept.append(index)
    return (options[index] for index in kept)


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
        shape = self.shape
        return tuple(stage_group(shape.schedule, index, shape.num_groups) for index in range(shape.num_stages))

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
        stages: tuple[Stage, ...] = measure(self.problem, self.shape, bounds, path, self.actions)
        if max(stage.peak_memory_bytes for stage in stages) > self.problem.limit_bytes:
            return
        seconds = pipeline_step_s(self.actions, stages)
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
