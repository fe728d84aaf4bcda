"""The last choice of a search: what it found, ranked by simulated steps.

A search minimises sums of seconds; what communication hides beside compute is only seen when a step is simulated.
Everything without stages that may turn out fastest is: the paths that no other beats in memory and seconds, be it their
sum or what is left of it by estimate (`hiding`).  Which ones
these are doesn't depend on the memory limit, so more memory never gives a slower plan.  Which pipelines a search looks
at does depend on it; of them those with the least sums are simulated: the best of each of a few numbers of device
groups and microbatches, where that takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.plan import Plan
from autopar.search.request import SearchRequest
from autopar.search.stages.estimates import is_small
from autopar.search.stages.solve import Found, Staged
from autopar.search.trials import Trial
from autopar.step.pricing import predict

__all__ = ["Final", "best_final"]

_PIPELINES = 3  # that are simulated, where that takes no time
_DOUBT = 1.15  # prices may be so far off: who times layers wants those of pipelines that seem slower, too


@dataclass(frozen=True, eq=False)
class Final:
    """A plan with simulated seconds; limits, gap, constraints and notes are the caller's to fill in."""

    plan: Plan
    notes: Sequence[str]

    @property
    def order(self) -> tuple[float, float]:
        """Fastest first, of equals the smallest."""
        return self.plan.step_time_s, self.plan.peak_memory_bytes


def best_final(
    trials: Iterable[Trial], found: Found | None, limit_bytes: float, batch_bytes: float, request: SearchRequest
) -> Final | None:
    """The fastest plan that fits, or None if none does.

    What a search counts as memory is all that a device holds at some moment of the step, which is more than it holds at
    any one moment; where the walk through the step finds more all the same, a plan doesn't fit.  `limit_bytes` leaves
    out the batch, of `batch_bytes`, which the walk counts.

    Raises:
        InfeasibleError: there are pipelines only, and they fit as the search counts, but not as the walk does.
    """
    best: Final | None = None
    too_large: list[float] = []
    allowed_bytes = limit_bytes + batch_bytes
    settings: set[tuple[int, int]] = set()
    flats = list(_flat_draws(trials, limit_bytes))
    draws = [*flats, *_pipeline_draws(found, limit_bytes)]
    for draw in sorted(draws, key=lambda draw: draw.visible_s):
        doubt = _DOUBT if draw.staged is not None and request.on_final is not None else 1.0
        if best is None or (draw.least_s <= doubt * best.plan.step_time_s and not _is_late(draw.staged, settings)):
            final = draw.simulate()
            if final.plan.peak_memory_bytes > allowed_bytes:
                too_large.append(final.plan.peak_memory_bytes)
                continue
            if draw.staged is not None:
                settings.add(_setting_of(draw.staged))
            if request.on_final is not None:
                request.on_final(final.plan)
            best = final if best is None or final.order < best.order else best
    if best is None and too_large and not flats:
        doubt = 1 + request.memory_error
        raise InfeasibleError(
            f"no plan fits into {allowed_bytes * doubt / 2**30:.6g} GiB per device: a step of "
            f"the smallest pipeline that came near takes {min(too_large) * doubt / 2**30:.6g} GiB. Use more devices or "
            "microbatches, or allow more memory"
        )
    return best


@dataclass(frozen=True, eq=False)
class _Draw:
    """What may be the best: it takes `least_s` if all collectives of parameters are hidden, `visible_s` by estimate."""

    least_s: float
    visible_s: float
    trial: Trial | None
    path: int
    staged: Staged | None

    def simulate(self) -> Final:
        if self.trial is not None:
            task, decisions = self.trial.setting.task, self.trial.decisions(self.path)
        else:
            assert self.staged is not None
            task, decisions = self.staged.setting.task, self.staged.decisions
        request = task.request
        prediction = predict(task.program, decisions, task.prices, request.training, request.schedules, task.facts)
        return Final(Plan(decisions, prediction, memory_error=request.memory_error), task.notes)


def _flat_draws(trials: Iterable[Trial], limit_bytes: float) -> Iterator[_Draw]:
    for trial in trials:
        for path in trial.front:
            if trial.paths.peak_bytes[path] <= limit_bytes:
                least_s = trial.paths.time_s[path] - _parameter_comm_s(trial, path)
                yield _Draw(least_s, float(trial.visible_s[path]), trial, path, None)


def fastest_draws(trial: Trial) -> tuple[tuple[float, float], tuple[float, float]]:
    """(seconds, peak bytes) of the trial's fastest path, whatever memory there is: by its sum of seconds, and by what
    is left of it if all that can be hidden is.
    """
    peak = trial.paths.peak_bytes
    by_sum = min((trial.paths.time_s[path], peak[path]) for path in trial.front)
    return by_sum, min((draw.least_s, peak[draw.path]) for draw in _flat_draws([trial], math.inf))


def _pipeline_draws(found: Found | None, limit_bytes: float) -> Iterator[_Draw]:
    fitting = [staged for staged in found.simulated if staged.peak_bytes <= limit_bytes] if found else []
    for staged in fitting:
        costs = [each[index].cost for each, index in zip(staged.setting.candidates, staged.path, strict=True)]
        least_s = staged.step_s - sum(cost.parameter_comm_s for cost in costs)
        yield _Draw(least_s, staged.step_s, None, 0, staged)


def _setting_of(staged: Staged) -> tuple[int, int]:
    return staged.shape.num_groups, staged.shape.num_microbatches


def _is_late(staged: Staged | None, settings: Set[tuple[int, int]]) -> bool:
    """Whether enough pipelines were simulated, which have these settings."""
    if staged is None:
        return False
    return _setting_of(staged) in settings or len(settings) >= (_PIPELINES if is_small(staged.shape) else 1)


def _parameter_comm_s(trial: Trial, path: int) -> float:
    indices: list[int] = trial.paths.paths[path].tolist()
    chosen = zip(trial.setting.candidates, indices, strict=True)
    return sum(candidates[index].cost.parameter_comm_s for candidates, index in chosen)
