"""The program that a plan runs: the traced one, changed as the plan decides."""

from __future__ import annotations

from autopar.plan import Decisions
from autopar.program import Program
from autopar.step.variants.logits import in_pieces
from autopar.step.variants.statistics import with_statistics
from autopar.step.variants.tail import with_tail

__all__ = ["as_decided"]


def as_decided(program: Program, decisions: Decisions) -> Program:
    """`program` with statistics, a tail and logits in pieces as `decisions` say.

    Raises:
        PlanMismatchError: they name ops that the program does not have.
    """
    made = with_tail(with_statistics(program, decisions.statistics), decisions.late_ops)
    return in_pieces(made, decisions.piece_tokens)
