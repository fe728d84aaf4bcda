"""Calls of a model other than those that it was parallelized for, traced and planned when they first come."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import (
    ExampleInputsError,
    InfeasibleError,
    InputShapeError,
    OutputError,
    PlanMismatchError,
    TraceError,
)
from autopar.host.garbage import collected_seldom
from autopar.lower.compat import map_leaves
from autopar.lower.parameters.store import storage_layouts
from autopar.lower.run.attributes import Settings
from autopar.lower.run.call_executors import MOST_FORMS
from autopar.lower.run.lowering import Executable
from autopar.lower.run.stage_map import StageMap
from autopar.objects.gradient_requests import GRADIENTS
from autopar.placement import Layout, refine_mesh
from autopar.plan import Plan
from autopar.plan.prediction import Prediction
from autopar.planning.call_traces import CallTraces, Mode, shape_of
from autopar.planning.group_plans import plans_of_other_calls
from autopar.planning.padded_calls import (
    as_any_length,
    as_longer,
    is_growing,
    lengths_of,
    padded_lengths,
    padded_rows,
    with_pieces,
    with_rows,
    with_size,
)
from autopar.program import Program
from autopar.search import SearchRequest, check_known, plan_like, reuse_plan
from autopar.search.microbatches.row_sums import row_pieces
from autopar.step.layer.data_split import batch_inputs
from autopar.step.plan_check import check_fit
from autopar.step.prices import Prices
from autopar.trace import (
    PaddingError,
    Traced,
    check_one_graph,
    compare,
    computed_texts,
    ignored_labels,
    reading_last_entry,
)

__all__ = [
    "CallPlanner",
    "executable_of",
    "stored_as",
]

Call = tuple[Sequence[Any], Mapping[str, Any]]
_LOGGER = logging.getLogger("autopar")
# Constraints that need the program's own loss.
_NEEDS_LOSS = re.compile(r"\s*(microbatches|schedule|logits)\s*=")
_ANY_OUTPUT = (
    "a loss is computed from other outputs than the loss that the model returns, so backward begins with yours, behind "
    "all forwards and with what they keep in memory. If it is computed in the model's forward, or in loss_fn=, they "
    "may take turns in microbatches"
)


def stored_as(program: Program, plan: Plan) -> tuple[tuple[str, tuple[int, ...], Layout], ...]:
    """Where parameters are by `plan` of `program`, as `SearchRequest.stored` takes it."""
    mesh = refine_mesh(plan.shared_mesh, *(strategy.mesh for strategy in plan.strategies))
    return tuple((name, mesh, layout) for name, layout in storage_layouts(program, plan, mesh).items())


class CallPlanner:
    """Plans calls of a model that its first plan is not for: in eval mode, or with inputs of another form.

    All ranks ask for the same calls in the same order, and prices are equal on all ranks, so all find the same plans
    without talking to each other.
    """

    def __init__(self, traces: CallTraces, traced: Traced, plan: Plan, prices: Prices, request: SearchRequest) -> None:
        """Nothing is planned yet.

        Args:
            traces: of the model.
            traced: what the model does in the calls that it was parallelized for, finished.
            plan: of its program; it says where parameters are.
            prices: of the devices.
            request: how calls in training mode are searched for.
        """
        self._traces = traces
        self._first = traced.program, plan
        self._prices = prices
        self._request = request
        self._no_lengths: set[tuple[tuple[str, ...], int, torch.dtype | None]] = set()
        self._made: dict[Mode, list[Executable]] = {}
        self._groups: list[tuple[Executable, ...]] = []

    @property
    def reads(self) -> frozenset[tuple[str, str]]:
        """See `ExecutablePlanner.reads`."""
        return self._traces.reads

    def submodule(self, part: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """See `CallTraces.submodule`."""
        return self._traces.submodule(part, tensors)

    def groups(self, args: Sequence[Any], kwargs: Mapping[str, Any], size: tuple[int, int]) -> tuple[Executable, ...]:
        """What the groups of the plan run, each a row, in steps that come with calls as this one in training, which has
        rows and tokens of `size`.

        Calls with other inputs than the example, such as without an optional one, are planned when they first come.

        Raises:
            PlanMismatchError: the plan was made for groups of another model.
            InfeasibleError: it is a call with other inputs, and no plan fits in the memory that is left.
        """
        first, plan = self._first
        tree = map_leaves(shape_of, (tuple(args), dict(kwargs)))
        pieces = row_pieces(first)
        calls: list[Call] = [with_rows(tree, size, (1, group.tokens)) for group in plan.groups]
        if pieces is not None:
            rooms = [pieces.most(group.tokens) for group in plan.groups]
            calls = [
                with_pieces(self._traces.twin, call, tree, pieces, room)
                for call, room in zip(calls, rooms, strict=True)
            ]
        for known in self._groups:
            with suppress(InputShapeError):
                known[0].read_inputs(*calls[0])
                return known
        self._traces.set((), is_training=True)
        traces = [self._traces.trace(*call, Mode(is_training=True)) for call in calls]
        plans: Sequence[Plan] = [
            replace(plan, decisions=group.decisions, prediction=Prediction(), other_calls=(), groups=())
            for group in plan.groups
        ]
        if any(each.program.inputs != first.inputs for each in traces):
            ones = [each.program for each in traces]
            plans = plans_of_other_calls(ones, first, plan, self._prices, self._request)
        for traced, own in zip(traces, plans, strict=True):
            check_fit(own, traced.program, own.world_size)
            _check_stages(StageMap(traced.program, own, 0), StageMap(first, plan, 0))
        self._groups.insert(0, tuple(map(executable_of, traces, plans)))
        del self._groups[MOST_FORMS:]
        return self._groups[0]

    @collected_seldom()
    def __call__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_training: bool,
        part: str = "",
        autocast: torch.dtype | None = None,
        settings: Settings = (),
        any_output: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Executable:
        """What runs calls as this one, of the model or of its submodule `part`.

        Calls inside of ``torch.autocast`` to a dtype are programs with the casts that it makes, and calls with
        attributes other than those of the first program (`settings`) what the model does with these.  With `any_output`
        backward begins with the caller's gradients of any outputs.  `buffers` are those that forward may ask in Python,
        as they are now; None: as they were when the model was parallelized.

        Raises:
            InputShapeError: the model takes no such arguments.
            TraceError: it can't be traced on such inputs.
            InfeasibleError: no plan fits with the parameters stored as they are.
        """
        mode = Mode(is_training, part, autocast, any_output)
        made = self._made.setdefault(mode, [])
        self._traces.set(settings, is_training, buffers)
        for executable in made:
            with suppress(InputShapeError):
                if executable.settings != self._traces.read(settings) or not self._traces.have(executable.questions):
                    continue
                executable.read_inputs(args, kwargs)
                return executable
        traced = self._traces.trace(args, kwargs, mode)
        executable = None
        if not is_training and not part and not traced.program.carried and is_growing(traced.program, made):
            executable = self._of_any_length(traced, (args, kwargs), autocast)
        executable = executable or self._of_this_form(traced, (args, kwargs), mode)
        made.insert(0, executable._replace(settings=self._traces.read(settings)))
        del made[MOST_FORMS:]
        return made[0]

    def _of_this_form(self, traced: Traced, call: Call, mode: Mode) -> Executable:
        request = self._of_mode(mode)
        plan = self._reuse(traced.program, request, self._made[mode], mode.part)
        if plan is None:
            padded = self._with_more_rows(traced, call, mode)
            if padded is not None:
                return padded
            plan = self._search(traced.program, request)
        if mode.any_output and GRADIENTS not in call[1]:
            plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, _ANY_OUTPUT))))
        keeps_copies = not traced.program.carried.isdisjoint(traced.program.inputs) and self._have_room(plan)
        if traced.program.carried and not keeps_copies:
            stored = replace(request, stored=self._stored)
            plan = self._search(traced.program, stored)
        return executable_of(traced, plan, keeps_copies=keeps_copies)

    def _search(self, program: Program, request: SearchRequest) -> Plan:
        try:
            return plan_like(program, *self._first, self._prices, request)
        except InfeasibleError as error:
            inputs = ", ".join(f"{name} {list(program.type_of(name).shape)}" for name in program.inputs)
            raise type(error)(f"a call with {inputs}: {error}") from error

    def _of_mode(self, mode: Mode) -> SearchRequest:
        if mode.any_output:
            kept = (text for text in self._request.constraints if not _NEEDS_LOSS.match(text))
            return replace(self._request, constraints=tuple(kept))
        if mode.is_training:
            return self._request
        training = replace(self._request.training, is_training=False)
        return replace(self._request, training=training, constraints=(), max_microbatches=1)

    def _have_room(self, plan: Plan) -> bool:
        """Whether parameters, as `plan` reads them, fit in memory next to all that training needs."""
        first = self._first[1]
        needed = (plan.peak_memory_bytes + first.peak_memory_bytes) * (1 + first.memory_error)
        return not first.stages and needed <= first.memory_limit_bytes

    @cached_property
    def _stored(self) -> tuple[tuple[str, tuple[int, ...], Layout], ...]:
        """Where parameters are: where they are gathered for little work, that decides."""
        return stored_as(*self._first)

    def _of_any_length(self, short: Traced, call: Call, autocast: torch.dtype | None) -> Executable | None:
        """What runs texts that grow by a place a call, where no place sees those behind it; None if that is not known.

        The answer is remembered for each number of rows.
        """
        mode = Mode(is_training=False, autocast=autocast)
        made = self._made[mode]
        rows, length = short.program.type_of(short.program.inputs[0]).shape
        key = (short.program.inputs, rows, autocast)
        lengths = padded_lengths(length, [self._first[0], *(each.program for each in made)])
        for longest in [] if key in self._no_lengths else lengths:
            given: Call = with_size(map_leaves(shape_of, (tuple(call[0]), dict(call[1]))), 1, length, longest)
            try:
                long = self._traces.trace(*given, mode)
                comparison = compare(short, long, {})
                check_one_graph(self._traces.twin, *given, range(2, longest + 1))
                program = reading_last_entry(long.program, comparison.last)
                plan = self._plan(program, self._of_mode(mode), made)
                note = f"texts run as {longest} places: none sees those that are added"
                plan = replace(plan, notes=(*plan.notes, note))
                return as_any_length(short, long, plan, comparison, lengths_of(longest))
            except (TraceError, ExampleInputsError, OutputError, InputShapeError, PaddingError) as error:
                _LOGGER.debug("texts are not padded to %s: %s", longest, error)
        self._no_lengths.add(key)
        return None

    def _plan(self, program: Program, request: SearchRequest, made: Sequence[Executable]) -> Plan:
        plan = self._reuse(program, request, made, "")
        return plan_like(program, *self._first, self._prices, request) if plan is None else plan

    def _with_more_rows(self, short: Traced, call: Call, mode: Mode) -> Executable | None:
        """What runs the call with a few more rows that don't count, where that is exact, by a plan that is known."""
        rows = short.program.batch_size
        made = self._made[mode]
        known = [] if mode.part else [self._first]
        for longer in padded_rows(rows, [*known, *((each.program, each.plan) for each in made)]):
            args, kwargs = with_size(map_leaves(shape_of, call), 0, rows, longer)
            try:
                long = self._traces.trace(args, kwargs, mode)
                fills = ignored_labels(long.program)
                comparison = compare(short, long, fills, has_copies=True)
            except (TraceError, ExampleInputsError, OutputError, InputShapeError, PaddingError) as error:
                _LOGGER.debug("%s rows are not padded to %s: %s", rows, longer, error)
                return None
            plan = None if comparison.last else self._reuse(long.program, self._of_mode(mode), made, mode.part)
            if plan is not None:
                note = f"batches of {rows} rows run as {longer}: the rows that are added count for nothing"
                kept = (text for text in plan.notes if "run as" not in text)
                return as_longer(short, long, replace(plan, notes=(*kept, note)), comparison, fills)
        return None

    def _reuse(self, program: Program, request: SearchRequest, like: Sequence[Executable], part: str) -> Plan | None:
        """A plan for `program` whose decisions are known."""
        first_program, first = self._first
        for decisions in first.other_calls:
            if decisions.fingerprint == program.fingerprint:
                known = check_known(replace(first, decisions=decisions), program, self._prices, request)
                return replace(known, other_calls=())
        is_like_first = first_program.training == program.training and not part
        made = [(each.program.batch_size, each.plan) for each in like if each.program.batch_size]  # none: fits anything
        # Lengths were shared out by the plan of a family that is for rows of this length.  Then what the user asked for
        # comes first; what was found for other calls may have left a constraint unmet.
        own = [(first_program.batch_size, first)]
        known = [_family_members(first, program), own, made] if is_like_first else [made]
        for plans in known:
            reused = (reuse_plan(plan, rows, program, self._prices, request) for rows, plan in plans)
            usable = [plan for plan in reused if plan is not None and self._have_parameters(program, plan)]
            if usable:
                return min(usable, key=lambda plan: plan.step_time_s)
        return None

    def _have_parameters(self, program: Program, plan: Plan) -> bool:
        """Whether each stage of `plan` holds what it reads: layers of the same form may read other parameters."""
        return not list(_elsewhere(StageMap(program, plan, 0), StageMap(*self._first, 0)))


def _elsewhere(group: StageMap, first: StageMap) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Parameters that device groups read without holding them: name, the groups that read, the groups that hold."""
    for name, read in group.holders.items():
        held = first.holders.get(name, read)  # all groups store what the example doesn't read
        if not set(read) <= set(held):
            yield name, tuple(read), tuple(held)


def _check_stages(group: StageMap, first: StageMap) -> None:
    """Raise PlanMismatchError unless each device group holds the parameters that its stage of a group reads."""
    for name, read, held in _elsewhere(group, first):
        raise PlanMismatchError(
            f"in the plan for groups of {group.plan.group_size} devices of each stage, device groups {list(read)} "
            f"read {name!r}, which is stored on {list(held)}: give the groups the stages of the plan"
        )


def _family_members(plan: Plan, program: Program) -> list[tuple[int, Plan]]:
    """Of a family of plans for rows of several lengths, those for rows as long as the program's, and for how many."""
    tokens = next((shape[1] for name in batch_inputs(program) if len(shape := program.type_of(name).shape) > 1), 0)
    members = zip(plan.other_calls, plan.prediction.lengths.plans[1:], strict=False)
    return [
        (row.ranks * row.rows * row.microbatches, replace(plan, decisions=decisions, prediction=Prediction(row=row)))
        for decisions, row in ((decisions, member.row) for decisions, member in members)
        if row.tokens == tokens
    ]


def executable_of(traced: Traced, plan: Plan, *, keeps_copies: bool = False) -> Executable:
    """What runs the calls that were traced, by a plan."""
    return Executable(
        traced.program, plan, traced.constants, traced.flatten_inputs, traced.unflatten_outputs, keeps_copies,
        read_values=frozenset(traced.read_values), computed_values=computed_texts(traced.computed_values),
        questions=traced.questions, outside=traced.outside,
    )  # fmt: skip
