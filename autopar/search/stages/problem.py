"""A pipeline's problem as numbers: candidates of every layer on one device group, and what lies between layers.

Seconds are those of one microbatch, but for ``step_s``, which is spent once per step.  A *path* has the index of one
candidate for each layer; `measure` says what a path, cut somewhere, makes of the stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from autopar.schedule import ScheduleActions, Shape, StageCost, peak_held
from autopar.search.chain import Chain, LayerTable, Skip
from autopar.step.stage_costs import CostColumns, stage_costs

__all__ = ["Move", "StageProblem", "StageTable", "Tie", "Traveller", "layer_columns", "measure", "restrict"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class StageTable(CostColumns):
    """The candidates of one layer, one entry each; states index the boundary states."""

    state_in: Indices
    state_out: Indices

    def take(self, rows: Indices) -> StageTable:
        """The candidates of these indices."""
        return StageTable(**{name: column[rows] for name, column in vars(self).items()})


@dataclass(frozen=True, eq=False)
class Move:
    """Seconds to bring what the layer `producer` makes to `reader`, and its gradient back, by their states."""

    producer: int
    reader: int
    forward_s: Array
    backward_s: Array


@dataclass(frozen=True, eq=False)
class Traveller:
    """A value that is sent if a cut lies between the layer `producer` and one of `readers`, by the producer's state.

    `num_bytes` is what a device then holds of it.
    """

    producer: int
    readers: tuple[int, ...]
    forward_s: Array
    backward_s: Array
    num_bytes: Array


@dataclass(frozen=True)
class Tie:
    """A parameter that the layers `readers` share: each device group with one of them stores it, steps it
    (`step_s`), and sends its gradient to each of the other such groups (`exchange_s` each).
    """

    readers: tuple[int, ...]
    static_bytes: float
    step_s: float
    exchange_s: float


@dataclass(frozen=True, eq=False)
class StageProblem:
    """The problem for one number of device groups and of microbatches; tables and moves may repeat.

    `moves` has one entry or none (None) between each layer and the next; `skips` the others.
    """

    num_microbatches: int
    num_states: int
    tables: tuple[StageTable, ...]
    moves: tuple[Move | None, ...]
    skips: tuple[Move, ...] = ()
    travellers: tuple[Traveller, ...] = ()
    ties: tuple[Tie, ...] = ()
    broadcast_s: float = 0.0
    limit_bytes: float = np.inf

    def moves_at(self, start: int, stop: int) -> Iterator[Move]:
        """The moves to the layer `start` from before it, and from the layer ``stop - 1`` to behind it."""
        neighbours = (
            self.moves[start - 1] if start else None,
            self.moves[stop - 1] if stop <= len(self.moves) else None,
        )
        yield from (move for move in neighbours if move is not None)
        for move in self.skips:
            if move.reader == start or (move.producer == stop - 1 and move.reader >= stop):
                yield move

    def chain(self, in_flight: int) -> Chain:
        """All layers on one group, each with so many microbatches in flight."""
        count = self.num_microbatches
        tables = {id(table): _layer_table(table, count, in_flight) for table in self.tables}
        nothing = np.zeros((self.num_states, self.num_states))
        known: dict[int, Array] = {}

        def seconds(move: Move | None) -> Array:
            if move is None:
                return nothing
            if id(move.forward_s) not in known:
                known[id(move.forward_s)] = count * (move.forward_s + move.backward_s)
            return known[id(move.forward_s)]

        return Chain(
            self.num_states,
            tuple(tables[id(table)] for table in self.tables),
            tuple(map(seconds, self.moves)),
            tuple(Skip(move.producer, move.reader, seconds(move)) for move in self.skips),
        )


def _layer_table(table: StageTable, count: int, in_flight: int) -> LayerTable:
    return LayerTable(
        count * (table.forward_s + table.backward_s) + table.step_s,
        table.static_bytes + in_flight * table.saved_bytes,
        table.transient_bytes,
        table.state_in,
        table.state_out,
    )


def layer_columns(problem: StageProblem, path: Sequence[int]) -> CostColumns:
    """What each layer takes on this path, moves to it included, ties not."""
    chosen = list(zip(problem.tables, path, strict=True))
    columns = {
        each.name: np.array([float(getattr(table, each.name)[row]) for table, row in chosen])
        for each in fields(CostColumns)
    }
    for move in (*problem.moves, *problem.skips):
        if move is not None:
            source = chosen[move.producer][0].state_out[path[move.producer]]
            target = chosen[move.reader][0].state_in[path[move.reader]]
            columns["forward_s"][move.reader] += move.forward_s[source, target]
            columns["backward_s"][move.reader] += move.backward_s[source, target]
    return CostColumns(**columns)


def measure(
    problem: StageProblem, shape: Shape, bounds: Sequence[int], path: Sequence[int], actions: ScheduleActions = ()
) -> tuple[StageCost, ...]:
    """The stages that this path makes if it is cut at `bounds` (first layers, then the number of layers).

    Without the schedule's actions their peak bytes are not predicted.
    """
    layers, groups = layer_columns(problem, path), shape.groups
    stage_of = np.searchsorted(np.array(bounds), np.arange(len(path)), side="right") - 1
    for tie in problem.ties:
        first: dict[int, int] = {}
        for reader in tie.readers:
            first.setdefault(groups[int(stage_of[reader])], reader)
        for reader in first.values():
            layers.static_bytes[reader] += tie.static_bytes
            layers.step_s[reader] += tie.step_s + (len(first) - 1) * tie.exchange_s
    sends = np.zeros((shape.num_stages, 2))
    relayed = np.zeros(shape.num_stages)
    for traveller in problem.travellers:
        state = int(problem.tables[traveller.producer].state_out[path[traveller.producer]])
        reading = {int(stage_of[reader]) for reader in traveller.readers}
        for stage in range(int(stage_of[traveller.producer]), max(reading)):
            sends[stage] += traveller.forward_s[state], traveller.backward_s[state]
            if stage > stage_of[traveller.producer] and stage not in reading:
                relayed[stage] += traveller.num_bytes[state]
    stages = stage_costs(shape, bounds, layers, [(float(a), float(b)) for a, b in sends], problem.broadcast_s)
    if not actions:
        return stages
    peaks = _peak_bounds(shape, bounds, layers, relayed, actions)
    return tuple(replace(stage, peak_memory_bytes=peaks[group]) for stage, group in zip(stages, groups, strict=True))


def _peak_bounds(
    shape: Shape, bounds: Sequence[int], layers: CostColumns, relayed_bytes: Array, actions: ScheduleActions
) -> list[float]:
    """Per device group, the bytes that a search counts: more than the walk through the step (`autopar.step.memory`).

    They are what its layers hold all the time, what its microbatches in flight hold at most (with what a stage receives
    only to send it on), and the largest transients of a layer, as if all of these met.
    """
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    held = tuple(float(layers.saved_bytes[own].sum()) + float(r) for own, r in zip(spans, relayed_bytes, strict=True))
    peaks = list(peak_held(actions, held, held))
    for group in range(shape.num_groups):
        own = [span for span, owner in zip(spans, shape.groups, strict=True) if owner == group]
        peaks[group] += sum(float(layers.static_bytes[span].sum()) for span in own)
        peaks[group] += max(float(layers.transient_bytes[span].max()) for span in own)
    return peaks


def _best_at_prices(problem: StageProblem, table: StageTable, used: Indices, flights: Sequence[int]) -> set[int]:
    """Indices of the candidates on the lower hulls of seconds over bytes, between boundary states of those used."""
    pairs = {(int(table.state_in[row]), int(table.state_out[row])) for row in used}
    count = problem.num_microbatches
    seconds = count * (table.forward_s + table.backward_s) + table.step_s
    found: set[int] = set()
    for before, behind in pairs:
        rows = np.flatnonzero((table.state_in == before) & (table.state_out == behind))
        for flight in flights:
            size = table.static_bytes[rows] + flight * table.saved_bytes[rows]
            found.update(rows[_hull(size, seconds[rows])].tolist())
    return found


def _hull(size: Array, seconds: Array) -> list[int]:
    """Indices of the lower convex hull, from the smallest to the fastest."""
    hull: list[int] = []
    for index in np.lexsort((seconds, size)).tolist():
        if hull and seconds[index] >= seconds[hull[-1]]:
            continue
        while len(hull) > 1:
            first, last = hull[-2], hull[-1]
            before = (seconds[last] - seconds[first]) * (size[index] - size[first])
            if before < (seconds[index] - seconds[first]) * (size[last] - size[first]):
                break
            hull.pop()
        hull.append(index)
    return hull


def restrict(problem: StageProblem, paths: Indices, flights: Sequence[int]) -> tuple[StageProblem, tuple[Indices, ...]]:
    """The problem with its most useful candidates alone, and their old indices per layer.

    These are the ones that a path uses in a layer like it, and those between the same boundary states that are the
    best at some price of memory with so many microbatches in flight.
    """
    used: dict[int, set[int]] = {}
    tables_by_id = {id(table): table for table in problem.tables}
    for layer, table in enumerate(problem.tables):
        used.setdefault(id(table), set()).update(paths[:, layer].tolist())
    for key, table in tables_by_id.items():
        used[key] |= _best_at_prices(problem, table, np.array(sorted(used[key]), dtype=np.intp), flights)
    rows = {key: np.array(sorted(chosen), dtype=np.intp) for key, chosen in used.items()}
    tables = {id(table): table.take(rows[id(table)]) for table in problem.tables}
    kept = np.unique(np.concatenate([np.concatenate([t.state_in, t.state_out]) for t in tables.values()]))
    number = np.zeros(problem.num_states, dtype=np.intp)
    number[kept] = np.arange(len(kept))
    square = np.ix_(kept, kept)
    matrices: dict[int, Array] = {}

    def smaller(matrix: Array) -> Array:
        if id(matrix) not in matrices:
            matrices[id(matrix)] = matrix[square]
        return matrices[id(matrix)]

    def move(each: Move) -> Move:
        return Move(each.producer, each.reader, smaller(each.forward_s), smaller(each.backward_s))

    renumbered = {
        key: replace(t, state_in=number[t.state_in], state_out=number[t.state_out]) for key, t in tables.items()
    }
    found = StageProblem(
        problem.num_microbatches,
        len(kept),
        tuple(renumbered[id(table)] for table in problem.tables),
        tuple(None if each is None else move(each) for each in problem.moves),
        tuple(map(move, problem.skips)),
        tuple(
            Traveller(t.producer, t.readers, t.forward_s[kept], t.backward_s[kept], t.num_bytes[kept])
            for t in problem.travellers
        ),
        problem.ties,
        problem.broadcast_s,
        problem.limit_bytes,
    )
    return found, tuple(rows[id(table)] for table in problem.tables)
