"""Which pipelines are searched: numbers of device groups and of microbatches, the most promising ones first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError
from autopar.schedules import Shape, schedule_problem
from autopar.schedules.action_lists import ScheduleSource
from autopar.search.candidate_sets import CandidateSet, make_candidate_set
from autopar.search.constraints import check_degrees
from autopar.search.microbatches import TimeAssignment, time_assignment
from autopar.search.pipeline.least_compute import least_compute
from autopar.search.pipeline.pipeline_bounds import least_step_s
from autopar.search.pipeline.pipeline_candidates import PipelineResults, ShapeBound, search_pipelines
from autopar.search.pipeline.pipeline_constraints import PipelineDemands
from autopar.search.pipeline.relaxed_pipelines import takes_longer
from autopar.search.pipeline.schedule_estimates import is_small
from autopar.search.search_context import SearchContext, shared_storage_choices

__all__ = ["PipelineSearch"]

Array = npt.NDArray[np.float64]

_FEW = 10  # so many pairs of numbers are all searched; of more, those on a walk to the best
_MAX_TRIED = 12  # on that walk: each takes about as long as a search without stages
# Microbatches for each device group with which the walk begins: with fewer the bubble is large, with more activations
# are, and so it is rarely far from the best.
_FIRST_MICROBATCHES = 2
# What stands for the seconds of pipelines that are ruled out: those with fewer device groups idle less, so that the
# walk goes on that way, and any that is not ruled out is better.
_RULED_OUT_S = 1e9
_IDLE = 1e-6


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
    _assignments: dict[int, TimeAssignment | str] = field(default_factory=dict[int, "TimeAssignment | str"])
    _contexts: dict[int, SearchContext] = field(default_factory=dict[int, SearchContext])
    _least_s: dict[tuple[int, int], Array] = field(default_factory=dict[tuple[int, int], Array])

    def run(self, known_s: float, enough_s: float = math.inf) -> PipelineResults:
        """The pipelines that were looked at, and a lower bound on their seconds.

        Pipelines that can't be faster than `known_s`, the sum of seconds of a plan without stages, are passed over; and
        so are those that can't be faster than `enough_s` whatever compute hides, which the results' bounds leave out.
        """
        self._enough_s = enough_s
        results = PipelineResults(self.schedules, self.limit_bytes)
        counts = {groups: list(self._microbatch_counts(groups)) for groups in self._group_counts()}
        self._check_possible(counts)
        if sum(map(len, counts.values())) <= _FEW:
            for groups, own in counts.items():
                # The most promising first: what it finds, and what its layers take, rule others out.
                for count in sorted(own, key=lambda count: self._rank(groups, count)):
                    self._try(results, known_s, groups, count)
                # One device group after the other is faster only for programs so small that launches take longer than
                # computing; of all others the compute of their layers rules it out.
                if own and 1 not in own and self.context.constraints.get("microbatches") is None:
                    self._try(results, known_s, groups, 1)
        else:
            self._walk_to_best(counts, lambda groups, count: self._try(results, known_s, groups, count))
        results.finish()
        return results

    def _rank(self, groups: int, count: int) -> tuple[float, int]:
        """The most promising first, but the least first where demands have yet to be met."""
        return (abs(math.log2(count / (_FIRST_MICROBATCHES * groups))) if self.context.settled else 0.0), count

    def _walk_to_best(self, counts: dict[int, list[int]], search: Callable[[int, int], float]) -> None:
        """From the middle of the numbers of groups up, and down, as long as that is faster; then so with the numbers of
        microbatches of the best.
        """
        tried: dict[tuple[int, int], float] = {}

        def attempt(groups: int, count: int) -> float:
            if (groups, count) not in tried and len(tried) < _MAX_TRIED:
                tried[groups, count] = search(groups, count)
            return tried.get((groups, count), np.inf)

        firsts = {
            groups: min(own, key=lambda count: abs(count - _FIRST_MICROBATCHES * groups))
            for groups, own in counts.items() if own
        }  # fmt: skip
        ordered = sorted(firsts)
        middle = len(ordered) // 2
        _walk(ordered[middle:], lambda groups: attempt(groups, firsts[groups]))
        _walk(ordered[middle::-1], lambda groups: attempt(groups, firsts[groups]))
        best, _ = min(tried, key=lambda pair: tried[pair])
        at = counts[best].index(firsts[best])
        _walk(counts[best][at:], lambda count: attempt(best, count))
        if (
            best,
            firsts[best],
        ) not in self._too_slow:  # else fewer, with which device groups idle longer, are no faster
            _walk(counts[best][at::-1], lambda count: attempt(best, count))

    def _check_possible(self, counts: dict[int, list[int]]) -> None:
        """Raise if a pipeline is demanded but there is none; else note why there is none."""
        if any(True for groups, own in counts.items() for count in own for _ in self._shapes(groups, count)):
            return
        reason = self._assignment(2)
        exact = f"microbatches would not be exact: {reason}" if isinstance(reason, str) else ""
        if self.demands.needs_pipeline:
            tried = [
                schedule_problem(self.demands.schedule, groups, self.demands.stages or groups, count)
                for groups, own in counts.items()
                for count in own
                if self.demands.schedule
            ]
            why = "; ".join(filter(None, [*dict.fromkeys(tried), exact]))
            raise ConstraintError(
                f"no pipeline meets {', '.join(self.context.request.constraints)}" + (f": {why}" if why else "")
                + ". Change or leave out one of these constraints"
            )  # fmt: skip
        if exact and counts:
            self.notes.append(f"no pipeline stages: {exact}")

    def _shapes(self, groups: int, count: int) -> Iterator[Shape]:
        num_layers = len(self.context.program.layers)
        has_loss = self.context.program.has_loss_in_layers or not self.context.request.training.is_training
        return self.demands.shapes(groups, num_layers, count, has_loss=has_loss)

    def _group_counts(self) -> Iterator[int]:
        context = self.context
        for groups in self.demands.group_counts(context.num_devices, len(context.program.layers)):
            try:
                check_degrees(context.constraints, context.num_devices // groups)
            except ConstraintError:
                if self.demands.groups:
                    raise
                continue
            yield groups

    def _microbatch_counts(self, groups: int) -> Iterator[int]:
        """The numbers of microbatches that may run on so many device groups."""
        context = self.context
        demanded = context.constraints.get("microbatches")
        if isinstance(demanded, int):
            assignment = self._assignment(demanded)
            if isinstance(assignment, str):
                raise ConstraintError(f"constraint 'microbatches={demanded}': {assignment}")
            yield demanded
            return
        most = max(context.request.max_microbatches, 2 * _FIRST_MICROBATCHES * groups)
        # A microbatch is to divide over the devices of a demanded data degree.
        batch = context.program.batch_size / max(
            (dict(each.degrees).get("data", 1) for each in context.demands), default=1
        )
        count = 2
        while count <= most and batch % count == 0 and not isinstance(self._assignment(count), str):
            yield count
            count *= 2
        if count == 2:  # nothing else is possible
            yield 1

    def _assignment(self, count: int) -> TimeAssignment | str:
        if count not in self._assignments:
            self._assignments[count] = time_assignment(
                self.context.program, count, joins_outputs=True, per_microbatch=self.context.constraints.per_microbatch
            )
        return self._assignments[count]

    def _try(self, results: PipelineResults, known_s: float, groups: int, count: int) -> float:
        """Search all pipelines with so many device groups and microbatches; the seconds of the best of them."""
        context = self._contexts.setdefault(groups, self.context.on_groups(groups))
        assignment = self._assignment(count)
        assert not isinstance(assignment, str)
        known_s = min(known_s, results.hoped_s)
        least = self._least_layers(groups, count)
        bounds = {shape: least_step_s(shape, *least) for shape in self._shapes(groups, count)}
        if not any(bound_s < known_s for bound_s in bounds.values()):
            results.bounds += [ShapeBound(shape, bound_s) for shape, bound_s in bounds.items()]
            return min(bounds.values(), default=np.inf)
        hopeful = [shape for shape, bound_s in bounds.items() if bound_s < known_s]
        if self._is_too_slow(context, count, assignment, hopeful):
            results.bounds += [ShapeBound(shape, bound_s) for shape, bound_s in bounds.items() if bound_s >= known_s]
            return self._rule_out(groups, count)
        own, are_ruled_out = PipelineResults(self.schedules, self.limit_bytes), True
        for shared in shared_storage_choices(context):
            candidates = make_candidate_set(context, count, dict(assignment.factors), shared)
            if candidates is None:
                continue
            least = _least_of(candidates)
            best_s = min(known_s, own.hoped_s)
            nearer = {shape: max(bound_s, least_step_s(shape, *least)) for shape, bound_s in bounds.items()}
            shapes = [shape for shape, bound_s in nearer.items() if bound_s < best_s]
            own.bounds += [
                ShapeBound(shape, bound_s, candidates, self.demands.cuts)
                for shape, bound_s in nearer.items()
                if shape not in shapes
            ]
            left = [shape for shape in shapes if not self._is_ruled_out(candidates, shape)]
            if left:
                search_pipelines(candidates, left, self.demands.cuts, own)
            are_ruled_out &= bool(shapes) and not left
            self._least_s[groups, count] = np.minimum(self._least_s.get((groups, count), np.inf), least)
        results.merge(own)
        if are_ruled_out:
            return self._rule_out(groups, count)
        return own.hoped_s

    def _rule_out(self, groups: int, count: int) -> float:
        """Of so many device groups and microbatches, no pipeline is fast enough: what stands for its seconds."""
        self._too_slow.add((groups, count))
        return _RULED_OUT_S * (1 + _IDLE * groups)

    def _is_too_slow(
        self, context: SearchContext, count: int, assignment: TimeAssignment, shapes: Sequence[Shape]
    ) -> bool:
        """Whether no pipeline of any of these shapes is fast enough, by the compute of its layers alone."""
        if not math.isfinite(self._enough_s) or not all(map(is_small, shapes)):  # large ones take as long as a search
            return False
        tables = least_compute(context, count, assignment.factors)
        # Those that idle least come first: one that may be fast enough ends it.
        for shape in sorted(shapes, key=lambda each: (not each.record.splits_backward, -each.num_stages)):
            if not takes_longer(tables, shape, shape.actions(self.schedules), self._enough_s, self.demands.cuts):
                return False
        return True

    def _is_ruled_out(self, candidates: CandidateSet, shape: Shape) -> bool:
        """Whether no pipeline of this shape is fast enough, whatever is overlapped: its bound is then left out."""
        if not math.isfinite(self._enough_s) or not is_small(shape):
            return False
        tables = replace(candidates.least_tables, limit_bytes=self.limit_bytes)
        return takes_longer(tables, shape, shape.actions(self.schedules), self._enough_s, self.demands.cuts)

    def _least_layers(self, groups: int, count: int) -> Array:
        """Forward, and forward and backward seconds that each layer takes at least, [2, layers]: cutting a batch into
        more microbatches makes nothing faster.
        """
        forward_s, backward_s = self._contexts[groups].ideal_layers_s
        known = [least for (other, fewer), least in self._least_s.items() if other == groups and fewer <= count]
        return np.maximum.reduce([np.stack([forward_s, forward_s + backward_s]), *known])


def _least_of(candidates: CandidateSet) -> Array:
    """As `_least_layers`, of the candidates of one set."""
    by_class = {
        first: (
            min(each.cost.in_forward_s for each in own),
            min(each.cost.in_forward_s + each.cost.in_backward_s for each in own),
        )
        for first, own in candidates.by_class.items()
    }
    return np.array([by_class[first] for first in candidates.context.classes]).T


def _walk(values: list[int], attempt: Callable[[int], float]) -> None:
    """Attempt value after value as long as that is faster."""
    for before, value in itertools.pairwise(values):
        if attempt(value) >= attempt(before):
            return
