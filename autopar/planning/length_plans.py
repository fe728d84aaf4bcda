"""A family of plans for sequences of many lengths: one for rows of each length, over one storage of parameters.

The plan for the longest rows holds every sequence.  A batch without the longest ones fits into shorter rows, of which
there are more: these need fewer devices to a row, and pay for less attention and communication.  For rows of half the
tokens, a quarter, and so on, as long as enough batches fit into them, the same search finds a plan whose parameters are
stored as one of the family stores them, so that steps take turns and nothing moves.

Storage is that of the best plan for the longest rows, or of the best for those that most steps would use: of both
families the one with the least expected step (`autopar.balance.expectation`), or the plan for the longest rows alone.
Where steps in which groups of devices differ are expected to be faster for some batches, their plans come with it
(`autopar.planning.group_plans`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from autopar.balance import Clip, Lengths
from autopar.balance.expectation import draw_batches, expected_step, rows_worth_planning, sequences_of_step
from autopar.errors import ConstraintError, ExampleInputsError, InfeasibleError, LengthError, TraceError
from autopar.lower.compat import map_leaves
from autopar.plan import Plan
from autopar.plan.prediction import LengthPrediction
from autopar.planning.call_plans import stored_as
from autopar.planning.call_traces import ExampleInputs, example_call, on_meta, shape_of, trace_model
from autopar.planning.group_plans import PlannedGroups, plan_groups, why_no_groups
from autopar.planning.padded_calls import with_pieces, with_rows
from autopar.planning.sequence_separation import why_not_packed
from autopar.planning.setup import Setup
from autopar.planning.splitting import variant_like
from autopar.program import Program
from autopar.search import SearchRequest, check_known, plan_like, reuse_plan
from autopar.search.microbatches.row_sums import row_pieces
from autopar.step.prices import Prices
from autopar.step.variants.planned_program import as_decided
from autopar.user_text.progress import phase
from autopar.user_text.suggestions import kind_of

__all__ = ["ExpectedLengths", "FamilyPlanner", "check_rows", "read_distribution", "row_tracer"]

# Times as long without groups: lowering a program of each size on every rank must pay, and prices are estimates.
_WORTH_GROUPS = 1.01

ExpectedLengths = Lengths | str | Path | Mapping[int, float] | Mapping[Clip, float] | None
"""What users pass as ``lengths``: a distribution, a file of it (`Lengths.read`), or length or clip -> how many."""


def read_distribution(given: object) -> Lengths | None:
    """The distribution; None: none is given.

    Raises:
        LengthError: it is something else, or has no length.
    """
    if given is None or isinstance(given, Lengths):
        return given
    if isinstance(given, str | Path):
        return Lengths.read(given)
    if isinstance(given, Mapping):
        counts = cast("Mapping[Any, float]", given)
        if counts and all(isinstance(key, Clip) for key in counts):
            return Lengths.clips(counts)
        return Lengths.histogram(counts)
    raise LengthError(
        f"lengths is {kind_of(given)}: pass autopar.balance.Lengths, such as Lengths.of(list_of_lengths), the "
        "path of a file with one length a line, or {length: how many}, or {autopar.balance.Clip(...): how many}"
    )


def check_rows(program: Program, longest: int = 0) -> int:
    """Tokens of a row of the program's inputs; raises LengthError unless it holds the longest sequence."""
    shape = program.type_of(program.inputs[0]).shape
    if len(shape) < 2:
        raise LengthError(
            f"lengths= is for models whose inputs have rows of tokens, [rows, tokens], but the first input of the "
            f"example is {list(shape)}"
        )
    if longest > shape[1]:
        raise LengthError(
            f"the longest sequence of lengths= has {longest:,} tokens, but a row of the example inputs holds "
            f"{shape[1]:,}: pass longer ones, or lengths.clipped({shape[1]}) if your data set cuts what is longer"
        )
    return shape[1]


def row_tracer(
    model: nn.Module, example: ExampleInputs | None, program: Program, setup: Setup
) -> Callable[[int, int], Program]:
    """What finds the program of `model` with so many rows of so many tokens, where `program` is that of `example`.

    A single row has as many pieces (`RowPieces`) as it can hold, more rows together as many as the example.
    """
    before = program.type_of(program.inputs[0]).shape[:2]
    call = map_leaves(shape_of, example_call(model, example))
    twin, pieces = on_meta(model), row_pieces(program)

    def trace(rows: int, tokens: int) -> Program:
        changed = with_rows(call, before, (rows, tokens))
        count = pieces.most(tokens) if pieces and rows == 1 else 0
        own_args, own_kwargs = with_pieces(twin, changed, call, pieces, count)
        inputs = own_kwargs or own_args
        how: dict[str, Any] = {"device_type": setup.device_type, "num_layers": setup.num_layers}
        return setup.expecting(trace_model(twin, inputs, dtype=setup.dtype, **how)).program

    return trace


@dataclass(frozen=True)
class FamilyPlanner:
    """Makes a family of a plan.

    Args:
        lengths: of sequences.
        trace: ``(rows, tokens)`` of a batch -> what the model does with it.
        find: the best plan of a program, parameters stored as is best.
        prices: of the devices.
        request: what `find` searches for.
        time_layers: ``(program, plan)`` -> `prices`, corrected by timing the layers of this program as this plan runs
            them; None: plans are predicted by `prices`.
    """

    lengths: Lengths
    trace: Callable[[int, int], Program]
    find: Callable[[Program], Plan]
    prices: Prices
    request: SearchRequest
    time_layers: Callable[[Program, Plan], Prices] | None = None

    def family(self, single: Plan, program: Program) -> Plan:
        """`single`, the best plan of `program` alone, or another that others share the storage of."""
        started_s = time.perf_counter()
        given = single
        single = replace(self._timed(single, as_decided(program, single.decisions)), other_calls=())
        room = single.prediction.row.tokens
        rows, packs = program.batch_size, not why_not_packed(program)
        batches = draw_batches(self.lengths, sequences_of_step(self.lengths, rows, room, packs=packs))
        sizes = rows_worth_planning(batches, room)
        notes: list[str] = []
        with phase(f"planning for rows of {', '.join(f'{size:,}' for size in sizes)} tokens"):
            programs = [program]
            for size in sizes[1:]:
                try:
                    programs.append(self.trace(rows * room // size if packs else rows, size))
                except (ExampleInputsError, TraceError) as error:  # such as a model of one length
                    notes.append(f"no plan for rows of {size:,} tokens or fewer: {error}")
                    break
            families = [[single], self._around(0, single, programs)]
            usual = self._expected(families[-1], single, batches, packs=packs)
            often = max(range(1, len(usual.plans)), key=lambda place: usual.plans[place].share, default=0)
            if often:
                base = programs[sizes.index(usual.plans[often].row.tokens)]
                with suppress(InfeasibleError, ConstraintError):
                    families.append(self._around(programs.index(base), self._best(base), programs))
        expected = [self._expected(family, single, batches, packs=packs) for family in families if family]
        best = min(range(len(expected)), key=lambda number: expected[number].step_time_s)
        first, *others = [family for family in families if family][best]
        groups = PlannedGroups()
        own = as_decided(program, first.decisions)
        reason = why_no_groups(own, first, self.request)
        if reason:
            notes.append(f"all devices run the same plan in every step: {reason}")
        else:
            groups = plan_groups(own, first, batches, self.trace, self.prices, self._by(first), self.time_layers)
            with_groups = expected_step(
                [first, *others], single, self.lengths, batches, groups.rows, groups.coupling_s, nests=groups.nests,
                packs=packs,
            )  # fmt: skip
            if with_groups.step_time_s * _WORTH_GROUPS <= expected[best].step_time_s:
                expected[best] = with_groups
            else:
                groups = PlannedGroups()
        first = given if first is single else first
        return replace(
            first,
            prediction=replace(first.prediction, lengths=expected[best]),
            groups=groups.plans,
            other_calls=tuple(plan.decisions for plan in others),
            notes=(*first.notes, *notes),
            planning_s=(*single.planning_s, ("lengths", time.perf_counter() - started_s)),
        )

    def _expected(
        self, family: Sequence[Plan], base: Plan, batches: Sequence[np.ndarray], *, packs: bool
    ) -> LengthPrediction:
        return expected_step(family, base, self.lengths, batches, packs=packs)

    def _around(self, place: int, base: Plan, programs: Sequence[Program]) -> list[Plan]:
        """Plans for all that can share the storage of `base`, which is for number `place`; none without the first."""
        like = as_decided(programs[place], base.decisions)
        pieces = [like if program is programs[place] else variant_like(program, like) for program in programs]
        request = replace(self._by(base), stored=stored_as(pieces[place], base))
        made: list[Plan] = []
        for number, program in enumerate(pieces):
            plan = base if number == place else self._with_storage_of(program, pieces[place], base, request)
            if plan is not None and (plan.piece_tokens, plan.compiled) == (base.piece_tokens, base.compiled):
                made.append(plan)
            elif not number:
                return []
        return made

    def _best(self, program: Program) -> Plan:
        """The best plan of `program`, parameters stored as is best."""
        plan = self.find(program)
        return self._timed(plan, as_decided(program, plan.decisions))

    def _timed(self, plan: Plan, program: Program) -> Plan:
        """`plan` of `program`, predicted by the same kind of prices as all others: of timed layers, or of ops."""
        prices = self.prices if self.time_layers is None else self.time_layers(program, plan)
        return check_known(plan, program, prices, self._by(plan))

    def _by(self, plan: Plan) -> SearchRequest:
        """The request for plans that share what `plan` decides about training."""
        return replace(
            self.request, training=self.request.training.by(plan.decisions), on_final=None, on_considered=None
        )

    def _with_storage_of(self, program: Program, planned: Program, base: Plan, request: SearchRequest) -> Plan | None:
        """The fastest plan of `program` with parameters where `base` of `planned` has them; None if nothing fits."""
        reused = reuse_plan(base, planned.batch_size, program, self.prices, request)
        plans = [] if reused is None else [reused]
        with suppress(InfeasibleError, ConstraintError):
            plans.append(plan_like(program, planned, base, self.prices, request))
        return min((self._timed(plan, program) for plan in plans), key=lambda plan: plan.step_time_s, default=None)
