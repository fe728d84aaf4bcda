"""The costs of all layers' candidates as arrays, for the algorithms that choose one candidate per layer.

Seconds are those of one microbatch, except `step_s`, which is spent once per step.  A *path* has the index of one
candidate for each layer.  What resharding between layers costs depends on the *boundary states* (mesh and policy) of
the candidates on both sides.  `path_stages` says what stages a path makes if it is cut into them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from autopar.schedules import Flight, Shape
from autopar.schedules.action_lists import ScheduleActions, StageCost, peak_in_flight
from autopar.search.chain.chain_dp import Chain, ChainLayer, Skip
from autopar.step.costs.stage_costs import CostColumns, stage_costs
from autopar.step.simulation.actions import lone_copies

__all__ = [
    "CostTables",
    "LayerCosts",
    "PipelineSend",
    "TiedParameter",
    "Transfer",
    "path_begins_s",
    "path_columns",
    "path_host_bytes",
    "path_stages",
    "useful_candidates",
]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class LayerCosts(CostColumns):
    """The candidates of one layer, one entry each; states index the boundary states.

    Where nothing computes while saved tensors leave for the host's memory, or come back from there, a forward takes
    `leave_s` more, a backward `return_s` (`lone_copies`).  `begin_s`, apart from `step_s`, is what a device group does
    before its first action, while it may wait for other groups anyway.  `host_bytes` is what a microbatch in flight has
    in the host's memory.
    """

    state_in: Indices
    state_out: Indices
    leave_s: Array
    return_s: Array
    begin_s: Array
    host_bytes: Array

    def take(self, rows: Indices) -> LayerCosts:
        """The candidates of these indices."""
        return LayerCosts(**{name: column[rows] for name, column in vars(self).items()})

    def total_s(self, num_microbatches: int) -> Array:
        """Seconds of a whole step."""
        return num_microbatches * (self.forward_s + self.backward_s) + self.step_s + self.begin_s

    def in_flight_bytes(self, flight: Flight) -> Array:
        """Bytes with so many microbatches between forward and backward."""
        return self.static_bytes + flight.in_flight * self.saved_bytes + flight.split * self.split_bytes


@dataclass(frozen=True, eq=False)
class Transfer:
    """Seconds to reshard what the layer `producer` makes for the layer `reader`, and its gradient back, by their
    states.
    """

    producer: int
    reader: int
    forward_s: Array
    backward_s: Array


@dataclass(frozen=True, eq=False)
class PipelineSend:
    """A value that is sent if stages are cut between the layer `producer` and one of `readers`: seconds, and the bytes
    that a device then holds of it, by the producer's state.
    """

    producer: int
    readers: tuple[int, ...]
    forward_s: Array
    backward_s: Array
    num_bytes: Array


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that the layers `readers` share: each device group with one of them stores it, steps it
    (`step_s`), and sends its gradient to each of the other such groups (`exchange_s` each).
    """

    readers: tuple[int, ...]
    static_bytes: float
    step_s: float
    exchange_s: float


@dataclass(frozen=True, eq=False)
class CostTables:
    """All layers for one number of device groups and of microbatches; layers and arrays may repeat.

    `transfers` has one entry or none (None) between each layer and the next; `skips` the others.  `split_gain` is the
    fraction of the second part of backwards (W) that a schedule which splits them runs while devices would wait.
    """

    num_microbatches: int
    num_states: int
    layers: tuple[LayerCosts, ...]
    transfers: tuple[Transfer | None, ...]
    skips: tuple[Transfer, ...] = ()
    sends: tuple[PipelineSend, ...] = ()
    tied: tuple[TiedParameter, ...] = ()
    broadcast_s: float = 0.0
    limit_bytes: float = np.inf
    host_limit_bytes: float = np.inf
    split_gain: float = 0.0

    def seconds(self, layer: LayerCosts) -> Array:
        """Seconds of a whole step, less those of W that fill the bubble."""
        return layer.total_s(self.num_microbatches) - self.split_gain * self.num_microbatches * layer.weight_s

    @property
    def distinct_layers(self) -> dict[int, LayerCosts]:
        """The layers by identity: most of a model's are one and the same."""
        return {id(layer): layer for layer in self.layers}

    @property
    def splits_backward(self) -> bool:
        """Whether any candidate's backward can be split."""
        return any(bool(layer.weight_s.any()) for layer in self.distinct_layers.values())

    @property
    def all_transfers(self) -> Iterator[Transfer]:
        """Those between neighbors, and the skips."""
        yield from (transfer for transfer in self.transfers if transfer is not None)
        yield from self.skips

    def transfers_at(self, start: int, stop: int) -> Iterator[Transfer]:
        """Those to the layer `start` from before it, and from the layer ``stop - 1`` to behind it."""
        neighbors = self.transfers[start - 1] if start else None, (*self.transfers, None)[stop - 1]
        yield from (transfer for transfer in neighbors if transfer is not None)
        for skip in self.skips:
            if skip.reader == start or (skip.producer == stop - 1 and skip.reader >= stop):
                yield skip

    def chain(self, flight: Flight) -> Chain:
        """All layers on one group, each with so many microbatches in flight; without the tied parameters."""
        count = self.num_microbatches
        layers = {
            key: ChainLayer(
                self.seconds(layer), layer.in_flight_bytes(flight), layer.transient_bytes,
                layer.state_in, layer.state_out,
            )
            for key, layer in self.distinct_layers.items()
        }  # fmt: skip
        nothing = np.zeros((self.num_states, self.num_states))
        known: dict[int, Array] = {}

        def seconds(transfer: Transfer | None) -> Array:
            if transfer is None:
                return nothing
            if id(transfer.forward_s) not in known:
                known[id(transfer.forward_s)] = count * (transfer.forward_s + transfer.backward_s)
            return known[id(transfer.forward_s)]

        return Chain(
            self.num_states,
            tuple(layers[id(layer)] for layer in self.layers),
            tuple(map(seconds, self.transfers)),
            tuple(Skip(skip.producer, skip.reader, seconds(skip)) for skip in self.skips),
        )

    def keep(self, rows: dict[int, Indices]) -> CostTables:
        """These candidates alone, by the id of their layer's costs; boundary states are numbered anew."""
        layers = {key: layer.take(rows[key]) for key, layer in self.distinct_layers.items()}
        kept = np.unique(np.concatenate([np.concatenate([each.state_in, each.state_out]) for each in layers.values()]))
        number = np.zeros(self.num_states, dtype=np.intp)
        number[kept] = np.arange(len(kept))
        layers = {
            key: replace(each, state_in=number[each.state_in], state_out=number[each.state_out])
            for key, each in layers.items()
        }
        square = np.ix_(kept, kept)
        matrices: dict[int, Array] = {}

        def smaller(matrix: Array) -> Array:
            return matrices.setdefault(id(matrix), matrix[square])

        def transfer(each: Transfer) -> Transfer:
            return replace(each, forward_s=smaller(each.forward_s), backward_s=smaller(each.backward_s))

        return replace(
            self,
            num_states=len(kept),
            layers=tuple(layers[id(layer)] for layer in self.layers),
            transfers=tuple(None if each is None else transfer(each) for each in self.transfers),
            skips=tuple(map(transfer, self.skips)),
            sends=tuple(
                replace(s, forward_s=s.forward_s[kept], backward_s=s.backward_s[kept], num_bytes=s.num_bytes[kept])
                for s in self.sends
            ),
        )


def path_stages(
    tables: CostTables, shape: Shape, bounds: Sequence[int], path: Sequence[int], actions: ScheduleActions = ()
) -> tuple[StageCost, ...]:
    """The stages that this path makes if it is cut at `bounds` (first layers, then the number of layers).

    What is done once per step includes what a group begins with (`path_begins_s`).  Without the schedule's actions
    their peak bytes are not predicted.
    """
    layers, groups = path_columns(tables, path), shape.groups
    for stop, (leaving, coming) in zip(bounds[1:], lone_copies(actions, shape.num_stages), strict=True):
        layers.forward_s[stop - 1] += leaving * tables.layers[stop - 1].leave_s[path[stop - 1]]
        layers.backward_s[stop - 1] += coming * tables.layers[stop - 1].return_s[path[stop - 1]]
        # It is fetched while the last layer of another stage of the group runs, which is on the device as well then.
        layers.transient_bytes[stop - 1] += tables.layers[stop - 1].host_bytes[path[stop - 1]]
    stage_of = np.searchsorted(np.array(bounds), np.arange(len(path)), side="right") - 1
    for tied in tables.tied:
        first: dict[int, int] = {}
        for reader in tied.readers:
            first.setdefault(groups[int(stage_of[reader])], reader)
        for reader in first.values():
            layers.static_bytes[reader] += tied.static_bytes
            layers.step_s[reader] += tied.step_s + (len(first) - 1) * tied.exchange_s
    sends_s = np.zeros((shape.num_stages, 2))
    relayed_bytes = np.zeros(shape.num_stages)
    for send in tables.sends:
        state = int(tables.layers[send.producer].state_out[path[send.producer]])
        reading = {int(stage_of[reader]) for reader in send.readers}
        for stage in range(int(stage_of[send.producer]), max(reading)):
            sends_s[stage] += send.forward_s[state], send.backward_s[state]
            if stage > stage_of[send.producer] and stage not in reading:
                relayed_bytes[stage] += send.num_bytes[state]
    pairs = [(float(ahead), float(back)) for ahead, back in sends_s]
    stages = stage_costs(shape, bounds, layers, pairs, tables.broadcast_s)
    if not actions:
        return stages
    peaks = _peak_bounds(shape, bounds, layers, relayed_bytes, actions)
    return tuple(replace(stage, peak_memory_bytes=peaks[group]) for stage, group in zip(stages, groups, strict=True))


def path_begins_s(tables: CostTables, shape: Shape, bounds: Sequence[int], path: Sequence[int]) -> list[float]:
    """For each device group, what it does before its first action, on this path cut at `bounds`."""
    begin_s = np.array([float(layer.begin_s[row]) for layer, row in zip(tables.layers, path, strict=True)])
    of_stages = np.add.reduceat(begin_s, bounds[:-1])
    return np.bincount(shape.groups, of_stages, shape.num_groups).tolist()


def path_host_bytes(
    tables: CostTables, shape: Shape, bounds: Sequence[int], path: Sequence[int], actions: ScheduleActions
) -> float:
    """What the activations of a device take in the host's memory at most, of the group that offloads most."""
    size = np.array([float(layer.host_bytes[row]) for layer, row in zip(tables.layers, path, strict=True)])
    if not size.any():
        return 0.0
    of_stages = tuple(float(size[start:stop].sum()) for start, stop in itertools.pairwise(bounds))
    return max(peak_in_flight(actions, of_stages, of_stages))


def path_columns(tables: CostTables, path: Sequence[int]) -> CostColumns:
    """What each layer takes on this path, transfers to it included, tied parameters not; what a device group begins
    with counts as done once per step.
    """
    chosen = list(zip(tables.layers, path, strict=True))
    columns = {
        each.name: np.array([float(getattr(layer, each.name)[row]) for layer, row in chosen])
        for each in fields(CostColumns)
    }
    columns["step_s"] += np.array([float(layer.begin_s[row]) for layer, row in chosen])
    for transfer in tables.all_transfers:
        source = chosen[transfer.producer][0].state_out[path[transfer.producer]]
        target = chosen[transfer.reader][0].state_in[path[transfer.reader]]
        columns["forward_s"][transfer.reader] += transfer.forward_s[source, target]
        columns["backward_s"][transfer.reader] += transfer.backward_s[source, target]
    return CostColumns(**columns)


def _peak_bounds(
    shape: Shape, bounds: Sequence[int], layers: CostColumns, relayed_bytes: Array, actions: ScheduleActions
) -> list[float]:
    """Per device group, the bytes that a search counts: more than the walk through the step (`simulation.step_memory`).

    They are what its layers hold all the time, what its microbatches in flight hold at most (with what a stage receives
    only to send it on), and the largest transients of a layer, as if all of these met.
    """
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    saved = tuple(float(layers.saved_bytes[own].sum()) + float(r) for own, r in zip(spans, relayed_bytes, strict=True))
    until_weights = tuple(h + float(layers.split_bytes[own].sum()) for own, h in zip(spans, saved, strict=True))
    peaks = list(peak_in_flight(actions, saved, until_weights))
    for group in range(shape.num_groups):
        own = [span for span, owner in zip(spans, shape.groups, strict=True) if owner == group]
        peaks[group] += sum(float(layers.static_bytes[span].sum()) for span in own)
        peaks[group] += max(float(layers.transient_bytes[span].max()) for span in own)
    return peaks


def useful_candidates(
    tables: CostTables,
    paths: Indices,
    flights: Sequence[Flight],
    split_gains: Sequence[float] = (0.0,),
    *,
    is_host_short: bool = False,
) -> tuple[CostTables, tuple[Indices, ...]]:
    """The tables of the most useful candidates alone, and their old indices per layer.

    These are the ones that a path uses in a layer like it, and those between the same boundary states that are the
    best at some price of memory with so many microbatches in flight, where splitting backwards gains so much; if
    `is_host_short`, also the best of those that offload nothing.
    """
    used: dict[int, set[int]] = {}
    for layer, costs in enumerate(tables.layers):
        used.setdefault(id(costs), set()).update(paths[:, layer].tolist())
    for costs in tables.distinct_layers.values():
        own = used[id(costs)]
        for gain in split_gains:
            seconds = replace(tables, split_gain=gain).seconds(costs)
            used_rows = np.array(sorted(own), dtype=np.intp)
            own |= _best_at_prices(costs, seconds, used_rows, flights)
            if is_host_short:
                own |= _best_at_prices(costs, np.where(costs.host_bytes > 0, np.inf, seconds), used_rows, flights)
    rows = {key: np.array(sorted(chosen), dtype=np.intp) for key, chosen in used.items()}
    return tables.keep(rows), tuple(rows[id(costs)] for costs in tables.layers)


def _best_at_prices(costs: LayerCosts, seconds: Array, used: Indices, flights: Sequence[Flight]) -> set[int]:
    """Indices of the candidates on the lower hulls of seconds over bytes, between boundary states of those used."""
    pairs = {(int(costs.state_in[row]), int(costs.state_out[row])) for row in used}
    best: set[int] = set()
    for before, behind in pairs:
        rows = np.flatnonzero((costs.state_in == before) & (costs.state_out == behind))
        for flight in flights:
            best.update(rows[_lower_hull(costs.in_flight_bytes(flight)[rows], seconds[rows])].tolist())
    return best


def _lower_hull(size: Array, seconds: Array) -> list[int]:
    """Indices of the lower convex hull, from the smallest to the fastest."""
    hull: list[int] = []
    for index in np.lexsort((seconds, size)).tolist():
        if seconds[index] >= (seconds[hull[-1]] if hull else np.inf):
            continue
        while len(hull) > 1:
            first, last = hull[-2], hull[-1]
            before = (seconds[last] - seconds[first]) * (size[index] - size[first])
            if before < (seconds[index] - seconds[first]) * (size[last] - size[first]):
                break
            hull.pop()
        hull.append(index)
    return hull
