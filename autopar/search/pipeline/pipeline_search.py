"""Which pipelines are searched: numbers of device groups and of microbatches, the most promising ones first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.schedules import Shape
from autopar.schedules.action_lists import ScheduleSource
from autopar.search.chain.candidate_sets import least_returned_bytes, make_candidate_set
from autopar.search.chain.least_seconds import least_layers, least_of, remember_least
from autopar.search.microbatches.time_assignment import TimeAssignment
from autopar.search.pipeline.least_compute import least_compute
from autopar.search.pipeline.moved_layers import move_layers
from autopar.search.pipeline.pipeline_bounds import least_step_s
from autopar.search.pipeline.pipeline_candidates import OVERCOUNTED, PipelineResults, search_pipelines
from autopar.search.pipeline.pipeline_constraints import PipelineDemands
from autopar.search.pipeline.pipeline_numbers import FIRST_MICROBATCHES, PipelineNumbers
from autopar.search.pipeline.refinement import refine
from autopar.search.pipeline.relaxed_pipelines import takes_longer
from autopar.search.pipeline.schedule_estimates import idle_of, is_small
from autopar.search.search_context import SearchContext, shared_storage_choices

__all__ = ["PipelineSearch"]

Array = npt.NDArray[np.float64]

_FEW = 10  # so many pairs of numbers are all searched; of more, those on a walk to the best
_MAX_TRIED = 12  # on that walk: each takes about as long as a search without stages
# What stands for the seconds of pipelines that are ruled out: those with fewer device groups idle less, so that the
# walk goes on that way, and any that is not ruled out is better.
_RULED_OUT_S = 1e9
_IDLE = 1e-6
# Times as long as what is enough: to refine pipelines that take longer makes none of them a match (it gained up to 1 %
# in nine searches for 405B on 16,384 devices and 8B on 64).
_REFINED = 1.02
_CLEARLY = 0.9  # of what is enough: pipelines of equal stages that take less are not ruled out, so that is not tried


@dataclass(eq=False)
class PipelineSearch:
    """One search over pipelines; `notes` grows while it works.

    `context` is that of the search without stages: pipelines must meet as many demands as it has settled on.
    """

    context: SearchContext
    schedules: ScheduleSource
    demands: PipelineDemands
    limit_bytes: float
    notes: list[str] = field(default_factory=list[str])
    _enough_s: float = math.inf
    _too_slow: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])  # all shapes of these
    _contexts: dict[tuple[int, frozenset[int]], SearchContext] = field(
        default_factory=dict[tuple[int, frozenset[int]], SearchContext]
    )

    @cached_property
    def _numbers(self) -> PipelineNumbers:
        return PipelineNumbers(self.context, self.demands)

    def run(self, enough_s: float = math.inf) -> PipelineResults:
        """The pipelines that were looked at, and lower bounds on their seconds.

        Pipelines that can't be faster than `enough_s`, as simulated, are passed over, and the bounds leave them out.
        """
        self._enough_s = enough_s
        results = PipelineResults(self.schedules, self.limit_bytes)
        counts, notes = self._numbers.counts()
        self.notes.extend(notes)
        if sum(map(len, counts.values())) <= _FEW:
            for groups, own in counts.items():
                tried: dict[int, float] = {}
                # The most promising first: what it finds, and what its layers take, rule others out.
                for count in sorted(own, key=lambda count: self._rank(groups, count)):
                    if not self._lies_behind(groups, count, tried):
                        tried[count] = self._try(results, groups, count)
                # One device group after the other is faster only for programs so small that launches take longer than
                # computing; of all others the compute of their layers rules it out.
                if own and 1 not in own and self.context.constraints.get("microbatches") is None:
                    self._try(results, groups, 1)
        else:
            self._walk_to_best(counts, lambda groups, count: self._try_few_meshes(results, groups, count))
            move_layers(results)  # which may decide between two pairs of numbers
            self._look_closer(results)
        if results.best is None or results.best_s < _REFINED * enough_s:
            refine(results, adds_variants=not self.demands.schedule)
        if results.best is not None:
            known, shape = self.context.request.known, results.best.shape
            known.numbers, known.inner_sizes = (shape.num_groups, shape.num_microbatches), results.best.inner_sizes
            known.piece_tokens = self.context.program.piece_tokens
        return results

    def _rank(self, groups: int, count: int) -> tuple[float, int]:
        """The most promising first, but the least first where demands have yet to be met."""
        return (abs(math.log2(count / (FIRST_MICROBATCHES * groups))) if self.context.settled else 0.0), count

    def _lies_behind(self, groups: int, count: int, tried: Mapping[int, float]) -> bool:
        """`_lies_behind` of so many device groups, of which these numbers of microbatches were tried."""
        return _lies_behind(count, tried, lambda other: self._idle_share(groups, other))

    def _idle_share(self, groups: int, count: int) -> float:
        """The part of a step in which so many device groups idle at least, if stages are equal; 0 where backwards that
        are split may fill it.
        """
        shares: list[float] = []
        for shape in self._numbers.shapes(groups, count):
            if shape.record.splits_backward and not self.context.request.training.compiled:
                return 0.0
            fill_share = idle_of(shape, shape.actions(self.schedules)).fill_share
            shares.append((fill_share - 1 / groups) / ((count - 1) / groups + fill_share))
        return min(shares, default=0.0)

    def _walk_to_best(self, counts: dict[int, list[int]], search: Callable[[int, int], float]) -> None:
        """From numbers in the middle, or those that were the best of an earlier search, to numbers of microbatches that
        are faster; with as many of them for each device group to more groups, and to fewer; and again to others of the
        best number of groups.
        """
        tried: dict[tuple[int, int], float] = {}

        def attempt(groups: int, count: int) -> float:
            if (groups, count) not in tried and len(tried) < _MAX_TRIED:
                tried[groups, count] = search(groups, count)
            return tried.get((groups, count), np.inf)

        def other_counts(groups: int, count: int, *, fewer_first: bool = False) -> int:
            """The fastest number of microbatches on a way up, and down, from this one."""
            own = counts[groups]
            self._walk_counts(groups, count, own, tried, attempt, fewer_first=fewer_first)
            # Where nothing fits, the most microbatches say how many to try with other numbers of groups: what is ruled
            # out, as too slow, does not.
            known = (other for other in own if (groups, other) in tried)
            return min(known, key=lambda other: (min(tried[groups, other], _RULED_OUT_S), -other))

        ordered = sorted(groups for groups, own in counts.items() if own)
        known = self.context.request.known
        groups, count = known.numbers
        is_known = count in counts.get(groups, ())
        if is_known and attempt(groups, count) >= self._enough_s:
            if known.piece_tokens or not self.context.program.piece_tokens:
                return  # what was the best before is no match for what is known by now
            # Whole logits may have left no room for any other numbers, of which nothing is known then; pieces leave
            # room for all numbers that whole logits do.
            is_known, known.numbers, known.inner_sizes = False, (0, 0), frozenset()
        if not is_known:
            groups = ordered[len(ordered) // 2]
            count = self._numbers.first_count(groups, counts[groups])
        share = other_counts(groups, count) / groups
        near = {other: min(counts[other], key=lambda count: abs(count - share * other)) for other in ordered}
        at = ordered.index(groups)
        _walk(ordered[at:], lambda other: attempt(other, near[other]))
        _walk(ordered[at::-1], lambda other: attempt(other, near[other]))
        best = min(tried, key=lambda pair: tried[pair])
        if best[0] != groups and tried[best] < self._enough_s:
            # Fewer groups idle less at as many microbatches each, so fewer microbatches are tried before more.
            other_counts(*best, fewer_first=best[0] < groups)

    def _walk_counts(
        self,
        groups: int,
        count: int,
        counts: list[int],
        tried: Mapping[tuple[int, int], float],
        attempt: Callable[[int, int], float],
        *,
        fewer_first: bool,
    ) -> None:
        """From so many microbatches to more, and to fewer, but for those behind a number that is slower."""

        def attempt_count(other: int) -> float:
            before = {count: seconds for (of_groups, count), seconds in tried.items() if of_groups == groups}
            is_hopeless = other not in before and self._lies_behind(groups, other, before)
            return _RULED_OUT_S if is_hopeless else attempt(groups, other)

        at = counts.index(count)
        for has_fewer in (fewer_first, not fewer_first):
            # With fewer, device groups idle longer, and those that do not fit need no less memory.
            if not has_fewer or ((groups, count) not in self._too_slow and math.isfinite(attempt_count(count))):
                _walk(counts[at::-1] if has_fewer else counts[at:], attempt_count)

    def _try_few_meshes(self, results: PipelineResults, groups: int, count: int) -> float:
        """As `_try`; once a pipeline is known that is fast enough, with the meshes of its usual layers, and those that
        give each device as many rows of a microbatch.
        """
        known, usual = self.context.request.known, self._numbers.usual_sizes(groups, count)
        sizes, (of_groups, of_count) = known.inner_sizes, known.numbers
        if results.best_s < self._enough_s and results.best is not None:
            sizes, shape = results.best.inner_sizes, results.best.shape
            of_groups, of_count = shape.num_groups, shape.num_microbatches
        scaled = {size * count * of_groups // (of_count * groups) for size in sizes}
        return self._try(results, groups, count, (sizes | scaled) & usual or usual)

    def _look_closer(self, results: PipelineResults) -> None:
        """The best once more, with all meshes."""
        best = results.best
        if best is not None and best.step_s < self._enough_s:
            numbers = best.shape.num_groups, best.shape.num_microbatches
            if best.candidates.context.inner_sizes != (usual := self._numbers.usual_sizes(*numbers)):
                self._try(results, *numbers, usual)

    def _try(
        self, results: PipelineResults, groups: int, count: int, inner_sizes: frozenset[int] = frozenset()
    ) -> float:
        """Search all pipelines with so many device groups and microbatches; the seconds of the best of them."""
        key = groups, inner_sizes
        context = self._contexts.setdefault(key, self.context.on_groups(groups, inner_sizes))
        assignment = context.time_assignment(count)
        assert not isinstance(assignment, str)
        enough_s = min(self._enough_s, results.best_s)
        bounds = self._bounds(self._numbers.shapes(groups, count), least_layers(context, count))
        hopeful = [shape for shape, bound_s in bounds.items() if bound_s < enough_s]
        if not hopeful or self._is_too_slow(context, count, assignment, hopeful, enough_s):
            return self._rule_out(groups, count)
        if self._has_no_room(context):
            return math.inf
        best_s, are_ruled_out = math.inf, True
        every: list[Array] = []
        for shared in shared_storage_choices(context):
            candidates = make_candidate_set(context, count, dict(assignment.factors), shared)
            if candidates is None:
                continue
            least = least_of(candidates)
            every.append(least)
            left = {shape: bound_s for shape, bound_s in self._bounds(hopeful, least).items() if bound_s < enough_s}
            if left:
                best_s = min(best_s, search_pipelines(candidates, left, self.demands.cuts, results, enough_s))
            are_ruled_out &= not left
        if every:
            remember_least(context, count, np.min(every, axis=0))
        return self._rule_out(groups, count) if are_ruled_out else best_s

    def _bounds(self, shapes: Iterable[Shape], least: Array) -> dict[Shape, float]:
        """`least_step_s` of pipelines whose layers take at least so long."""
        splits = not self.context.request.training.compiled
        return {shape: least_step_s(shape, *least, splits=splits) for shape in shapes}

    def _rule_out(self, groups: int, count: int) -> float:
        """Of so many device groups and microbatches, no pipeline is fast enough: what stands for its seconds."""
        self._too_slow.add((groups, count))
        return _RULED_OUT_S * (1 + _IDLE * groups)

    def _has_no_room(self, context: SearchContext) -> bool:
        """Whether what is returned leaves no room, whatever the candidates; what a demanded pipeline needs is told by
        its candidates.
        """
        room_bytes = OVERCOUNTED * self.limit_bytes
        return not self.demands.needs_pipeline and least_returned_bytes(context) > room_bytes

    def _is_too_slow(
        self,
        context: SearchContext,
        count: int,
        assignment: TimeAssignment,
        shapes: Sequence[Shape],
        enough_s: float,
    ) -> bool:
        """Whether no pipeline of any of these shapes is fast enough, by the compute of its layers alone."""
        if not math.isfinite(enough_s) or not all(map(is_small, shapes)):  # large ones take as long as a search
            return False
        tables = least_compute(context, count, assignment.factors)
        whole_s = count * sum(float((each.forward_s + each.backward_s).min()) for each in tables.layers)
        # Those that idle least come first: one that may be fast enough ends it.
        ordered = sorted(shapes, key=lambda each: (not each.record.splits_backward, -each.num_stages))
        listed = [(shape, shape.actions(self.schedules)) for shape in ordered]
        fill_share = min(idle_of(*each).fill_share for each in listed)
        if whole_s * ((count - 1) / context.num_groups + fill_share) / count < _CLEARLY * enough_s:
            return False
        return all(takes_longer(tables, *each, enough_s, self.demands.cuts) for each in listed)


def _lies_behind(count: int, tried: Mapping[int, float], idle_share: Callable[[int], float]) -> bool:
    """Whether so many microbatches lie behind a number that is no slower than they can be, by one before it.

    With twice as many, device groups idle half as long, and layers take longer or the same: what is lost grows, or
    stays.  So if it takes as long as half of the idle seconds or longer from one number to the next, twice the next
    one is slower; and the same holds the other way, where idle seconds double and less is won back.

    Args:
        count: microbatches.
        tried: for each number that was tried, seconds of the best pipeline; infinite if none fits.
        idle_share: for any of these numbers, the part of its seconds in which device groups idle.  Schedules of many
            stages must be listed for it, so it is asked for only where seconds alone don't say.
    """
    for first, second in itertools.permutations(tried, 2):
        is_between = min(first, count) < second < max(first, count)
        if not is_between or max(tried[first], tried[second]) >= _RULED_OUT_S:
            continue
        gain_s = tried[first] - tried[second]
        if gain_s <= 0:
            return True
        idle_s, times = idle_share(second) * tried[second], second / first
        if count > second:
            grown_s = ((times - 1) * idle_s - gain_s) / math.log2(times)
            pays = grown_s < idle_s / 2
        else:
            grown_s = (gain_s + (1 - times) * idle_s) / -math.log2(times)
            pays = grown_s > idle_s
        if not pays:
            return True
    return False


def _walk(values: list[int], attempt: Callable[[int], float]) -> None:
    """Attempt value after value as long as that is faster; where nothing fits, go on."""
    best_s = np.inf
    for value in values:
        now_s = attempt(value)
        if now_s >= best_s and math.isfinite(best_s):
            return
        best_s = min(best_s, now_s)
