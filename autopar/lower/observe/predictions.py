"""Predictions for the plan that a module runs, to compare measured steps with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.lower.program.program_text import CollectiveSeconds
from autopar.timeline import StepTimeline

__all__ = ["Predictions"]


@dataclass(frozen=True)
class Predictions:
    """Prices, and what follows from them.

    Args:
        collective_s: seconds of a collective.
        timeline: one training step, simulated on first use.
    """

    collective_s: CollectiveSeconds
    timeline: Callable[[], StepTimeline]
