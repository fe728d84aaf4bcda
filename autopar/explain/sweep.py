"""The same question for several values of one thing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError, QuestionError
from autopar.explain.asked import Asked, change
from autopar.explain.planner import Planner
from autopar.plan import Plan

__all__ = ["SweepRow", "sweep"]


@dataclass(frozen=True)
class SweepRow:
    """One value's plan; without one, the problem.

    `efficiency` is rows per second and device, relative to the first value's plan.
    """

    value: str
    plan: Plan | None = None
    efficiency: float = 0.0
    problem: str = ""

    @property
    def brief(self) -> str:
        """The strategy of most layers, in a few words."""
        if self.plan is None:
            return ""
        numbers = [layer.strategy for layer in self.plan.layers]
        strategy = self.plan.strategies[max(set(numbers), key=numbers.count)]
        labels = strategy.labels or ("?",) * len(strategy.mesh)
        axes = " x ".join(f"{size} {name}" for size, name in zip(strategy.mesh, labels, strict=True) if size > 1)
        stages = f"{len(self.plan.stages)} stages, " if self.plan.stages else ""
        return f"{stages}{axes or 'one device'}, ZeRO-{strategy.zero}"


def sweep(planner: Planner, asked: Asked, text: str) -> Iterator[SweepRow]:
    """A plan for each value of ``name=value,value,...``.

    Raises:
        QuestionError: the text is of another form, or a value is no value of that name.
    """
    name, separator, values = text.partition("=")
    if not separator or not values:
        raise QuestionError(f"--sweep {text!r}: write name=value,value,..., such as nodes=1,2,4,8")
    yield from _rows(planner, [(value, change(asked, f"{name}={value}")) for value in values.split(",")])


def _rows(planner: Planner, questions: Sequence[tuple[str, Asked]]) -> Iterator[SweepRow]:
    first = 0.0
    for value, asked in questions:
        try:
            plan = planner.answer(asked).plan
        except AutoparError as error:
            yield SweepRow(value, problem=f"{type(error).__name__}: {str(error).split('. ')[0]:.90}")
            continue
        rate = plan.samples_per_step / plan.step_time_s / plan.world_size
        first = first or rate
        yield SweepRow(value, plan, rate / first)
