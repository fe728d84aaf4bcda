"""The search over plans without pipeline stages: a chain of all layers, with ever more microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError
from autopar.plan import Decisions, Plan
from autopar.schedules import Flight
from autopar.search.candidate_sets import CandidateSet, make_candidate_set
from autopar.search.chain_dp import Chain, ChainLayer, path_costs
from autopar.search.lagrangian import PathPool, fastest_paths, pareto_indices
from autopar.search.microbatches import TimeAssignment, time_assignment
from autopar.search.search_context import SearchContext, shared_storage_choices

__all__ = ["SingleStagePaths", "SingleStageSearch"]

Array = npt.NDArray[np.float64]

# Share of time or memory that more microbatches must gain for still more to be tried: prices are no more accurate.
_WORTH = 0.01


@dataclass(frozen=True, eq=False)
class SingleStagePaths:
    """Paths through all layers of a candidate set; `visible_s` has their seconds less what is overlapped by
    estimate.
    """

    candidates: CandidateSet
    pool: PathPool
    visible_s: Array
    plans: dict[int, Plan] = field(default_factory=dict[int, Plan], repr=False)
    """Those of paths that were simulated."""

    def decisions(self, path: int) -> Decisions:
        """Those of the path of this index."""
        return self.candidates.decisions(self.pool.paths[path].tolist())

    def least_s(self, path: int) -> float:
        """Seconds of the path of this index if all collectives of parameters are overlapped."""
        chosen = self.candidates.along(self.pool.paths[path].tolist())
        return self.pool.time_s[path] - sum(candidate.cost.parameter_comm_s for candidate in chosen)

    @cached_property
    def front(self) -> tuple[int, ...]:
        """Paths that no other beats in bytes and in seconds, overlapped ones included or not; the smallest first."""
        peak = self.pool.peak_bytes
        front = {*pareto_indices(self.pool.time_s, peak), *pareto_indices(self.visible_s, peak)}
        return tuple(sorted(front, key=lambda path: (peak[path], path)))

    def fastest_fitting(self, limit_bytes: float) -> tuple[float, float]:
        """Seconds of the fastest paths that fit, by their sums and by what is left of these less what is overlapped by
        estimate; infinite if none fits.
        """
        fitting = np.array(self.pool.peak_bytes) <= limit_bytes

        def least(seconds: Array) -> float:
            return float(np.min(seconds, where=fitting, initial=math.inf))

        return least(np.array(self.pool.time_s)), least(self.visible_s)

    @cached_property
    def fastest(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(seconds, peak bytes) of the fastest path, whatever memory there is: by its sum of seconds, and by what is
        left of it if all collectives of parameters are overlapped.
        """
        peak = self.pool.peak_bytes
        by_sum = min((self.pool.time_s[path], peak[path]) for path in self.front)
        return by_sum, min((self.least_s(path), peak[path]) for path in self.front)


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
        self._fastest_fitting: list[tuple[float, float]] = []

    @property
    def best_s(self) -> float:
        """Seconds of the fastest path that fits, infinite if none does."""
        fitting = ((paths.pool, paths.pool.best(self._limit_bytes)) for paths in self.searched)
        return min((pool.time_s[index] for pool, index in fitting if index >= 0), default=math.inf)

    @property
    def lower_bound_s(self) -> float:
        """No path that fits is faster."""
        return min((paths.pool.lower_bound_s(self._limit_bytes) for paths in self.searched), default=math.inf)

    def begin(self) -> None:
        """Search with the smallest number of microbatches."""
        count, assignment = next(self._counts)
        self._try(count, assignment)

    def go_on(self, rival_s: Callable[[], float]) -> None:
        """Search with more, as far as that may be faster than what fits, and than the seconds of the best plan by then
        that was simulated.
        """
        if not self.searched:
            return
        for count, assignment in self._counts:
            if self._is_settled(rival_s()) or not self._try(count, assignment):
                return

    def _try(self, count: int, assignment: TimeAssignment) -> bool:
        """Whether so many microbatches add anything."""
        self._last = []
        for shared in shared_storage_choices(self._context):
            candidates = make_candidate_set(self._context, count, dict(assignment.factors), shared)
            if candidates is not None:
                self._last.append(_search_paths(candidates))
        if self.searched and not any(_adds(paths, self.searched) for paths in self._last):
            return False
        self.searched += self._last
        found = [paths.fastest_fitting(self._limit_bytes) for paths in self._last]
        self._fastest_fitting.append((min(each[0] for each in found), min(each[1] for each in found)))
        return True

    def _is_settled(self, rival_s: float) -> bool:
        """Whether, by sums of seconds and by what is left of them if all that can be overlapped is, the best of the
        last paths fits, or is slower than the rival.
        """
        if min(paths.fastest[1][0] for paths in self._last) >= rival_s:
            return True
        if self._slows_down():
            return True
        return all(min(paths.fastest[which] for paths in self._last)[1] <= self._limit_bytes for which in (0, 1))

    def _slows_down(self) -> bool:
        """Whether the fastest path that fits is slower than with the number of microbatches before, by either sum."""
        before, now = self._fastest_fitting[-2:] if len(self._fastest_fitting) > 1 else ((), ())
        return bool(now) and all(early < late for early, late in zip(before, now, strict=True))


def _search_paths(candidates: CandidateSet) -> SingleStagePaths:
    """Fast paths by sums of seconds, and by what is left of them less what is overlapped by estimate."""
    shared = candidates.shared_costs.values()
    count = candidates.settings.num_microbatches
    chain = replace(
        candidates.tables.chain(Flight(count if candidates.context.program.is_loss_late else 1)),
        fixed_s=sum(cost.step_s for cost in shared),
        fixed_bytes=sum(cost.memory.persistent_bytes for cost in shared),
    )
    visible = _less_overlap(candidates, chain)
    pool = fastest_paths(chain)
    if visible is not chain:
        pool.add(*fastest_paths(visible, mixes=False).paths)
    return SingleStagePaths(candidates, pool, path_costs(visible, np.stack(pool.paths))[:, 0])


def _less_overlap(candidates: CandidateSet, chain: Chain) -> Chain:
    """The chain with seconds less what is overlapped by estimate; the same one if nothing is."""
    hidden = {first: np.array([each.overlapped_s for each in own]) for first, own in candidates.by_class.items()}
    if not any(seconds.any() for seconds in hidden.values()):
        return chain
    visible: dict[int, ChainLayer] = {}
    for first, layer in zip(candidates.context.classes, chain.layers, strict=True):
        if first not in visible:
            visible[first] = replace(layer, time_s=layer.time_s - hidden[first])
    return replace(chain, layers=tuple(visible[first] for first in candidates.context.classes))


def _microbatch_counts(context: SearchContext) -> Iterator[tuple[int, TimeAssignment]]:
    """Numbers of microbatches that are exact, with how."""
    program, demanded = context.program, context.constraints.get("microbatches")
    per_microbatch = context.constraints.per_microbatch
    if isinstance(demanded, int):
        assignment = time_assignment(program, demanded, per_microbatch=per_microbatch)
        if isinstance(assignment, str):
            raise ConstraintError(f"constraint 'microbatches={demanded}': {assignment}")
        yield demanded, assignment
        return
    count = 1
    while count <= context.request.max_microbatches and (count == 1 or program.batch_size % count == 0):
        assignment = time_assignment(program, count, per_microbatch=per_microbatch)
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
