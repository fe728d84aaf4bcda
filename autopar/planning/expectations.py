"""What prices and memory assume of the data that a program will be trained on: routing, and lengths of documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.planning.call_plans import Call
from autopar.planning.document_lengths import (
    ONE_A_ROW,
    DocumentLengths,
    lengths_of_example,
    read_lengths,
    with_lengths,
)
from autopar.planning.imbalance import BALANCED, Imbalance, read_imbalance, with_imbalance
from autopar.program import Program
from autopar.trace import Traced

__all__ = ["Expectations", "read_expectations"]


@dataclass(frozen=True)
class Expectations:
    """Of data.

    Args:
        imbalance: of the routing of experts.
        documents: of the lengths of documents in packed rows.
    """

    imbalance: Imbalance = BALANCED
    documents: DocumentLengths = ONE_A_ROW

    def seeing(self, traced: Traced, call: Call) -> Expectations:
        """The same with what the example inputs show, of what the user said nothing of."""
        return replace(self, documents=lengths_of_example(traced, call)) if self.documents is ONE_A_ROW else self

    def priced(self, program: Program) -> Program:
        """`program`, priced for such data; its notes say what was assumed."""
        return with_lengths(with_imbalance(program, self.imbalance), self.documents)


def read_expectations(imbalance: Any, documents: Any) -> Expectations:
    """The arguments `imbalance` and `documents`.

    Raises:
        ConstraintError: one of them says nothing of the kind.
    """
    return Expectations(read_imbalance(imbalance), read_lengths(documents))
