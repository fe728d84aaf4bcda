"""The search over plans without stages: trials with ever more microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from autopar.errors import ConstraintError
from autopar.search.finals import fastest_draws
from autopar.search.microbatch import TimeAssignment, time_assignment
from autopar.search.trials import CandidateCache, Task, Trial, make_trial, shared_menu

__all__ = ["FlatSearch"]

_WORTH = 0.01  # share of time or memory that more microbatches must gain for still more to be tried


class FlatSearch:
    """Trials without stages, with ever more microbatches.

    Prices are such that cutting a batch in two makes nothing faster: more microbatches only save memory.  So there is
    no need for more where the fastest path of the last number fits, or where it is slower than a rival that fits, or
    once they add (next to) nothing whatever the limit is.
    """

    def __init__(self, task: Task, limit_bytes: float) -> None:
        self.trials: list[Trial] = []
        self._task = task
        self._limit_bytes = limit_bytes
        self._counts = _microbatch_counts(task)
        self._cache: CandidateCache = {}
        self._last: list[Trial] = []

    @property
    def best_s(self) -> float:
        """Seconds of the fastest path that fits, infinite if none does."""
        fitting = ((trial, trial.paths.best(self._limit_bytes)) for trial in self.trials)
        return min((trial.paths.time_s[index] for trial, index in fitting if index >= 0), default=math.inf)

    def begin(self) -> None:
        """The first trials."""
        count, assignment = next(self._counts)
        self._try(count, assignment)

    def go_on(self, rival_s: float) -> None:
        """The others, as far as they may be faster than what fits and than a pipeline of so many seconds."""
        if not self.trials:
            return
        for count, assignment in self._counts:
            if self._is_settled(rival_s) or not self._try(count, assignment):
                return

    def _try(self, count: int, assignment: TimeAssignment) -> bool:
        """Whether trials with so many microbatches add anything."""
        menu = shared_menu(self._task)
        made = [make_trial(self._task, count, dict(assignment.factors), shared, self._cache) for shared in menu]
        self._last = [trial for trial in made if trial is not None]
        if self.trials and not any(_adds(trial, self.trials) for trial in self._last):
            return False
        self.trials += self._last
        return True

    def _is_settled(self, rival_s: float) -> bool:
        """Whether, by sums of seconds and by what is left of them if all that can be hidden is, the best path of the
        last trials fits, or is slower than the rival.
        """
        ranked = [fastest_draws(trial) for trial in self._last]
        if min(least_s for (_, (least_s, _)) in ranked) >= rival_s:
            return True
        return all(min(draws[which] for draws in ranked)[1] <= self._limit_bytes for which in (0, 1))


def _microbatch_counts(task: Task) -> Iterator[tuple[int, TimeAssignment]]:
    """Numbers of microbatches that are exact, with how."""
    forced = task.constraints.get("microbatches")
    batch = task.program.batch_size
    if isinstance(forced, int):
        found = time_assignment(task.program, forced, per_microbatch=task.constraints.per_microbatch)
        if isinstance(found, str):
            raise ConstraintError(f"constraint 'microbatches={forced}': {found}")
        yield forced, found
        return
    count = 1
    while count <= task.request.max_microbatches and (count == 1 or batch % count == 0):
        found = time_assignment(task.program, count, per_microbatch=task.constraints.per_microbatch)
        if isinstance(found, str):
            task.notes.append(
                f"no gradient accumulation: {found}" if count == 2 else f"at most {count // 2} microbatches: {found}"
            )
            return
        yield count, found
        count *= 2 if task.request.training.is_training else task.request.max_microbatches + 1


def _adds(trial: Trial, known: list[Trial]) -> bool:
    """Whether a path of `trial` is faster than all known paths that take no more memory, tolerances apart."""
    time = np.concatenate([other.paths.time_s for other in known])
    peak = np.concatenate([other.paths.peak_bytes for other in known])
    order = np.argsort(peak)
    fastest = np.concatenate([[np.inf], np.minimum.accumulate(time[order])])
    allowed = np.array(trial.paths.peak_bytes) * (1 + _WORTH)
    rivals = fastest[np.searchsorted(peak[order], allowed, side="right")]
    return bool((np.array(trial.paths.time_s) < rivals * (1 - _WORTH)).any())
