"""The search over plans without pipeline stages: a chain of all layers, with ever more microbatches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError
from autopar.plan import Decisions, Plan
from autopar.schedules import Flight
from autopar.search.chain.candidate_sets import CandidateSet, make_candidate_set
from autopar.search.chain.chain_dp import Chain, path_costs, relaxed_paths
from autopar.search.chain.lagrangian import PathPool, fastest_paths, pareto_indices
from autopar.search.chain.least_seconds import least_of, remember_least
from autopar.search.microbatches.time_assignment import TimeAssignment
from autopar.search.search_context import SearchContext, shared_storage_choices
from autopar.search.settings.constraints import LayerDemands
from autopar.search.settings.request import SearchRequest

__all__ = ["PathOrder", "SingleStagePaths", "SingleStageSearch"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
PathOrder = tuple[int, int]
"""A path by its index in a pool, and one of its `SingleStagePaths.orders` by its index there."""

# Share of time or memory that more microbatches must gain for still more to be tried: prices are no more accurate.
_WORTH = 0.01
# Points of the hull that bounds of one limit need: they are sought near it.
_BOUND_PRICES = 10
_ROUNDING = 1e-9  # of a sum, in another order
# Of what compiled layers gain if all devices share their ops evenly, paths through them gain so much at least: 0.99 to
# 1.36 of it in 18 searches without stages, of dense decoders and experts on 64 devices (docs/decisions.md, (cp)).
_COMPILED_GAIN = 0.95
_FIRST = 3  # runs of equal candidates that are tried in front of the others: each takes a simulation of 10 ms


@dataclass(frozen=True, eq=False)
class SingleStagePaths:
    """Paths through all layers of a candidate set, by their seconds less what is overlapped by estimate; `least_s` has
    what they take at least, however much is overlapped, and `least` the fast paths of the chain that says so of any.
    """

    candidates: CandidateSet
    pool: PathPool
    least: PathPool
    least_s: Array
    plans: dict[PathOrder, Plan] = field(default_factory=dict["PathOrder", "Plan"], repr=False)
    """Those of paths that were simulated."""
    walked_bytes: dict[PathOrder, float] = field(default_factory=dict["PathOrder", float], repr=False)
    """The most that a device holds at any moment, the batch included, of paths that were walked through for it."""
    _near: dict[float, PathPool] = field(default_factory=dict[float, PathPool], repr=False)
    _orders: dict[int, tuple[Indices, ...]] = field(default_factory=dict[int, "tuple[Indices, ...]"], repr=False)

    def decisions(self, path: int, order: int = 0) -> Decisions:
        """Those of the path of this index, its layers in this one of its `orders`."""
        return self.candidates.decisions(self.orders(path)[order].tolist() if order else self.pool.paths[path].tolist())

    def orders(self, path: int) -> tuple[Indices, ...]:
        """The path of this index, and others whose equal layers have the same candidates in another order.

        All sums are the same, but not what is overlapped: what a layer gathers or reduces overlaps with its neighbors.
        """
        if path not in self._orders:
            found = self.pool.paths[path]
            others = np.stack([found, *_other_orders(found, self.candidates.context.classes)])
            costs = np.hstack([path_costs(chain, others) for chain in (self.pool.chain, self.least.chain)])
            is_same = np.isclose(costs, costs[0], rtol=_ROUNDING, atol=0.0).all(axis=1)
            self._orders[path] = tuple(others[is_same])
        return self._orders[path]

    def sums_s(self, paths: Sequence[int]) -> Array:
        """Seconds of the paths of these indices if nothing is overlapped."""
        return path_costs(_chain(self.candidates), np.stack([self.pool.paths[path] for path in paths]))[:, 0]

    @cached_property
    def front(self) -> tuple[int, ...]:
        """Paths that no other beats in bytes and in seconds, by estimate or at least; the smallest first."""
        peak = self.pool.peak_bytes
        every_s = self.pool.time_s, self.least_s, self.sums_s(range(len(peak)))
        front = {path for seconds in every_s for path in pareto_indices(seconds, peak)}
        return tuple(sorted(front, key=lambda path: (peak[path], path)))

    def fastest_fitting(self, limit_bytes: float) -> tuple[float, float]:
        """Seconds of the fastest paths that fit, by estimate and at least; infinite if none fits."""
        fitting = np.array(self.pool.peak_bytes) <= limit_bytes

        def least(seconds: Array) -> float:
            return float(np.min(seconds, where=fitting, initial=math.inf))

        return least(np.array(self.pool.time_s)), least(self.least_s)

    @cached_property
    def fastest(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(seconds, peak bytes) of the fastest path, whatever memory there is: by estimate, and at least."""
        peak = self.pool.peak_bytes
        by_estimate = min((self.pool.time_s[path], peak[path]) for path in self.front)
        return by_estimate, min((float(self.least_s[path]), peak[path]) for path in self.front)

    def largest_fitting(self, limit_bytes: float) -> float:
        """The limit, or the bytes of a path that is counted as larger but fits."""
        context = self.candidates.context
        allowed_bytes = limit_bytes + context.request.training.batch_bytes(context.program)
        fitting = (path for (path, _), walked in self.walked_bytes.items() if walked <= allowed_bytes)
        return max([limit_bytes, *(self.pool.peak_bytes[path] for path in fitting)])

    def lower_bound_s(self, limit_bytes: float) -> float:
        """A lower bound on the simulated step time of all paths that fit."""
        least = self.least
        if self.fastest[1][1] > limit_bytes:  # else the hull without a limit is exact
            least = self._near.get(limit_bytes) or fastest_paths(
                least.chain, max_prices=_BOUND_PRICES, mixes=False, aim_bytes=limit_bytes
            )
            self._near[limit_bytes] = least
        return least.lower_bound_s(limit_bytes)


@dataclass(frozen=True)
class _KnownBound:
    """Of a search with so many microbatches: what its paths take at least, `ideal_s` of its context, what it settled
    on for each class of layers, and what there was to say by then.
    """

    count: int
    compiled: bool
    least_s: float
    ideal_s: float
    settled: dict[int, LayerDemands]
    notes: tuple[str, ...]


class SingleStageSearch:
    """Paths without stages, with ever more microbatches.

    By the prices, cutting a batch in two makes nothing faster: more microbatches only save memory.  So the search ends
    where the fastest path of the last number fits, where it is slower than a rival that fits, or once more microbatches
    add (next to) nothing whatever the limit is.  It also ends where the fastest path that fits is slower than with the
    number before.  This one is no proof but an argument: each doubling frees half as much memory as the last one did,
    and gathers parameters twice as often, so what did not pay once does not pay later.  It held in all 33 cases that
    were compared with forced numbers of 1 to 16: decoders of 3 layers, 2 and 4 devices, limits of 90 to 15 % of the
    memory that the fastest plan takes.
    """

    def __init__(self, context: SearchContext, limit_bytes: float) -> None:
        self.searched: list[SingleStagePaths] = []
        self._context = context
        self._limit_bytes = limit_bytes
        self._counts = _microbatch_counts(context)
        self._last: list[SingleStagePaths] = []
        self._least: dict[int, Array] = {}
        self._fastest_fitting: list[tuple[float, float]] = []
        self._enough_s = _passed_over_s(context.request)
        self.is_outdone = False  # paths were passed over, as they are no match for the rival

    def lower_bound_s(self) -> float:
        """No path that fits is faster; of those that are counted as larger than the limit, none that is as small as one
        that was found to fit.
        """
        limit_bytes = self._limit_bytes
        return min((own.lower_bound_s(own.largest_fitting(limit_bytes)) for own in self.searched), default=math.inf)

    @property
    def _known_bounds(self) -> list[_KnownBound]:
        """What paths take at least, under the same demands."""
        context = self._context
        key = "least of paths", context.num_devices, context.demands, context.request.training.running(compiled=False)
        return context.request.known.get((context.program, context.prices), key, list[_KnownBound])

    def _is_hopeless(self, count: int) -> bool:
        """Whether paths with fewer microbatches, or as many, were no match for the rival: more make nothing faster,
        and layers that run eagerly take longer than compiled ones.
        """
        compiled = self._context.request.training.compiled
        for each in self._known_bounds:
            more_s = _COMPILED_GAIN * (self._context.ideal_s - each.ideal_s) if each.compiled > compiled else 0.0
            is_bound = each.count <= count and each.compiled >= compiled
            if is_bound and each.least_s + max(0.0, more_s) >= self._enough_s:
                self._context.settled.update(each.settled)
                self._context.notes += each.notes
                return True
        return False

    def begin(self) -> None:
        """Search with the smallest number of microbatches."""
        self._try(*next(self._counts))

    def go_on(self, rival_s: Callable[[], float]) -> None:
        """Search with more, as far as that may be faster than the best plan by then that was simulated, of so many
        seconds.
        """
        for count, assignment in self._counts if self._last else ():
            if self._is_settled(rival_s()):
                return
            if not self._try(count, assignment):
                return

    def remember_least(self, best_s: float) -> None:
        """Let pipelines know what layers take at least; `best_s` are the seconds of the best plan without stages."""
        for count, least in self._least.items():
            remember_least(self._context, count, least, best_s)

    def _try(self, count: int, assignment: TimeAssignment) -> bool:
        """Whether so many microbatches add anything."""
        self._last = []
        if self._is_hopeless(count):
            self.is_outdone = True
            return False
        least_s, every = math.inf, list[Array]()
        for shared in shared_storage_choices(self._context):
            self._context.request.check_time()
            candidates = make_candidate_set(self._context, count, dict(assignment.factors), shared)
            if candidates is None:
                continue
            every.append(least_of(candidates))
            chain = _chain(candidates)
            least = _least_chain(candidates, chain)
            own_s = least.fixed_s + relaxed_paths(least, 0.0, math.inf)[0]
            least_s = min(least_s, own_s)
            if own_s < self._enough_s:
                self._last.append(_search_paths(candidates, chain, least))
        if every:
            self._least[count] = np.min(every, axis=0)
            context = self._context
            bound = _KnownBound(
                count, context.request.training.compiled, least_s, context.ideal_s, dict(context.settled),
                tuple(context.notes),
            )  # fmt: skip
            self._known_bounds.append(bound)
        if not self._last:
            self.is_outdone |= bool(every)
            return False
        if self.searched and not any(_adds(paths, self.searched) for paths in self._last):
            return False
        self.searched += self._last
        fastest = [paths.fastest_fitting(self._limit_bytes) for paths in self._last]
        self._fastest_fitting.append((min(each[0] for each in fastest), min(each[1] for each in fastest)))
        return True

    def _is_settled(self, rival_s: float) -> bool:
        """Whether, by estimate and with all overlapped that may be, the best of the last paths fits, or gains next to
        nothing over the rival.
        """
        if min(paths.fastest[1][0] for paths in self._last) >= (1 - _WORTH) * rival_s:
            return True
        if self._slows_down():
            return True
        return all(min(paths.fastest[which] for paths in self._last)[1] <= self._limit_bytes for which in (0, 1))

    def _slows_down(self) -> bool:
        """Whether the fastest path that fits is slower than with half the microbatches, by estimate and at least."""
        before, now = self._fastest_fitting[-2:] if len(self._fastest_fitting) > 1 else ((), ())
        return bool(now) and all(early < late for early, late in zip(before, now, strict=True))


def _passed_over_s(request: SearchRequest) -> float:
    """Paths that take so long are no match for the rival, and passed over unless the caller asks what was looked at."""
    return request.rival_s if request.on_considered is None and request.on_final is None else math.inf


def _least_chain(candidates: CandidateSet, chain: Chain) -> Chain:
    """What all candidates take at least, however much is overlapped."""
    hidden_s = {first: np.array([each.total_s for each in candidates.hideable(first)]) for first in candidates.by_class}
    return _less(candidates, chain, hidden_s)


def _search_paths(candidates: CandidateSet, chain: Chain, least: Chain) -> SingleStagePaths:
    """Fast paths by their seconds less what is overlapped by estimate, and by what they take at least."""
    overlapped_s = {first: np.array([each.overlapped_s for each in own]) for first, own in candidates.by_class.items()}
    visible = _less(candidates, chain, overlapped_s)
    pool = fastest_paths(visible)
    fastest = pool if least is visible else fastest_paths(least, mixes=False)
    if fastest is not pool:
        pool.add(*fastest.paths, *fastest_paths(chain).paths)
    return SingleStagePaths(candidates, pool, fastest, path_costs(least, np.stack(pool.paths))[:, 0])


def _other_orders(path: Indices, classes: Sequence[int]) -> Iterator[Indices]:
    """Paths with the same candidates on the layers of each class: in reverse, and with each of the most frequent ones
    first.
    """
    of_class = np.array(classes)
    places = [np.flatnonzero(of_class == first) for first in dict.fromkeys(classes)]
    seen = {tuple(path.tolist())}
    usual = Counter[int](path.tolist()).most_common(_FIRST)
    for first in (None, *(chosen for chosen, _ in usual)):
        other = path.copy()
        for own in places:
            chosen = path[own]
            other[own] = chosen[::-1] if first is None else chosen[np.argsort(chosen != first, kind="stable")]
        if tuple(other.tolist()) not in seen:
            seen.add(tuple(other.tolist()))
            yield other


def _chain(candidates: CandidateSet) -> Chain:
    """All that the candidates cost, one after the other."""
    shared = candidates.shared_costs.values()
    count = candidates.settings.num_microbatches
    return replace(
        candidates.tables.chain(Flight(count if candidates.context.program.is_loss_late else 1)),
        fixed_s=sum(cost.step_s for cost in shared),
        fixed_bytes=sum(cost.memory.persistent_bytes for cost in shared),
    )


def _less(candidates: CandidateSet, chain: Chain, hidden_s: dict[int, Array]) -> Chain:
    """The chain less so many seconds of each candidate, by the first layer of its class; the same one if of none."""
    if not any(seconds.any() for seconds in hidden_s.values()):
        return chain
    classes = candidates.context.classes
    layers = dict(zip(classes, chain.layers, strict=True))
    fewer = {first: replace(layer, time_s=layer.time_s - hidden_s[first]) for first, layer in layers.items()}
    return replace(chain, layers=tuple(fewer[first] for first in classes))


def _microbatch_counts(context: SearchContext) -> Iterator[tuple[int, TimeAssignment]]:
    """Numbers of microbatches that are exact, with how."""
    program, demanded = context.program, context.constraints.get("microbatches")
    if isinstance(demanded, int):
        assignment = context.time_assignment(demanded, joins_outputs=False)
        if isinstance(assignment, str):
            raise ConstraintError(f"constraint 'microbatches={demanded}': {assignment}")
        yield demanded, assignment
        return
    count = 1
    while count <= context.request.max_microbatches and (count == 1 or program.batch_size % count == 0):
        assignment = context.time_assignment(count, joins_outputs=False)
        if isinstance(assignment, str):
            limit = "no gradient accumulation" if count == 2 else f"at most {count // 2} microbatches"
            context.notes.append(f"{limit}: {assignment}")
            return
        yield count, assignment
        count *= 2 if context.request.training.is_training else context.request.max_microbatches + 1


def _adds(paths: SingleStagePaths, known: list[SingleStagePaths]) -> bool:
    """Whether one of `paths` is faster than all known ones that take no more memory, within a tolerance."""
    time = np.concatenate([other.pool.time_s for other in known])
    peak = np.concatenate([other.pool.peak_bytes for other in known])
    order = np.argsort(peak)
    fastest = np.concatenate([[np.inf], np.minimum.accumulate(time[order])])
    allowed = np.array(paths.pool.peak_bytes) * (1 + _WORTH)
    rivals = fastest[np.searchsorted(peak[order], allowed, side="right")]
    return bool((np.array(paths.pool.time_s) < rivals * (1 - _WORTH)).any())
