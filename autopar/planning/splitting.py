"""What is done to a program whose batch is more than the sum of its microbatches, so that it can run in microbatches.

A loss that multiplies means over the whole batch, such as a balance loss of experts, is computed once from the sums
of all microbatches (`microbatches.late_ops`), exactly; or, where the user allows it by name, of each microbatch
alone (`autopar.search.microbatches.batch_statistics`).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import ConstraintError
from autopar.plan import Plan
from autopar.program import Program
from autopar.schedules import find_schedule
from autopar.search import SearchRequest
from autopar.search.microbatches.batch_statistics import program_with_statistics
from autopar.search.microbatches.late_ops import late_program
from autopar.search.microbatches.time_assignment import PER_MICROBATCH, time_assignment
from autopar.search.settings.constraints import Constraints, parse_constraints
from autopar.step.variants.logits import in_pieces

__all__ = ["noted", "splittable", "variant_like"]


def splittable(program: Program, request: SearchRequest, num_devices: int) -> Program:
    """`program`, or what computes the same of microbatches where it does not; as the request's constraints allow.

    Raises:
        ConstraintError: a schedule is demanded that begins backwards before the loss can be known.
    """
    if not (program.training and program.loss and request.training.is_training):
        return program
    constraints = parse_constraints(request.constraints, num_devices)
    demanded = constraints.get("microbatches")
    count = _some_count(program, demanded if isinstance(demanded, int) else 0)
    patterns = constraints.per_microbatch
    if count == 1 or not isinstance(time_assignment(program, count, per_microbatch=patterns), str):
        return program
    made = program_with_statistics(program, count, patterns) if patterns else None
    if made is None:
        made = late_program(program, count, patterns) or program
        _check_schedule(program, made, count, constraints)
    return made


def noted(plan: Plan, program: Program) -> Plan:
    """`plan` of `program`, saying what a tail means for it."""
    if plan.num_microbatches == 1 or not program.is_loss_late:
        return plan
    first = program.tail[0]
    note = (
        f"the loss is computed from sums over all {plan.num_microbatches} microbatches ({first.target}"
        f"{' at ' + first.source if first.source else ''} and what follows), so that it is that of the whole batch: "
        "all forwards come before the first backward, and what they keep for it is in memory at once"
    )
    return replace(plan, notes=(*plan.notes, note))


def variant_like(program: Program, like: Program) -> Program:
    """`program`, of the same model on other inputs, with what `like` has: statistics, a tail, logits in pieces."""
    made = program
    if program.training and like.statistics:
        made = program_with_statistics(program, _some_count(program), ("*",)) or program
    if program.training and like.tail:
        made = late_program(program, _some_count(program), ()) or program
    return in_pieces(made, like.piece_tokens)


def _some_count(program: Program, demanded: int = 0) -> int:
    """The number of microbatches with which to ask whether any are exact; 1 if the batch does not divide."""
    rows = program.batch_size
    return demanded or next((count for count in (2, 3, 5, 7) if rows % count == 0), 1)


def _check_schedule(program: Program, late: Program, count: int, constraints: Constraints) -> None:
    schedule = constraints.get("schedule")
    if not (isinstance(schedule, str) and late.is_loss_late) or find_schedule(schedule).forwards_first:
        return
    first = late.tail[0]
    where = f" at {first.source}" if first.source else ""
    allowed = program_with_statistics(program, count, ("batch_statistic",)) is not None
    instead = (
        f", or allow it to be that of each microbatch with the constraint 'batch_statistic: {PER_MICROBATCH}', which "
        "trains something else than one device does"
    )
    raise ConstraintError(
        f"schedule={schedule} begins backward passes before all forward passes have ended, but this loss is computed "
        f"from sums over the whole batch ({first.target}{where}): ask for schedule=gpipe{instead if allowed else ''}"
    )
