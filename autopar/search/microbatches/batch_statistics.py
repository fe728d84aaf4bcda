"""Which products of statistics may be those of microbatches where a user allows it (`variants.statistics`)."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.placement import PARTIAL, REPLICATE
from autopar.program import Program
from autopar.search.microbatches.time_assignment import time_assignment
from autopar.search.microbatches.time_problem import (
    TimeConstraint,
    TimeProblem,
    build_problem,
    propagate_forward,
    without_whole_batches,
)
from autopar.step.variants.statistics import with_statistics

__all__ = ["program_with_statistics"]


def program_with_statistics(program: Program, num_microbatches: int, patterns: Sequence[str]) -> Program | None:
    """`program` with the ops that let so many microbatches run if what `patterns` name takes each for the whole batch;
    None if that is not enough, or not needed.
    """
    names: set[str] = set()
    while True:
        made = with_statistics(program, names)
        problem = without_whole_batches(build_problem(made, num_microbatches, patterns))
        stuck = propagate_forward(problem)
        if stuck is None or stuck.op is None:
            break
        same_ops = _ops_at_same_place(made, stuck.op.name)
        if same_ops <= names or not _multiplies_statistics(problem, stuck):
            return None
        names |= same_ops
    if not names or isinstance(time_assignment(made, num_microbatches, per_microbatch=patterns), str):
        return None
    return made


def _ops_at_same_place(program: Program, name: str) -> set[str]:
    """The op of the first layer of its kind that has this name, and those at its place in other layers of the kind."""
    kind, place = next(
        (layer.kind, place) for layer in program.kinds for place, op in enumerate(layer.ops) if op.name == name
    )
    return {layer.ops[place].name for layer in program.layers if layer.kind == kind}


def _multiplies_statistics(problem: TimeProblem, stuck: TimeConstraint) -> bool:
    """Whether one of what an op reads is a sum without gradient, and another one a sum with one."""
    sums = [v for v in stuck.operands if PARTIAL in problem.domains[v] and REPLICATE not in problem.domains[v]]
    has_gradient = [variable in problem.differentiable for variable in sums]
    return any(has_gradient) and not all(has_gradient)
