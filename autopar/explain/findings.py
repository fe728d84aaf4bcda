"""The whole answer to one question: what is printed, written as JSON and shown on the page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autopar.explain.alternatives import Alternative
from autopar.explain.explanation import Explanation
from autopar.explain.planner import Answer
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.step.simulation.simulate import simulate_step
from autopar.timeline import StepTimeline

__all__ = ["Findings"]


@dataclass(frozen=True, eq=False)
class Findings:
    """A plan and what there is to say about it.

    Args:
        target: the model, as it was named.
        answer: the plan and what it was made from.
        explanation: why it is so.
        forced: other choices, each forced by a constraint, if they were priced.
        what_if: what was changed, and the plan for that.
        sweep: what was swept over ("nodes=1,2"), and a plan per value; "" and nothing without one.
    """

    target: str
    answer: Answer
    explanation: Explanation
    forced: tuple[Alternative, ...] = ()
    what_if: tuple[Alternative, ...] = ()
    sweep: tuple[str, tuple[Alternative, ...]] = ("", ())

    @cached_property
    def timeline(self) -> StepTimeline:
        """The step by the plan, simulated."""
        answer = self.answer
        overhead = answer.prices.cluster.device.overhead_bytes
        return simulate_step(
            answer.program, answer.plan, answer.prices, answer.training, schedule_actions, overhead_bytes=overhead
        )
