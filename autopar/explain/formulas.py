"""`--formulas`: what prices the ops and collectives of a plan, as formulas of the degrees and the microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.closed_forms import collective_form, describe, formula_text
from autopar.explain.planner import Answer
from autopar.step.costs.plan_collectives import plan_collectives

__all__ = ["describe_formulas"]

_HEAD = """Formulas of the roofline, for one microbatch on one device; they hold around this plan's degrees.
What is measured (by a profile, or timed layers) is read off its curves instead."""


def describe_formulas(answer: Answer) -> str:
    """The closed forms of every strategy of the plan, on the first layer that runs it, and of its collectives."""
    return "\n".join([_HEAD, *_layers(answer), *_collectives(answer)]) + "\n"


def _layers(answer: Answer) -> Iterator[str]:
    plan, program = answer.plan, answer.program
    kinds = {layer.kind: layer for layer in program.kinds}
    seen: set[tuple[int, int]] = set()
    for planned in plan.layers:
        if (planned.kind, planned.strategy) not in seen:
            seen.add((planned.kind, planned.strategy))
            strategy = plan.strategies[planned.strategy]
            yield describe(
                program, kinds[planned.kind], strategy, answer.question.cluster.device, plan.num_microbatches
            )  # fmt: skip


def _collectives(answer: Answer) -> Iterator[str]:
    runs = plan_collectives(answer.program, answer.plan, answer.training)
    yield "collectives, seconds of a buffer of n bytes"
    for kind, axis in sorted({(run.kind, run.axis) for run in runs if run.axis.size > 1}):
        form = collective_form(answer.question.cluster, kind, axis)
        yield f"  {kind} over {axis.size} ranks, {axis.stride} apart = {formula_text(form)}"
