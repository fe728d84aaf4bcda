"""What real steps say about predictions: how large they come out, and how far off they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.profile import ObservedStep, Profile

__all__ = ["MEMORY_ERROR", "Corrections", "corrections", "step_key"]

MEMORY_ERROR = 0.05
"""31 of 34 predicted peaks of models that the walk was not made by were off by less (`benchmarks/accuracy.py memory
--held-out`; docs/cost-model.md has those that were not).  On GPUs it is an estimate until a step has been seen."""

_LEAST = 0.01  # what a step that came out as predicted leaves


@dataclass(frozen=True)
class Corrections:
    """What a search makes of predictions.

    Args:
        memory_factor: predicted peaks times this, at least 1.
        memory_error: how far off they can be then, relative.
        step_time_error: the same of step times; 0: nothing was seen.
    """

    memory_factor: float = 1.0
    memory_error: float = MEMORY_ERROR
    step_time_error: float = 0.0


def step_key(fingerprint: str, plan_digest: str) -> str:
    """Under which key of `Profile.steps` a plan's step is kept."""
    return f"{fingerprint}/{plan_digest}"


def corrections(profile: Profile | None, fingerprint: str) -> Corrections:
    """By the steps of the program of this fingerprint; where there is none, by all steps of the profile.

    Peaks are scaled up by the largest ratio of measured over predicted bytes, never down; the error is then the largest
    that was seen.
    """
    steps = profile.steps if profile else dict[str, ObservedStep]()
    own = [step for key, step in steps.items() if key.startswith(step_key(fingerprint, ""))]
    seen: Sequence[ObservedStep] = own or list(steps.values())
    sizes = [
        step.measured_bytes / step.predicted_bytes for step in seen if step.measured_bytes and step.predicted_bytes
    ]
    times = [step.measured_s / step.predicted_s for step in seen if step.measured_s and step.predicted_s]
    factor = max([1.0, *sizes])
    return Corrections(
        factor,
        max([_LEAST, *(abs(size / factor - 1) for size in sizes)]) if sizes else MEMORY_ERROR,
        max((abs(each - 1) for each in times), default=0.0),
    )
