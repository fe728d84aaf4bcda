"""A lower bound on the step of all pipelines of a shape that fit, wherever they are cut and whatever they run.

A step takes at least as long as every chain of actions that wait for each other (`autopar.schedules.critical_paths`),
and what a device group holds at any moment is within the limit.  With shares ``a`` of the chains (they sum to 1) and
seconds ``m`` for the whole memory of each group, no pipeline that fits takes less than::

    sum over chains   a * seconds of the chain   +   sum over groups   m * (bytes held / limit - 1)

Each layer adds to this what depends on its candidate and its stage, and on the boundary state that it shares with its
neighbor, so dynamic programming over the layers finds the least value over all cuts and candidates exactly.  Shares
and seconds are improved (`bound_multipliers`) until the value is as large as is asked for, or for a few steps.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.schedules import Shape
from autopar.schedules.action_lists import COSTS, ScheduleActions
from autopar.schedules.critical_paths import moments, schedule_paths
from autopar.schedules.packing import Packing
from autopar.search.chain.cost_tables import CostTables, LayerCosts
from autopar.search.pipeline.bound_multipliers import MultiplierSearch
from autopar.search.pipeline.pipeline_bounds import least_within_s

__all__ = ["relaxed_bounds", "takes_longer"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Other multipliers that are tried: a hundred more raised 6.303 s of a 405B model on 16,384 devices to 6.315 s, and each
# takes 10 to 30 ms for a hundred layers.
_STEPS = 40
_MOST_IDLE = 16  # of them in a row that gain nothing: the first gain came after up to 12
# What is hoped for of a bound, relative to what is enough: steps come near it ever more slowly.
_AIM = 1.05
_HOPELESS = 0.93  # of what is enough: bounds that began lower never got there
_USUAL_PRICES = (0.0, *(10.0**power for power in range(-3, 4)))  # of a layer's bytes, relative to its seconds
_NEARLY = 1e-3  # a gain of less is no sign of a price that is far too low
_LITTLE = 1e-3  # of a limit is left, at least, for the most frequent layers
_F, _B, _I, _W, _SEND_F, _SEND_B = (COSTS[kind] for kind in ("F", "B", "I", "W", "SEND_F", "SEND_B"))


def takes_longer(
    tables: CostTables, shape: Shape, actions: ScheduleActions, seconds: float, cuts: Sequence[int] = ()
) -> bool:
    """Whether every pipeline that fits is known to take so many seconds; arguments as of `relaxed_bounds`."""
    bound_s = 0.0
    for bound_s in relaxed_bounds(tables, shape, actions, _AIM * seconds, cuts):
        if bound_s >= seconds or bound_s < _HOPELESS * seconds:
            break
    return bound_s >= seconds


def relaxed_bounds(
    tables: CostTables, shape: Shape, actions: ScheduleActions, enough_s: float, cuts: Sequence[int] = ()
) -> Iterator[float]:
    """Ever more seconds than which no pipeline that fits is faster, until a few steps gain no more or it is `enough_s`.

    Args:
        tables: all candidates, and the limit.
        shape: the schedule.
        actions: its lists.
        enough_s: no more is needed of the bound than this many seconds.
        cuts: the first layers of the stages but the first, if they are demanded.
    """
    if shape.num_stages > len(tables.layers):
        yield math.inf
        return
    best_s, most_layers = least_within_s(tables, shape), _most_layers(tables, shape, enough_s)
    if best_s >= enough_s:
        yield best_s
        return
    for is_thorough in (False, True):
        problem = _Problem.of(tables, shape, actions, most_layers, cuts, is_thorough=is_thorough)
        search = MultiplierSearch(problem.value, tables.broadcast_s, enough_s)
        first_s = math.inf
        for first_s in _first_bounds(problem, search):
            best_s = max(best_s, first_s)
            yield best_s
        for bound_s in _stepwise_bounds(search):
            best_s = max(best_s, bound_s)
            yield best_s
        # Where steps gain, it is not chains that are missing.
        if not search.is_open or search.best_s > first_s * (1 + _NEARLY):
            return


def _first_bounds(problem: _Problem, search: MultiplierSearch) -> Iterator[float]:
    """Ever larger bounds, by multipliers that are the best for layers like the most frequent one, or nearly so."""
    search.improves(problem.first(search.possible_s))
    # Where all layers are not like one, prices of memory by that one may be far too high.
    if search.is_open and math.isfinite(problem.tables.limit_bytes):
        search.improves(problem.first(search.possible_s, limited=False))
    yield search.best_s
    # Shares for about the seconds that can be had.
    if search.is_open and search.improves(problem.first(search.best_s)):
        yield search.best_s
    while search.is_open and search.best[1].any():  # memory is worth more: far more, where next to nothing fits
        before_s = search.best_s
        search.improves((search.best[0], 2 * search.best[1]))
        if search.best_s <= before_s * (1 + _NEARLY):
            break
        yield search.best_s


def _stepwise_bounds(search: MultiplierSearch) -> Iterator[float]:
    """Ever larger bounds, by multipliers that are sought step by step."""
    idle = 0
    for _ in range(_STEPS):
        if not search.is_open or idle == _MOST_IDLE:
            return
        idle = 0 if search.improves(search.next()) else idle + 1
        if not idle:
            yield search.best_s


def _most_layers(tables: CostTables, shape: Shape, enough_s: float) -> int:
    """The most layers of a device group: one with more computes for at least `enough_s`, so it needs no bound."""
    count = tables.num_microbatches
    least = np.sort([float(layer.total_s(count).min()) for layer in tables.layers])
    most = int(np.searchsorted(np.cumsum(least), enough_s))
    rounds = shape.num_stages // shape.num_groups
    return max(1, min(most, len(least) - shape.num_stages + rounds))  # other stages have one layer at least


@dataclass(frozen=True, eq=False)
class _Class:
    """What equal layers cost by stage: candidates in the order of their ways through the layer.

    `transient_shares` has by stage which part of the layer's transients counts: the largest of a group is at least
    any mean of its layers'.
    """

    costs: LayerCosts
    transient_shares: Array
    ways: Indices  # the distinct ones, state before * states + state behind
    starts: Indices  # of each way's candidates
    order: Indices


@dataclass(eq=False)
class _Problem:
    """One shape's relaxation; `counts` has the chains, ``[chain, stage, cost]``."""

    tables: CostTables
    shape: Shape
    counts: Array
    chain_group: Indices
    chain_begins: Indices  # the group on which a chain begins
    in_flight: Array  # [moment, stage, 2]: microbatches in flight, and between the parts of a backward, of one group
    is_of_group: npt.NDArray[np.bool_]  # [moment, stage]: of this group
    most_layers: int
    cuts: tuple[int, ...]
    owner: Indices  # [stage]
    classes: dict[int, _Class] = field(default_factory=dict[int, _Class])
    tied_bytes: Array = field(default_factory=lambda: np.zeros(0))
    tied_s: Array = field(default_factory=lambda: np.zeros(0))
    # By reader, ``[forward or backward, state]``: the least that it takes to bring what skips layers.
    skipped: dict[int, Array] = field(default_factory=dict[int, Array])
    programs: dict[bool, Packing] = field(default_factory=dict[bool, Packing])  # of `first`, with and without a limit

    @classmethod
    def of(
        cls,
        tables: CostTables,
        shape: Shape,
        actions: ScheduleActions,
        most_layers: int,
        cuts: Sequence[int],
        *,
        is_thorough: bool = False,
    ) -> _Problem:
        splits = tables.splits_backward
        chains = schedule_paths(actions, shape.num_stages, splits=splits, is_thorough=is_thorough)
        owner, in_flight = np.array(shape.groups, dtype=np.intp), moments(actions, shape.num_stages)
        groups = owner[in_flight.sum(axis=2).argmax(axis=1)]
        problem = cls(
            tables,
            shape,
            chains.counts,
            chains.group,
            chains.begins,
            in_flight,
            owner == groups[:, None],
            most_layers,
            tuple(cuts),
            owner,
        )
        shares = problem.transient_shares()
        for layer in tables.layers:
            if id(layer) not in problem.classes:
                ways = layer.state_in * tables.num_states + layer.state_out
                order = np.argsort(ways, kind="stable")
                distinct, starts = np.unique(ways[order], return_index=True)
                problem.classes[id(layer)] = _Class(layer, shares[id(layer)], distinct, starts, order)
        # A tied parameter is with its first reader, wherever the others are.
        problem.tied_bytes, problem.tied_s = np.zeros((2, len(tables.layers)))
        for tied in tables.tied:
            problem.tied_bytes[min(tied.readers)] += tied.static_bytes
            problem.tied_s[min(tied.readers)] += tied.step_s
        for skip in tables.skips:
            states = np.unique(tables.layers[skip.producer].state_out)
            least_s = np.stack([each[states].min(axis=0) for each in (skip.forward_s, skip.backward_s)])
            problem.skipped[skip.reader] = problem.skipped.get(skip.reader, 0.0) + least_s
        return problem

    def transient_shares(self) -> dict[int, Array]:
        """By the id of a layer's costs, `_Class.transient_shares`: on the groups that have the first and the last layer
        all of the larger one of these, if it is larger than that of others (logits are), else the mean of all layers.
        """
        layers, owner = self.tables.layers, self.owner
        times = Counter(map(id, layers))
        least = {id(layer): float(layer.transient_bytes.min()) for layer in layers}
        shares = {key: np.full(len(owner), 1 / self.most_layers) for key in least}
        usual_bytes = least[id(self._most_frequent())]
        for group in {int(owner[0]), int(owner[-1])}:
            ends = [layers[end] for end in (0, -1) if owner[end] == group and times[id(layers[end])] == 1]
            largest = max(ends, key=lambda layer: least[id(layer)], default=None)
            if largest is not None and least[id(largest)] > usual_bytes:
                for key, share in shares.items():
                    share[owner == group] = key == id(largest)
        return shares

    def of_stages(self, shares: Array, groups: Indices) -> Array:
        """By stage, the shares of the chains whose group is that of the stage; `groups` has one for each chain."""
        return np.bincount(groups, shares, self.shape.num_groups).astype(np.float64)[self.owner]

    def first(self, step_s: float, *, limited: bool = True) -> tuple[Array, Array]:
        """Shares and seconds for memory that are the best if all layers are like the most frequent one, or without a
        limit of memory.

        How many of its candidates can be run in so many seconds, by stage, is a linear program; what each limit is
        worth is what is sought.
        """
        tables, ends = self.tables, self.owner[[0, -1]]
        seconds, once_s, static, transient, saved, split = self._usual_layers()
        chain_s = np.einsum("psk,ck->psc", self.counts, seconds)
        chain_s += (self.owner[None, :] == self.chain_group[:, None])[:, :, None] * once_s
        takes = chain_s.reshape(len(chain_s), -1)
        fixed_s, fixed_once_s, fixed_bytes = self._fixed_layers()
        limits = step_s - tables.broadcast_s - np.einsum("psk,sk->p", self.counts[:, [0, -1]], fixed_s)
        limits -= (self.chain_group[:, None] == ends) @ fixed_once_s
        if limited and math.isfinite(tables.limit_bytes):
            shares = self.classes[id(self._most_frequent())].transient_shares
            group_bytes = (
                static
                + shares[:, None] * transient
                + self.in_flight[:, :, :1] * saved
                + self.in_flight[:, :, 1:] * split
            )
            own = np.where(self.is_of_group[:, :, None], group_bytes, 0.0)
            takes = np.concatenate([takes, own.reshape(len(own), -1)])
            left = tables.limit_bytes - self.is_of_group[:, [0, -1]] @ fixed_bytes
            limits = np.concatenate([limits, np.maximum(left, _LITTLE * tables.limit_bytes)])
        limits[: len(chain_s)] = np.maximum(limits[: len(chain_s)], _LITTLE * step_s)
        if limited not in self.programs:
            self.programs[limited] = Packing(takes, limits)
        program = self.programs[limited]
        program.change_limits(limits)
        gains = program.solve()[1]
        chains, memory = gains[: len(chain_s)], gains[len(chain_s) :]
        if not chains.sum() > 0:
            return np.full(len(chains), 1 / len(chains)), np.zeros(len(self.in_flight))
        memory_s = memory * tables.limit_bytes / chains.sum() if len(memory) else np.zeros(len(self.in_flight))
        return chains / chains.sum(), memory_s

    def _most_frequent(self) -> LayerCosts:
        return Counter(self.tables.layers).most_common(1)[0][0]

    def _usual_layers(self) -> tuple[Array, Array, Array, Array, Array, Array]:
        """Of the most frequent layer the candidates that are the best at some price of memory: ``[candidate, cost]``,
        seconds once per step, static, transient, saved, split bytes.  What moves from such a layer to one like it is
        included.
        """
        tables, costs = self.tables, self._most_frequent()
        pairs = zip(tables.transfers, itertools.pairwise(tables.layers), strict=True)
        transfer = next((each for each, (one, other) in pairs if one is costs and other is costs), None)
        ways = costs.state_out, costs.state_in
        forward_s = costs.forward_s + (transfer.forward_s[ways] if transfer else 0.0)
        backward_s = costs.backward_s + (transfer.backward_s[ways] if transfer else 0.0)
        static = costs.static_bytes
        always = static + costs.transient_bytes / self.most_layers
        total_s = tables.num_microbatches * (forward_s + backward_s) + costs.step_s
        chosen: set[int] = set()
        for in_flight in np.unique(self.in_flight[:, :, 0].max(axis=0))[[0, -1]]:
            kept_bytes = always + in_flight * costs.saved_bytes
            scale = float(total_s.min()) / max(float(kept_bytes.max()), 1.0)
            chosen |= {int((total_s + price * scale * kept_bytes).argmin()) for price in _USUAL_PRICES}
        rows = np.array(sorted(chosen))
        weight_s = costs.weight_s[rows]
        seconds = np.zeros((len(rows), len(COSTS)))
        seconds[:, [_F, _B, _I, _W]] = np.stack(
            [forward_s[rows], backward_s[rows], backward_s[rows] - weight_s, weight_s], axis=1
        )
        always_bytes = static[rows], costs.transient_bytes[rows]
        return seconds, costs.step_s[rows], *always_bytes, costs.saved_bytes[rows], costs.split_bytes[rows]

    def _fixed_layers(self) -> tuple[Array, Array, Array]:
        """What the other layers take at least, those before the most frequent one on the first stage, the others on the
        last: ``[first or last, cost]`` seconds, seconds once per step, bytes.
        """
        usual = self._most_frequent()
        begins = self.tables.layers.index(usual)
        seconds, once_s, num_bytes = np.zeros((2, len(COSTS))), np.zeros(2), np.zeros(2)
        for index, layer in enumerate(self.tables.layers):
            if layer is usual:
                continue
            end = int(index > begins)
            ahead_s, back_s = float(layer.forward_s.min()), float(layer.backward_s.min())
            weight_s = min(back_s, float(layer.weight_s.min()))
            seconds[end, [_F, _B, _I, _W]] += ahead_s, back_s, back_s - weight_s, weight_s
            once_s[end] += float(layer.step_s.min())
            share = float(self.classes[id(layer)].transient_shares[-end])  # of the first stage, or the last
            num_bytes[end] += float((layer.static_bytes + layer.saved_bytes + share * layer.transient_bytes).min())
        return seconds, once_s, num_bytes

    def value(self, at: tuple[Array, Array]) -> tuple[float, Array, Array]:
        """The bound for these shares of chains and seconds for memory, the seconds of each chain, and how much more
        than the limit each group holds, both of what attains it.
        """
        shares, memory_s = at
        return _Pass(self, shares, memory_s).run()


class _Pass:
    """One run of dynamic programming over the layers, by stage and boundary state."""

    def __init__(self, problem: _Problem, shares: Array, memory_s: Array) -> None:
        self.problem, self.tables = problem, problem.tables
        self.weights = np.einsum("p,psk->sk", shares, problem.counts)
        self.once = problem.of_stages(shares, problem.chain_group)
        self.begin = problem.of_stages(shares, problem.chain_begins)
        limit = self.tables.limit_bytes
        per_byte = memory_s / limit if math.isfinite(limit) else np.zeros(len(memory_s))
        self.price = per_byte @ problem.is_of_group
        self.priced = np.einsum("m,msk->sk", per_byte, problem.in_flight)  # of a microbatch's bytes
        self.memory_s = memory_s
        backward = self.weights[:, _B] + self.weights[:, _I]
        self.ahead, self.back = self.weights[:, _F], backward
        self.values = {key: self._values(own) for key, own in problem.classes.items()}
        self.least = {key: self._least(own, self.values[key]) for key, own in problem.classes.items()}
        self.moves: dict[int, Array] = {}

    def run(self) -> tuple[float, Array, Array]:
        """As `_Problem.value`."""
        tables, num_stages = self.tables, self.problem.shape.num_stages
        reached = np.full((num_stages, tables.num_states), np.inf)
        reached[0] = 0.0
        came: list[tuple[npt.NDArray[np.bool_], Indices, Indices]] = []
        skips, spare = self._skips(), len(tables.layers) - num_stages
        for index, layer in enumerate(tables.layers):
            stages = slice(max(0, index - spare), index + 1)  # of this layer: each stage has one at least
            is_cut = np.zeros(reached.shape, dtype=np.bool_)
            source = np.broadcast_to(np.arange(tables.num_states), reached.shape)
            if index:
                is_cut, reached = self._cut(index, reached)
                source, reached = self._move(index, reached, stages)
            if index in skips:
                reached = reached + skips[index]
            reached = reached + self._tied(index)[:, None]
            entry, reached = _arrive(self.least[id(layer)], reached, stages)
            came.append((is_cut, source, entry))
        state = int(reached[-1].argmin())
        value = float(reached[-1, state])
        if not math.isfinite(value):
            return math.inf, np.zeros(len(self.problem.counts)), np.zeros(len(self.problem.in_flight))
        total = value - float(self.memory_s.sum()) + tables.broadcast_s
        return total, *self._slopes(came, state)

    def _values(self, own: _Class) -> Array:
        """``[stage, candidate]``."""
        costs, weights, priced = own.costs, self.weights, self.priced
        seconds = (
            np.outer(weights[:, _F], costs.forward_s)
            + np.outer(self.back, costs.backward_s)
            + np.outer(weights[:, _W] - weights[:, _I], costs.weight_s)
            + np.outer(self.once, costs.step_s)
            + np.outer(self.begin, costs.begin_s)
        )
        seconds += np.outer(self.price, costs.static_bytes)
        seconds += np.outer(self.price * own.transient_shares, costs.transient_bytes)
        return seconds + np.outer(priced[:, 0], costs.saved_bytes) + np.outer(priced[:, 1], costs.split_bytes)

    def _least(self, own: _Class, values: Array) -> Array:
        """``[stage, state behind, state before]``: of the best candidate."""
        states = self.tables.num_states
        least = np.full((len(values), states * states), np.inf)
        least[:, own.ways] = np.minimum.reduceat(values[:, own.order], own.starts, axis=1)
        return np.ascontiguousarray(least.reshape(-1, states, states).transpose(0, 2, 1))

    def _cut(self, index: int, reached: Array) -> tuple[npt.NDArray[np.bool_], Array]:
        """Begin the next stage before this layer, or not."""
        cut = np.full_like(reached, np.inf)
        cuts = self.problem.cuts
        if not cuts or index in cuts:
            cut[1:] = reached[:-1] + self._send_s(index)
        stay = np.full_like(reached, np.inf) if cuts and index in cuts else reached
        return cut < stay, np.minimum(cut, stay)

    def _send_s(self, index: int) -> Array:
        """``[stage after the cut, state]``: of what the layer before the cut makes."""
        ahead_s, back_s = self._sent(index)
        total = np.outer(self.weights[:-1, _SEND_F], ahead_s) + np.outer(self.weights[1:, _SEND_B], back_s)
        apart = self.problem.owner[1:] != self.problem.owner[:-1]
        return total * apart[:, None]

    def _sent(self, index: int) -> tuple[Array, Array]:
        """``[state]``: seconds to send what the layer before a cut makes, and its gradients back."""
        ahead_s, back_s = np.zeros((2, self.tables.num_states))
        for send in self.tables.sends:
            if send.producer == index - 1 and max(send.readers) >= index:
                ahead_s, back_s = ahead_s + send.forward_s, back_s + send.backward_s
        return ahead_s, back_s

    def _move(self, index: int, reached: Array, stages: slice) -> tuple[Indices, Array]:
        transfer = self.tables.transfers[index - 1]
        if transfer is None:
            best = np.broadcast_to(reached.argmin(axis=1)[:, None], reached.shape)
            return best, np.broadcast_to(reached.min(axis=1)[:, None], reached.shape)
        key = id(transfer.forward_s)
        if key not in self.moves:
            ahead, back = self.ahead[:, None, None], self.back[:, None, None]
            self.moves[key] = ahead * transfer.forward_s.T + back * transfer.backward_s.T
        return _arrive(self.moves[key], reached, stages)

    def _skips(self) -> dict[int, Array]:
        """By reader, ``[stage, state]``: what `_Problem.skipped` adds."""
        return {
            reader: np.outer(self.ahead, ahead_s) + np.outer(self.back, back_s)
            for reader, (ahead_s, back_s) in self.problem.skipped.items()
        }

    def _tied(self, index: int) -> Array:
        return self.once * self.problem.tied_s[index] + self.price * self.problem.tied_bytes[index]

    def _slopes(
        self, came: Sequence[tuple[npt.NDArray[np.bool_], Indices, Indices]], state: int
    ) -> tuple[Array, Array]:
        """Follow the choices back: the seconds of each chain, and what each group holds beyond the limit, relative."""
        problem, tables = self.problem, self.tables
        stage = problem.shape.num_stages - 1
        seconds = np.zeros((problem.shape.num_stages, len(COSTS)))
        once_s, begin_s = np.zeros((2, problem.shape.num_groups))
        num_bytes = np.zeros(len(problem.in_flight))
        for index in range(len(tables.layers) - 1, -1, -1):
            layer = tables.layers[index]
            is_cut, source, entry = came[index]
            before = int(entry[stage, state])
            rows = np.flatnonzero((layer.state_in == before) & (layer.state_out == state))
            row = int(rows[self.values[id(layer)][stage, rows].argmin()])
            group, state = int(problem.owner[stage]), int(source[stage, before])
            transfer = tables.transfers[index - 1] if index else None
            ahead_s, back_s = float(layer.forward_s[row]), float(layer.backward_s[row])
            if transfer is not None:
                ahead_s += float(transfer.forward_s[state, before])
                back_s += float(transfer.backward_s[state, before])
            weight_s = float(layer.weight_s[row])
            seconds[stage, [_F, _B, _I, _W]] += ahead_s, back_s, back_s - weight_s, weight_s
            once_s[group] += float(layer.step_s[row]) + float(problem.tied_s[index])
            begin_s[group] += float(layer.begin_s[row])
            share = float(problem.classes[id(layer)].transient_shares[stage])
            always = float(layer.static_bytes[row] + share * layer.transient_bytes[row] + problem.tied_bytes[index])
            flying = np.array([layer.saved_bytes[row], layer.split_bytes[row]])
            num_bytes += always * problem.is_of_group[:, stage] + problem.in_flight[:, stage] @ flying
            if (skipped_s := problem.skipped.get(index)) is not None:
                seconds[stage, [_F, _B, _I]] += [skipped_s[kind][before] for kind in (0, 1, 1)]
            if is_cut[stage, state]:
                stage -= 1
                if problem.owner[stage] != group:
                    sent_s, returned_s = self._sent(index)
                    seconds[stage, _SEND_F] += sent_s[state]
                    seconds[stage + 1, _SEND_B] += returned_s[state]
        chains = np.einsum("sk,psk->p", seconds, problem.counts) + once_s[problem.chain_group]
        chains += begin_s[problem.chain_begins]
        limit = tables.limit_bytes
        return chains, num_bytes / limit - 1 if math.isfinite(limit) else np.zeros(0)


def _arrive(matrices: Array, reached: Array, stages: slice) -> tuple[Indices, Array]:
    """Per stage and row of its matrix the cheapest column to come from, and the cost; infinite in other stages."""
    total = matrices[stages] + reached[stages, None, :]
    best, least = np.zeros(reached.shape, dtype=np.intp), np.full(reached.shape, np.inf)
    best[stages] = total.argmin(axis=2)
    least[stages] = total.min(axis=2)
    return best, least
