"""The candidates of every layer once it is known where to cut: the chain machinery on the stages of each device group.

The stages of one group make one chain, each layer with its stage's microbatches in flight: they share the group's
memory.  What lies between stages of different groups is priced by the neighbours' states on a guiding path.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.schedule import Shape, stage_group
from autopar.search.chain import Chain, LayerTable, fastest_path, fastest_paths
from autopar.search.stages.problem import StageProblem

__all__ = ["GroupSolver", "Layout"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MAX_PRICES = 12
_MAX_CAPS = 3
_ROUNDS = 2


@dataclass(frozen=True)
class Layout:
    """A shape with its cuts: first layers of all stages and the number of layers, and each stage's microbatches in
    flight.
    """

    shape: Shape
    bounds: tuple[int, ...]
    in_flight: tuple[int, ...]

    def stages_of(self, group: int) -> tuple[tuple[int, int, int], ...]:
        """(first layer, one more than the last, microbatches in flight) of the stages of a device group."""
        return tuple(
            (start, stop, flight)
            for index, ((start, stop), flight) in enumerate(
                zip(itertools.pairwise(self.bounds), self.in_flight, strict=True)
            )
            if stage_group(self.shape.schedule, index, self.shape.num_groups) == group
        )


@dataclass(eq=False)
class GroupSolver:
    """Solves the device groups of one problem; what was solved before is known."""

    problem: StageProblem
    known: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict[tuple[object, ...], tuple[int, ...]])
    chains: dict[int, Chain] = field(default_factory=dict[int, Chain])

    def solve(self, layout: Layout, guide: Sequence[int]) -> tuple[int, ...]:
        """The candidate of every layer; where nothing fits, those that take the least memory."""
        path = tuple(guide)
        for _ in range(_ROUNDS):
            solved = list(path)
            for group in range(layout.shape.num_groups):
                found = self._solve_group(layout, group, path)
                layers = [layer for start, stop, _ in layout.stages_of(group) for layer in range(start, stop)]
                for layer, candidate in zip(layers, found, strict=True):
                    solved[layer] = candidate
            if tuple(solved) == path:
                break
            path = tuple(solved)
        return path

    def _solve_group(self, layout: Layout, group: int, path: tuple[int, ...]) -> tuple[int, ...]:
        stages = layout.stages_of(group)
        around = [self._surroundings(path, start, stop) for start, stop, _ in stages]
        fixed_bytes = self._fixed_bytes(stages, path)
        key = (
            fixed_bytes,
            *((flight, *(id(self.problem.tables[layer]) for layer in range(start, stop)))
              for start, stop, flight in stages),
            *(extra.tobytes() for extras in around for extra in extras),
        )  # fmt: skip
        if key not in self.known:
            self.known[key] = self._solve_chain(self._chain(stages, around, fixed_bytes))
        return self.known[key]

    def _solve_chain(self, chain: Chain) -> tuple[int, ...]:
        path, peak_bytes = fastest_path(chain)
        if not chain.skips and peak_bytes <= self.problem.limit_bytes:
            return tuple(path.tolist())
        paths = fastest_paths(chain, max_prices=_MAX_PRICES, max_caps=_MAX_CAPS)
        best = paths.best(self.problem.limit_bytes)
        return tuple(paths.paths[paths.smallest() if best < 0 else best].tolist())

    def _chain(
        self, stages: tuple[tuple[int, int, int], ...], around: list[tuple[Array, Array]], fixed_bytes: float
    ) -> Chain:
        """The layers of one group; nothing moves from one of its stages to the next."""
        tables: list[LayerTable] = []
        moves: list[Array] = []
        nothing = np.zeros((self.problem.num_states, self.problem.num_states))
        for (start, stop, flight), (before, behind) in zip(stages, around, strict=True):
            if flight not in self.chains:
                self.chains[flight] = self.problem.chain(flight)
            whole = self.chains[flight]
            own = list(whole.tables[start:stop])
            own[0] = replace(own[0], time_s=own[0].time_s + before[own[0].state_in])
            own[-1] = replace(own[-1], time_s=own[-1].time_s + behind[own[-1].state_out])
            moves += [*([nothing] if tables else []), *whole.moves_s[start : stop - 1]]
            tables += own
        return Chain(self.problem.num_states, tuple(tables), tuple(moves), fixed_bytes=fixed_bytes)

    def _surroundings(self, path: tuple[int, ...], start: int, stop: int) -> tuple[Array, Array]:
        """Seconds of a step by the state before the stage, and behind it, if all other layers stay on the path."""
        problem = self.problem
        before, behind = np.zeros((2, problem.num_states))
        for move in problem.moves_at(start, stop):
            seconds = problem.num_microbatches * (move.forward_s + move.backward_s)
            if move.reader == start and move.producer < start:
                before += seconds[problem.tables[move.producer].state_out[path[move.producer]]]
            elif move.producer == stop - 1 and move.reader >= stop:
                behind += seconds[:, problem.tables[move.reader].state_in[path[move.reader]]]
        for traveller in problem.travellers:
            if traveller.producer == stop - 1 and max(traveller.readers) >= stop:
                behind += problem.num_microbatches * (traveller.forward_s + traveller.backward_s)
        return before, behind

    def _fixed_bytes(self, stages: tuple[tuple[int, int, int], ...], path: tuple[int, ...]) -> float:
        """Shared parameters that these stages read, and what they only pass on."""
        problem = self.problem
        size = 0.0
        for tie in problem.ties:
            size += tie.static_bytes * any(start <= r < stop for start, stop, _ in stages for r in tie.readers)
        for traveller in problem.travellers:
            state = problem.tables[traveller.producer].state_out[path[traveller.producer]]
            for start, stop, flight in stages:
                reads = any(start <= reader < stop for reader in traveller.readers)
                if traveller.producer < start and not reads and max(traveller.readers) >= stop:
                    size += flight * float(traveller.num_bytes[state])
        return size
