"""Which pipelines are looked at: numbers of device groups and of microbatches, the most promising ones first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError
from autopar.program import Program
from autopar.schedule import ScheduleSource, Shape, schedule_problem
from autopar.search.constraints import Constraints, LayerDemands, check_degrees
from autopar.search.microbatch import TimeAssignment, time_assignment
from autopar.search.request import SearchRequest
from autopar.search.stages.bounds import least_step_s
from autopar.search.stages.constraints import PipelineDemands
from autopar.search.stages.solve import Found, search_setting
from autopar.search.trials import CandidateCache, Setting, Task, make_setting, shared_menu
from autopar.step.prices import Prices

__all__ = ["PipelineSearch"]

Array = npt.NDArray[np.float64]

_FEW = 10  # so many settings are all looked at
_MAX_SETTINGS = 12
_BUBBLE = 2  # microbatches per device group with which the search begins


@dataclass(eq=False)
class PipelineSearch:
    """One search over pipelines; `notes` grows while it works.

    `settled` has the demands that a plan without stages can meet, by class of layers: pipelines must meet as much.
    """

    program: Program
    world_size: int
    prices: Prices
    request: SearchRequest
    source: ScheduleSource
    constraints: Constraints
    layer_demands: tuple[LayerDemands, ...]
    demands: PipelineDemands
    limit_bytes: float
    settled: Mapping[int, LayerDemands] = field(default_factory=dict[int, LayerDemands])
    notes: list[str] = field(default_factory=list[str])
    assignments: dict[int, TimeAssignment | str] = field(default_factory=dict[int, "TimeAssignment | str"])
    least: dict[tuple[int, int], Array] = field(default_factory=dict[tuple[int, int], Array])
    tasks: dict[int, tuple[Task, CandidateCache]] = field(default_factory=dict[int, "tuple[Task, CandidateCache]"])

    def run(self, known_s: float) -> Found:
        """The best pipeline, and a lower bound on all that were considered.

        Pipelines that can't be faster than `known_s`, the seconds of a plan without stages, are passed over.
        """
        found = Found(self.source, self.limit_bytes)
        settings = {groups: list(self._microbatch_counts(groups)) for groups in self._group_counts()}
        self._check_possible(settings)
        if sum(map(len, settings.values())) <= _FEW:
            for groups, counts in settings.items():
                # The most promising first: what it finds, and what its layers take, rule others out.
                for count in sorted(counts, key=lambda count: self._rank(groups, count)):
                    self._try(found, known_s, groups, count)
            found.settle()
            return found
        tried: dict[tuple[int, int], float] = {}

        def attempt(groups: int, count: int) -> float:
            if (groups, count) not in tried and len(tried) < _MAX_SETTINGS:
                tried[groups, count] = self._try(found, known_s, groups, count)
            return tried.get((groups, count), np.inf)

        firsts = {groups: _nearest(counts, _BUBBLE * groups) for groups, counts in settings.items() if counts}
        ordered = sorted(firsts)
        middle = len(ordered) // 2
        # From the middle up, and down, as long as that is faster; then so with the microbatches of the best.
        _walk(ordered[middle:], lambda groups: attempt(groups, firsts[groups]))
        _walk(ordered[middle::-1], lambda groups: attempt(groups, firsts[groups]))
        best, _ = min(tried, key=lambda key: tried[key])
        at = settings[best].index(firsts[best])
        _walk(settings[best][at:], lambda count: attempt(best, count))
        _walk(settings[best][at::-1], lambda count: attempt(best, count))
        found.settle()
        return found

    def _rank(self, groups: int, count: int) -> tuple[float, int]:
        """The most promising first, but the least first where demands have yet to be met."""
        return (abs(math.log2(count / (_BUBBLE * groups))) if self.settled else 0.0), count

    def _check_possible(self, settings: dict[int, list[int]]) -> None:
        """Raise if a pipeline is demanded but there is none; else note why there is none."""
        if any(True for groups, counts in settings.items() for count in counts for _ in self._shapes(groups, count)):
            return
        reason = self._assignment(2)
        exact = f"microbatches would not be exact: {reason}" if isinstance(reason, str) else ""
        if self.demands.needs_pipeline:
            tried = [
                schedule_problem(self.demands.schedule, groups, self.demands.stages or groups, count)
                for groups, counts in settings.items()
                for count in counts
                if self.demands.schedule
            ]
            why = "; ".join(filter(None, [*dict.fromkeys(tried), exact]))
            raise ConstraintError(
                f"no pipeline meets {', '.join(self.request.constraints)}" + (f": {why}" if why else "")
                + ". Change or leave out one of these constraints"
            )  # fmt: skip
        if exact and settings:
            self.notes.append(f"no pipeline stages: {exact}")

    def _shapes(self, groups: int, count: int) -> Iterator[Shape]:
        num_layers = len(self.program.layers)
        has_loss = bool(self.program.loss) or not self.request.training.is_training
        return self.demands.shapes(groups, num_layers, count, has_loss=has_loss)

    def _group_counts(self) -> Iterator[int]:
        for groups in self.demands.group_counts(self.world_size, len(self.program.layers)):
            try:
                check_degrees(self.constraints, self.world_size // groups)
            except ConstraintError:
                if self.demands.groups:
                    raise
                continue
            yield groups

    def _microbatch_counts(self, groups: int) -> Iterator[int]:
        """The numbers of microbatches that may run on so many device groups."""
        forced = self.constraints.get("microbatches")
        if isinstance(forced, int):
            found = self._assignment(forced)
            if isinstance(found, str):
                raise ConstraintError(f"constraint 'microbatches={forced}': {found}")
            yield forced
            return
        most = max(self.request.max_microbatches, 2 * _BUBBLE * groups)
        # A microbatch is to divide over the devices of a demanded data degree.
        batch = self.program.batch_size / max(
            (dict(each.degrees).get("data", 1) for each in self.layer_demands), default=1
        )
        count = 2
        while count <= most and batch % count == 0 and not isinstance(self._assignment(count), str):
            yield count
            count *= 2
        # One after the other is rarely any good: only where nothing else is possible and a pipeline is wanted.
        if count == 2 and self.demands.needs_pipeline:
            yield 1

    def _assignment(self, count: int) -> TimeAssignment | str:
        if count not in self.assignments:
            self.assignments[count] = time_assignment(
                self.program, count, joins_outputs=True, per_microbatch=self.constraints.per_microbatch
            )
        return self.assignments[count]

    def _task(self, groups: int) -> tuple[Task, CandidateCache]:
        if groups not in self.tasks:
            devices = self.world_size // groups
            task = Task(self.program, devices, self.prices, self.request, self.constraints, self.layer_demands, groups)
            task.settled.update(self.settled)
            self.tasks[groups] = (task, {})
        return self.tasks[groups]

    def _try(self, found: Found, known_s: float, groups: int, count: int) -> float:
        """Look at all pipelines with so many device groups and microbatches; the seconds of the best of them."""
        task, cache = self._task(groups)
        assignment = self._assignment(count)
        assert not isinstance(assignment, str)
        known_s = min(known_s, found.hoped_s)
        bounds = {
            shape: least_step_s(shape, *self._least_layers(groups, count)) for shape in self._shapes(groups, count)
        }
        if not any(bound_s < known_s for bound_s in bounds.values()):
            return min(bounds.values(), default=np.inf)
        own = Found(self.source, self.limit_bytes)
        for shared in shared_menu(task):
            setting = make_setting(task, count, dict(assignment.factors), shared, cache)
            if setting is None:
                continue
            least = self._least_of(setting)
            shapes = [s for s in bounds if max(bounds[s], least_step_s(s, *least)) < min(known_s, own.hoped_s)]
            if shapes:
                search_setting(setting, shapes, self.demands, own)
            self.least[groups, count] = np.minimum(self.least.get((groups, count), np.inf), least)
        found.merge(own)
        return own.hoped_s

    def _least_layers(self, groups: int, count: int) -> Array:
        """Forward, and forward and backward seconds that each layer takes at least, (2, layers): cutting a batch into
        more microbatches makes nothing faster.
        """
        forward_s, backward_s = self._task(groups)[0].ideal_layers_s
        known = [least for (other, fewer), least in self.least.items() if other == groups and fewer <= count]
        return np.maximum.reduce([np.stack([forward_s, forward_s + backward_s]), *known])

    def _least_of(self, setting: Setting) -> Array:
        """As `_least_layers`, of the candidates of one setting."""
        by_class = {
            first: (
                min(c.cost.in_forward_s for c in each),
                min(c.cost.in_forward_s + c.cost.in_backward_s for c in each),
            )
            for first, each in setting.by_class.items()
        }
        return np.array([by_class[first] for first in setting.task.classes]).T


def _nearest(counts: list[int], wanted: int) -> int:
    return min(counts, key=lambda count: abs(count - wanted))


def _walk(values: list[int], attempt: Callable[[int], float]) -> None:
    """Attempt value after value as long as that is faster."""
    for before, value in itertools.pairwise(values):
        if attempt(value) >= attempt(before):
            return
