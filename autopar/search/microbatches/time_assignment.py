"""Whether a program may run in microbatches, and how: an assignment to the axis in time.

Microbatches are a mesh axis in time, outside all device axes (docs/architecture.md).  Unlike on an axis of devices,
nothing can be communicated along it; only these moves are possible:

* a whole value without gradient is sliced (``R -> S(d)``) or read as it is (``R -> R``, or ``R -> B``, which is the
  same for a value without gradient);
* a whole value is added to a sum of terms by the first microbatch alone (``R -> P`` without gradient; ``B -> P`` of
  what is made of parameters alone);
* a parameter is read whole by every microbatch and collects the terms of its gradient (``R -> B``);
* the loss ends as a sum of terms (``P``), which the runtime adds up; without a loss, outputs that carry a gradient
  end as slices (``S(d)``), which the runtime joins, and whose gradients it slices, and single numbers as such a sum.

Ops that need the whole batch may take each microbatch for it where the user says so by name (``"batch_norm:
per_microbatch"``).  The result differs from one device's, so it is never chosen without that constraint, and the plan
says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.program import Op, Program
from autopar.search.microbatches.time_problem import (
    build_problem,
    choose,
    narrow,
    only_rows,
    option_per_microbatch,
    propagate_forward,
    without_whole_batches,
)

__all__ = ["PER_MICROBATCH", "TimeAssignment", "time_assignment", "why_not_row_by_row"]

PER_MICROBATCH = "per_microbatch"  # the constraint: "batch_norm: per_microbatch"


@dataclass(frozen=True)
class TimeAssignment:
    """A way to run in microbatches, exact unless `notes` say where not.

    Args:
        factors: layer kind -> per op, the factor that microbatches split (``"-"``: whole in each of them).
        notes: what is not exact, because the user named it.
    """

    factors: Mapping[int, tuple[str, ...]] = field(hash=False)
    notes: tuple[str, ...] = ()


def time_assignment(
    program: Program, num_microbatches: int, *, joins_outputs: bool = False, per_microbatch: Sequence[str] = ()
) -> TimeAssignment | str:
    """Per layer kind and op the factor that `num_microbatches` split, or why that would not be exact.

    Args:
        program: what is to run.
        num_microbatches: into how many slices its batch is to be cut.
        joins_outputs: the runtime joins differentiable outputs of a program that has no loss.
        per_microbatch: patterns of ops or modules that may take each microbatch for the whole batch.

    >>> time_assignment(program, 1).factors  # doctest: +SKIP
    {0: (), 1: ()}
    """
    if num_microbatches == 1:
        return TimeAssignment({layer.kind: () for layer in program.kinds})
    if not (program.loss or joins_outputs):
        return (
            "the caller computes the loss from whole outputs, so that microbatches can't take turns: return it from "
            "forward as 'loss', or give loss_fn="
        )
    problem = build_problem(program, num_microbatches, per_microbatch)
    stuck = propagate_forward(problem)
    blocked = stuck.op if stuck is not None else narrow(problem, problem.constraints)
    if blocked is None:
        blocked = next((c.op for c in problem.constraints if not choose(problem, c)), None)
    if blocked is not None:
        return _describe(_first_coupling(program, num_microbatches, per_microbatch) or blocked, num_microbatches)
    chosen = {(c.kind, c.op.name): c.options[0].factor for c in problem.constraints if c.op is not None}
    factors = {layer.kind: tuple(chosen[layer.kind, op.name] for op in layer.ops) for layer in program.kinds}
    return TimeAssignment(factors, tuple(_approximations(program, factors, num_microbatches)))


def why_not_row_by_row(program: Program) -> str:
    """Why computing each row of the batch by itself would not be exact; ``""`` if it is, or if there is one row only.

    That is more than to run in as many microbatches, which may be slices of other dims than that of rows, and compute
    what they need of the whole batch.
    """
    rows = program.batch_size
    if rows < 2:
        return ""
    problem = without_whole_batches(build_problem(program, rows, ()))
    for layer in program.layers:
        for position, name in enumerate(layer.inputs):
            if name in program.inputs and program.type_of(name).shape[:1] == (rows,):
                only_rows(problem, (layer.kind, "input", position, 0))
    stuck = propagate_forward(problem)
    return "" if stuck is None else _describe(stuck.op, rows)


def _approximations(program: Program, factors: Mapping[int, tuple[str, ...]], num_microbatches: int) -> Iterator[str]:
    places = {
        layer.kind: [
            place
            for place, (op, factor) in enumerate(zip(layer.ops, factors[layer.kind], strict=True))
            if (option := option_per_microbatch(op)) is not None and option.factor == factor
        ]
        for layer in program.kinds
    }
    inexact = [layer.ops[place] for layer in program.layers for place in places[layer.kind]]
    if inexact:
        first = inexact[0]
        others = f" and {len(inexact) - 1} more" if len(inexact) > 1 else ""
        yield (
            f"not what one device computes with the whole batch, as {PER_MICROBATCH!r} allows: {first.target} "
            f"({first.module or first.name}{others}) uses the statistics of each of {num_microbatches} microbatches"
            + (", and each updates its running statistics" if len(first.results) > 1 else "")
        )


def _first_coupling(program: Program, num_microbatches: int, per_microbatch: Sequence[str]) -> Op | None:
    """The first op that slices of the inputs don't get through, if nothing is computed redundantly."""
    stuck = propagate_forward(without_whole_batches(build_problem(program, num_microbatches, per_microbatch)))
    return None if stuck is None else stuck.op


def _describe(op: Op | None, num_microbatches: int) -> str:
    if op is None:
        return f"no exact way to run in {num_microbatches} microbatches was found"
    where = ", ".join(part for part in (op.source, op.module) if part)
    name = op.target.partition(".")[2]
    remedy = (
        f"the constraint '{name}: {PER_MICROBATCH}' would let it take each microbatch for the whole batch"
        if option_per_microbatch(op) is not None
        else "if it compares samples with each other, no constraint can allow it: with fewer to compare, the model "
        "would learn something else"
    )
    return (
        f"{num_microbatches} microbatches would not be exact: {op.target} ({op.name}"
        f"{' at ' + where if where else ''}) needs the whole batch at once, or its batch does not divide; {remedy}"
    )
