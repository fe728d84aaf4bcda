"""How long the documents of packed rows are expected to be: what prices assume of attention that keeps them apart.

Attention to n documents of l_1 .. l_n tokens meets ``sum(l_i ** 2)`` pairs of tokens, not the square of the row.  Over
the tokens of a row that is ``sum(l_i ** 2) / sum(l_i)`` for each: the tokens of a document of which a token is part, in
the mean over tokens.  It comes from a number or lengths that the user gives, or from the example inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from autopar.balance.lengths import Lengths
from autopar.errors import ConstraintError, InputShapeError, LengthError
from autopar.ops.attention import DOCUMENTS, with_document_length
from autopar.ops.registry import with_rule
from autopar.planning.call_plans import Call
from autopar.program import Op, Program
from autopar.trace import Traced
from autopar.trace.evaluation import run_op

__all__ = ["ONE_A_ROW", "DocumentLengths", "ExpectedDocuments", "lengths_of_example", "read_lengths", "with_lengths"]

ExpectedDocuments = float | str | Path | Iterable[int] | Lengths | None
"""What users pass as ``documents``; see `read_lengths`."""

_QUANTILES = 1000
"""That stand for a distribution: the mean square of a lognormal one (sigma 1.5) is within 2 % of that of 10,000."""


@dataclass(frozen=True)
class DocumentLengths:
    """What is expected of documents.

    Args:
        what: as the plan says it.
        lengths: tokens of equally frequent documents; none: a document is a row.
        is_default: the user gave no value.
    """

    what: str
    lengths: tuple[float, ...] = ()
    is_default: bool = False

    def around_a_token(self, row: int) -> float:
        """Tokens of the document that a token is part of, the mean over tokens, in rows of so many tokens."""
        if not self.lengths:
            return float(row)
        cut = np.minimum(self.lengths, row)
        return float((cut**2).sum() / cut.sum())


ONE_A_ROW = DocumentLengths("of one document a row", is_default=True)


def read_lengths(given: Any) -> DocumentLengths:
    """The argument `documents`: None, a number of tokens, lengths, a `Lengths`, or the path of a file of lengths.

    Raises:
        ConstraintError: it is none of these.
    """
    if given is None:
        return ONE_A_ROW
    try:
        if isinstance(given, str | Path) and not _is_number(given):
            return DocumentLengths(f"of the lengths in {given}", _drawn(Lengths.read(given)))
        if isinstance(given, Lengths):
            return DocumentLengths(f"of these lengths: {given}", _drawn(given))
        if isinstance(given, str | Path | int | float):
            lengths = (float(str(given)),)
            what = f"of {lengths[0]:,g} tokens each"
        else:
            lengths = tuple(map(float, given))
            what = f"of the {len(lengths):,} lengths given"
    except (LengthError, TypeError, ValueError) as error:
        raise _refusal(given, f": {error}") from error
    if not lengths or not all(1 <= length < float("inf") for length in lengths):
        raise _refusal(given)
    return DocumentLengths(what, lengths)


def _is_number(text: str | Path) -> bool:
    try:
        return bool(float(str(text))) or True
    except ValueError:
        return False


def _refusal(given: Any, reason: str = "") -> ConstraintError:
    return ConstraintError(
        f"documents={given!r:.80} says nothing of how long documents are{reason}: write a number of tokens, such as "
        "4096; lengths, such as [512, 4096, 30000]; an autopar.balance.Lengths; or a file with one length a line"
    )


def _drawn(given: Lengths) -> tuple[float, ...]:
    low, high = float(given.quantiles[0]), float(given.quantiles[-1])
    shares = (low + (place + 0.5) / _QUANTILES * (high - low) for place in range(_QUANTILES))
    return tuple(map(given.quantile, shares))


def lengths_of_example(traced: Traced, call: Call) -> DocumentLengths:
    """Those of the documents in the example inputs, as the program itself numbers them; `ONE_A_ROW` where it can't be
    seen: there is no attention by documents, or the example has no values (meta device).
    """
    op = next((op for layer in traced.program.layers for op in layer.ops if op.target == DOCUMENTS), None)
    if op is None:
        return ONE_A_ROW
    try:
        inputs = dict(zip(traced.program.inputs, traced.flatten_inputs(*call), strict=True))
        ids = _evaluated(traced, inputs, op.operands[3])
    except (InputShapeError, KeyError, RuntimeError):
        return ONE_A_ROW
    rows = ids.reshape(-1, ids.shape[-1])
    numbers = (cast("list[int]", cast("Any", row).tolist()) for row in rows)
    lengths = [count for row in numbers for count in Counter(row).values()]
    what = f"as in the example inputs: {len(lengths) / len(rows):,.3g} a row, the longest of {max(lengths):,} tokens"
    return DocumentLengths(what, tuple(map(float, lengths)), is_default=True)


def _evaluated(traced: Traced, inputs: dict[str, Tensor], name: str) -> Tensor:
    """A value that is computed of integers alone, on the CPU.

    Raises:
        KeyError: it is computed of something that isn't at hand.
    """
    values: dict[str, Tensor] = {**traced.constants, **inputs}
    ops = (*traced.program.hoisted, *(op for layer in traced.program.layers for op in layer.ops))
    producers = {result: op for op in ops for result in op.results}

    def find(value: str) -> Tensor:
        if value in values:
            if values[value].device.type == "meta":
                raise KeyError(value)
            return values[value].cpu()
        op = producers[value]
        results = run_op(op, {each: find(each) for each in op.operands})
        values.update(zip(op.results, results, strict=True))
        return values[value]

    with torch.no_grad():
        return find(name)


def with_lengths(program: Program, expected: DocumentLengths) -> Program:
    """`program`, whose attention by documents is priced for these; as it is where it has none."""
    rows = {
        program.type_of(op.operands[1]).shape[2]
        for layer in program.kinds
        for op in layer.ops
        if op.target == DOCUMENTS
    }
    if not rows:
        note = "documents: no attention of this program keeps documents apart, so their lengths change nothing"
        return program if expected.is_default else replace(program, notes=(*program.notes, note))
    note = f"documents: attention is priced for documents {expected.what}"
    mean = ", ".join(f"{expected.around_a_token(row):,.0f} of {row:,}" for row in sorted(rows))
    note += f" (a token's document has {mean} tokens on average)" if expected.lengths else ""

    def change(op: Op) -> Op:
        if op.target != DOCUMENTS or not expected.lengths:
            return op
        made = with_document_length(op, round(expected.around_a_token(program.type_of(op.operands[1]).shape[2])))
        types = (tuple(map(program.type_of, names)) for names in (op.operands, op.results))
        return with_rule(made, *types)  # how much a kernel sends depends on the lengths

    layers = tuple(replace(layer, ops=tuple(map(change, layer.ops))) for layer in program.layers)
    return replace(program, layers=layers, notes=(*program.notes, note))
