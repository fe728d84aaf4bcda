"""The settings of a search: constraints, memory limit, training, and limits on its effort."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.errors import DeadlineError, InfeasibleError
from autopar.placement import Layout
from autopar.plan import Decisions, Plan
from autopar.schedules.action_lists import ScheduleSource
from autopar.search.settings.known_layers import KnownLayers
from autopar.step.training import TrainingSpec

__all__ = ["MEMORY_ERROR", "ConsideredPlan", "DeferredGaps", "NoMatchError", "SearchRequest"]

MEMORY_ERROR = 0.05
"""31 of 34 predicted peaks of models that the walk was not made by were off by less (`benchmarks/accuracy.py memory
--held-out`; docs/accuracy.md has those that were not).  On GPUs it is an estimate."""


class NoMatchError(InfeasibleError):
    """A search with a rival found nothing that could be faster; who names a rival catches it."""


@dataclass(frozen=True)
class ConsideredPlan:
    """A plan that a search looked at: predicted seconds of a step, peak bytes per device, and what most layers do.

    Without `is_simulated` these are sums, from which overlapped communication is not subtracted.
    """

    step_time_s: float
    peak_memory_bytes: float
    what: str
    is_simulated: bool = False


@dataclass(eq=False)
class DeferredGaps:
    """Optimality gaps that are computed only once one of several plans is chosen: bounds of pipelines may
    take as long as the search itself.
    """

    _computations: dict[int, tuple[Decisions, Callable[[], float]]] = field(
        default_factory=dict[int, "tuple[Decisions, Callable[[], float]]"]
    )

    def defer(self, decisions: Decisions, compute: Callable[[], float]) -> None:
        """`compute` gives the gap of the plan with these decisions."""
        self._computations[id(decisions)] = decisions, compute

    def fill_in(self, plan: Plan) -> Plan:
        """The plan with its gap, and how long that took."""
        if id(plan.decisions) not in self._computations:
            return plan
        started = time.perf_counter()
        gap = self._computations[id(plan.decisions)][1]()
        took = ("bounds", time.perf_counter() - started)
        return replace(plan, optimality_gap=gap, planning_s=(*plan.planning_s, took))


@dataclass(frozen=True)
class SearchRequest:
    """What to search for.

    Args:
        memory_limit_bytes: bytes per device that the plan may use; None: what the prices say that a device
            has.
        training: how the program is trained: the bytes of optimizer states and gradients.
        constraints: the user's texts, see `autopar.search.settings.constraints`.
        max_microbatches: the largest number of microbatches that is tried.
        max_axes: the largest number of mesh axes of a layer.
        schedules: where the action lists of pipeline schedules come from; None: no pipeline is considered.
        stored: where the caller keeps parameters, and wants their gradients: (name in the module, mesh, layout on it).
            Of those that it does not name, storage is part of the search.
        any_batch: leave a batch whole that a demanded data degree does not divide, with a note, instead of refusing
            it: for a caller whose last batch is smaller.
        memory_error: how far predicted peaks can be off, relative: a plan must fit with that added.
        rival_s: seconds of a plan that is known, as `plan_selection.preferred_s` counts them: what can't be faster is
            passed over (`NoMatchError`), and the gap of a plan that is slower is not sought.
        deadline: when a search that has not ended stops, by `time.perf_counter`, or a few seconds later.
        known: what searches with the same prices share, such as one of compiled layers and one of eager ones.
        gaps: where gaps are left to be sought later; None: each search seeks its own.
        on_final: is called with plans whose layers are worth timing, as a timed one may be the fastest: the chosen one,
            and those that came near; of pipelines with equal numbers of device groups and microbatches those that were
            the best so far.  With it a search looks at, and simulates, more.
        on_considered: is called with plans that the search considered: those that were simulated, other fast ones, and
            a sample of the rest.
    """

    memory_limit_bytes: float | None = None
    training: TrainingSpec = field(default_factory=TrainingSpec)
    constraints: tuple[str, ...] = ()
    max_microbatches: int = 16
    max_axes: int = 2
    schedules: ScheduleSource | None = None
    stored: tuple[tuple[str, tuple[int, ...], Layout], ...] = ()
    any_batch: bool = False
    memory_error: float = 0.0
    rival_s: float = math.inf
    deadline: float = field(default=math.inf, compare=False)
    known: KnownLayers = field(default_factory=KnownLayers, compare=False, repr=False)
    gaps: DeferredGaps | None = field(default=None, compare=False, repr=False)
    on_final: Callable[[Plan], None] | None = None
    on_considered: Callable[[ConsideredPlan], None] | None = None

    def check_time(self) -> None:
        """Raise `DeadlineError` if the deadline is over."""
        if time.perf_counter() > self.deadline:
            raise DeadlineError("the search was stopped at its deadline, before it found a plan")
