"""The candidates of every layer once it is known where to cut: a chain of the stages of each device group.

The stages of one group share its memory, so their layers make one chain, each with its stage's microbatches in flight.
Stages do not hold the most microbatches at the same time, so each is counted with the share of its most that makes the
group's total right if all are equal, and the sum is checked with the schedule's own list.  Transfers between stages of
different groups are priced by the neighbors' states on a guiding path.  How much the seconds of each stage count is the
caller's choice (`StageWeights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.schedules import Flight
from autopar.schedules.action_lists import Action, ScheduleActions, peak_in_flight
from autopar.search.chain.chain_dp import Chain, ChainLayer, path_costs
from autopar.search.chain.cost_tables import CostTables, LayerCosts, PipelineSend, Transfer
from autopar.search.chain.lagrangian import fastest_path, smallest_path
from autopar.search.chain.limited_paths import limited_path
from autopar.search.pipeline.schedule_estimates import held_shares
from autopar.search.pipeline.stage_cuts import PipelineCuts
from autopar.search.pipeline.stage_weights import StageWeights
from autopar.step.simulation.actions import lone_copies

__all__ = ["GroupSolver"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_ROUNDS = 2  # in which groups adapt to their neighbors: a group sees only those next to it; each round solves all

_DEAREST = 1e3  # the highest price of all of a host's memory, relative to the seconds of all layers
_HOST_PRICES = 10  # bisections: of a price between 1e-3 and 1e3 they leave 1 %
_TILT = 1.3  # of the price from the first layer to the last: equal layers would offload all or nothing

Stages = tuple[tuple[int, int, Flight], ...]  # as `PipelineCuts.stages_of`


@dataclass(frozen=True, eq=False)
class _Group:
    """A device group: its stages, how many of their copies to the host's memory, and back, overlap with nothing, its
    memory, and how much its seconds count.
    """

    numbers: tuple[int, ...]  # of the stages
    stages: Stages
    lone: tuple[tuple[float, float], ...]
    limit_bytes: float
    weights: StageWeights
    stage_of: Indices  # of each layer of the pipeline
    actions: tuple[Action, ...]
    held_share: float  # as of `held_shares`

    @property
    def layers(self) -> list[int]:
        """Of all stages."""
        return [layer for start, stop, _ in self.stages for layer in range(start, stop)]

    def most_held(self, saved: Sequence[float], split: Sequence[float]) -> float:
        """The most that it keeps of microbatches in flight, if one of each layer keeps so much, and so much more
        between the parts of its backward.
        """
        by_stage = np.zeros((2, len(self.weights.once)))
        for layer, *sizes in zip(self.layers, saved, split, strict=True):
            by_stage[:, self.stage_of[layer]] += sizes
        saved_bytes, split_bytes = by_stage.tolist()
        until_weights = tuple(map(sum, zip(saved_bytes, split_bytes, strict=True)))
        return peak_in_flight((self.actions,), tuple(saved_bytes), until_weights)[0]


@dataclass(eq=False)
class GroupSolver:
    """Solves the device groups; what was solved before is known."""

    tables: CostTables
    known: dict[tuple[object, ...], tuple[tuple[int, ...], float]] = field(
        default_factory=dict[tuple[object, ...], "tuple[tuple[int, ...], float]"]
    )
    layers: dict[tuple[object, ...], ChainLayer] = field(default_factory=dict[tuple[object, ...], ChainLayer])
    moves: dict[tuple[object, ...], Array] = field(default_factory=dict[tuple[object, ...], Array])

    def solve(
        self,
        cuts: PipelineCuts,
        guide: Sequence[int],
        actions: ScheduleActions,
        weights: StageWeights | None = None,
        limits_bytes: Mapping[int, float] | None = None,
        *,
        counts_together: bool = True,
    ) -> tuple[int, ...]:
        """The candidate of every layer; where nothing fits, those that take the least memory.

        Without `weights`, those of `StageWeights.equal`.  The limits are those of groups that have another one than the
        tables'.  Unless `counts_together`, all stages of a group are taken to hold their most at the same time.
        """
        path, owner = tuple(guide), cuts.shape.groups
        alone = lone_copies(actions, cuts.shape.num_stages)
        stage_of = np.searchsorted(cuts.bounds, np.arange(len(path)), side="right") - 1
        weights = weights or StageWeights.equal(self.tables, cuts.shape)
        shares = held_shares(cuts.shape, actions) if counts_together else (1.0,) * cuts.shape.num_groups
        groups: list[_Group] = []
        for group in range(cuts.shape.num_groups):
            numbers = tuple(stage for stage, own in enumerate(owner) if own == group)
            lone = tuple(alone[stage] for stage in numbers)
            limit_bytes = (limits_bytes or {}).get(group, self.tables.limit_bytes)
            groups.append(
                _Group(
                    numbers, cuts.stages_of(group), lone, limit_bytes, weights, stage_of, actions[group],
                    shares[group],
                )
            )  # fmt: skip
        for _ in range(_ROUNDS):
            solved = list(path)
            for group in groups:
                for layer, candidate in zip(group.layers, self._solve_group(group, path), strict=True):
                    solved[layer] = candidate
            if tuple(solved) == path:
                break
            path = tuple(solved)
        return path

    def _solve_group(self, group: _Group, path: tuple[int, ...]) -> tuple[int, ...]:
        if all(len(self.tables.layers[layer].state_in) == 1 for layer in group.layers):
            return (0,) * len(group.layers)
        chosen, _ = self._solve_within(group, path, group.limit_bytes, group.held_share)
        excess_bytes = self._excess_bytes(group, path, chosen)
        if excess_bytes <= 0 or group.held_share == 1:
            return chosen
        # Unequal stages: with less for all, or as if all held their most at the same time.
        smaller, smaller_s = self._solve_within(group, path, group.limit_bytes - excess_bytes, group.held_share)
        apart, apart_s = self._solve_within(group, path, group.limit_bytes, 1.0)
        is_fitting = self._excess_bytes(group, path, smaller) <= 0
        if is_fitting and self._excess_bytes(group, path, apart) > 0:
            return smaller
        return smaller if is_fitting and smaller_s < apart_s else apart

    def _excess_bytes(self, group: _Group, path: tuple[int, ...], chosen: tuple[int, ...]) -> float:
        """By how much these candidates of a group are above its limit, as far as that is known; 0 if they are not."""
        layers = [self.tables.layers[layer] for layer in group.layers]
        rows = list(zip(layers, chosen, strict=True))
        always = self._fixed_bytes(group.stages, path) + sum(float(layer.static_bytes[row]) for layer, row in rows)
        lasts = {stop - 1 for _, stop, _ in group.stages}  # what they offload is fetched while others run
        always += max(
            float(layer.transient_bytes[row] + (number in lasts) * layer.host_bytes[row])
            for number, (layer, row) in zip(group.layers, rows, strict=True)
        )
        saved, split = (
            [float(getattr(layer, name)[row]) for layer, row in rows] for name in ("saved_bytes", "split_bytes")
        )
        return max(0.0, always + group.most_held(saved, split) - group.limit_bytes)

    def _solve_within(
        self, group: _Group, path: tuple[int, ...], limit_bytes: float, held_share: float
    ) -> tuple[tuple[int, ...], float]:
        """The candidates of a group within a limit, if such a share of its microbatches is in flight at once, and their
        seconds.
        """
        stages = group.stages
        around = [self._end_costs(path, group, number) for number in range(len(stages))]
        fixed_bytes = self._fixed_bytes(stages, path)
        key = (
            fixed_bytes,
            limit_bytes,
            held_share,
            group.lone,
            *map(group.weights.of, group.numbers),
            *((flight, *(id(self.tables.layers[layer]) for layer in range(start, stop)))
              for start, stop, flight in stages),
            *(end.tobytes() for ends in around for end in ends),
        )  # fmt: skip
        if key not in self.known:
            chain = self._chain(group, around, fixed_bytes, held_share)
            chosen = self._solve_on_host(group, chain, limit_bytes, held_share)
            self.known[key] = chosen, float(path_costs(chain, np.array([chosen]))[0, 0])
        return self.known[key]

    def _solve_on_host(self, group: _Group, chain: Chain, device_bytes: float, held_share: float) -> tuple[int, ...]:
        """The candidates of one group; if they offload more than the host has room for, those at the least price of
        its memory, in seconds per byte, at which they don't.
        """
        costs = [(self.tables.layers[layer], held_share * flight.in_flight) for start, stop, flight in group.stages
                 for layer in range(start, stop)]  # fmt: skip
        limit_bytes = self.tables.host_limit_bytes

        def fits(path: tuple[int, ...]) -> bool:
            sizes = [float(layer.host_bytes[row]) for (layer, _), row in zip(costs, path, strict=True)]
            if sum(count * size for (_, count), size in zip(costs, sizes, strict=True)) <= held_share * limit_bytes:
                return True  # even if all hold their most at the same time
            return group.most_held(sizes, [0.0] * len(sizes)) <= limit_bytes

        best = self._solve_chain(chain, device_bytes)
        if fits(best):
            return best
        whole_s = sum(float(layer.time_s[row]) for layer, row in zip(chain.layers, best, strict=True))
        dearest = _with_host_price(chain, costs, _DEAREST * whole_s / max(limit_bytes, 1.0))
        best = self._solve_chain(dearest, device_bytes)
        low, high = 1 / _DEAREST, _DEAREST  # of a host's memory, relative to all seconds
        for _ in range(_HOST_PRICES if fits(best) else 0):
            middle = (low * high) ** 0.5
            priced = _with_host_price(chain, costs, middle * whole_s / max(limit_bytes, 1.0))
            path = self._solve_chain(priced, device_bytes)
            if fits(path):
                best, high = path, middle
            else:
                low = middle
        return best

    def _solve_chain(self, chain: Chain, limit_bytes: float) -> tuple[int, ...]:
        path, peak_bytes = fastest_path(chain)
        if peak_bytes > limit_bytes:
            limited = limited_path(chain, limit_bytes)
            path = smallest_path(chain) if limited is None else limited
        return tuple(path.tolist())

    def _chain(self, group: _Group, around: list[tuple[Array, Array]], fixed_bytes: float, held_share: float) -> Chain:
        """The layers of one group; nothing moves from one of its stages to the next."""
        tables, layers, moves = self.tables, list[ChainLayer](), list[Array]()
        nothing = np.zeros((tables.num_states, tables.num_states))
        stages = zip(group.stages, group.numbers, group.lone, around, strict=True)
        for (start, stop, flight), stage, (leaving, coming), (before, behind) in stages:
            weights = group.weights.of(stage)
            own = [self._layer(layer, flight, held_share, weights) for layer in tables.layers[start:stop]]
            own[0] = replace(own[0], time_s=own[0].time_s + before[own[0].state_in])
            last = tables.layers[stop - 1]
            alone_s = weights[0] * leaving * last.leave_s + weights[1] * coming * last.return_s
            # What the last layer offloads is fetched while another stage's last layer runs.
            own[-1] = replace(
                own[-1],
                time_s=own[-1].time_s + behind[own[-1].state_out] + alone_s,
                transient_bytes=own[-1].transient_bytes + last.host_bytes,
            )
            between = (self._move(transfer, weights) for transfer in tables.transfers[start : stop - 1])
            moves += [*([nothing] if layers else []), *(nothing if each is None else each for each in between)]
            layers += own
        return Chain(tables.num_states, tuple(layers), tuple(moves), fixed_bytes=fixed_bytes)

    def _layer(self, costs: LayerCosts, flight: Flight, held_share: float, weights: tuple[float, ...]) -> ChainLayer:
        """A layer of a stage with such a share of so many microbatches in flight."""
        key = id(costs), flight, held_share, weights
        if key not in self.layers:
            forward, backward, second, begin, once = weights
            time_s = forward * costs.forward_s + backward * costs.backward_s + second * costs.weight_s
            time_s += begin * costs.begin_s + once * costs.step_s
            held_bytes = costs.static_bytes + held_share * (costs.in_flight_bytes(flight) - costs.static_bytes)
            self.layers[key] = ChainLayer(
                time_s, held_bytes, costs.transient_bytes, costs.state_in, costs.state_out
            )  # fmt: skip
        return self.layers[key]

    def _move(self, transfer: Transfer | None, weights: tuple[float, ...]) -> Array | None:
        """Seconds of a transfer inside of a stage, or to it."""
        if transfer is None:
            return None
        key = id(transfer.forward_s), *weights[:2]
        if key not in self.moves:
            self.moves[key] = weights[0] * transfer.forward_s + weights[1] * transfer.backward_s
        return self.moves[key]

    def _end_costs(self, path: tuple[int, ...], group: _Group, number: int) -> tuple[Array, Array]:
        """Seconds of a step by the state before a stage of this group, and behind it, if all other layers stay on the
        path.
        """
        tables, stage, (start, stop, _) = self.tables, group.numbers[number], group.stages[number]
        before, behind = np.zeros((2, tables.num_states))
        for transfer in tables.transfers_at(start, stop):
            # The reader's stage moves it.
            seconds = self._move(transfer, group.weights.of(int(group.stage_of[transfer.reader])))
            assert seconds is not None
            if transfer.reader == start and transfer.producer < start:
                before += seconds[tables.layers[transfer.producer].state_out[path[transfer.producer]]]
            elif transfer.producer == stop - 1 and transfer.reader >= stop:
                behind += seconds[:, tables.layers[transfer.reader].state_in[path[transfer.reader]]]
        for send in self._sends_of.get(stop - 1, ()):
            if max(send.readers) >= stop:
                ahead, back = group.weights.sends(stage)
                behind += ahead * send.forward_s + back * send.backward_s
        return before, behind

    @cached_property
    def _sends_of(self) -> dict[int, list[PipelineSend]]:
        """What is sent, by the layer that makes it."""
        by_producer: dict[int, list[PipelineSend]] = {}
        for send in self.tables.sends:
            by_producer.setdefault(send.producer, []).append(send)
        return by_producer

    @cached_property
    def _passed_on(self) -> tuple[PipelineSend, ...]:
        """What a stage between its producer and a reader may have to hold: not what only the next layer reads."""
        return tuple(send for send in self.tables.sends if max(send.readers) > send.producer + 1)

    def _fixed_bytes(self, stages: Stages, path: tuple[int, ...]) -> float:
        """Shared parameters that these stages read, and what they only pass on."""
        size = 0.0
        for tied in self.tables.tied:
            size += tied.static_bytes * any(start <= r < stop for start, stop, _ in stages for r in tied.readers)
        for send in self._passed_on:
            state = self.tables.layers[send.producer].state_out[path[send.producer]]
            for start, stop, flight in stages:
                reads = any(start <= reader < stop for reader in send.readers)
                if send.producer < start and not reads and max(send.readers) >= stop:
                    size += flight.in_flight * float(send.num_bytes[state])
        return size


def _with_host_price(chain: Chain, costs: Sequence[tuple[LayerCosts, float]], price_s_per_byte: float) -> Chain:
    """The chain with seconds for what each candidate offloads, with so many microbatches in flight."""
    prices = price_s_per_byte * np.linspace(1, _TILT, len(costs))
    triples = zip(chain.layers, costs, prices.tolist(), strict=True)
    layers = (
        replace(layer, time_s=layer.time_s + price * count * own.host_bytes) for layer, (own, count), price in triples
    )
    return replace(chain, layers=tuple(layers))
