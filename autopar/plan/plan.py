"""The Plan as plain data: its decisions, its prediction, and the user's request.

`Plan.decisions` alone determines what runs: they are edited, compared across ranks, and hashed (`Decisions.digest`).
`Plan.prediction` follows from the decisions and prices (`autopar.step.pricing.predict`); a plan runs without one.

A plan holds no tensor, no module and no process group.  Layers, ops and values have their names in the traced graph,
parameters their names in the module.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from autopar.errors import PlanFormatError
from autopar.pages.shapes import digits, size
from autopar.placement import Layout, format_layout
from autopar.plan.decisions import Decisions, LayerStrategy, PlannedLayer, Stage, decision_problems, stages_problem
from autopar.plan.headline import describe_gap, describe_headline, of_limit
from autopar.plan.layer_tables import format_tables
from autopar.plan.plan_versions import complete_decisions, complete_prediction, objects_in
from autopar.plan.prediction import LayerCost, LengthPrediction, Prediction
from autopar.plan.records import decode_record, encode_record
from autopar.user_text.json_reading import read_json
from autopar.user_text.quantities import format_seconds
from autopar.user_text.suggestions import suggest_path

__all__ = [
    "FORMAT_VERSION",
    "Decisions",
    "GroupPlan",
    "LayerStrategy",
    "Plan",
    "PlannedLayer",
    "Stage",
    "stages_problem",
]

FORMAT_VERSION = 5

_FEW_NAMES = 4  # more parameters of one layout are counted, not listed: their names would fill the screen

T = TypeVar("T")


class _From(Generic[T]):
    """A read-only attribute of `Plan` that returns the field of that name of its decisions or prediction."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, plan: Any, owner: type[Any]) -> T:
        return getattr(getattr(plan, self._part), self._name)


@dataclass(frozen=True)
class GroupPlan:
    """What a group of devices runs in a step in which groups run different programs.

    Args:
        tokens: of a row; the group computes one row after another.
        decisions: for the number of devices in the group.
    """

    tokens: int
    decisions: Decisions


@dataclass(frozen=True)
class Plan:
    """Decisions for one program on a given number of devices, their prediction, and the user's request.

    Fields of `decisions` and `prediction` can be read from the plan itself: ``plan.step_time_s``.

    Args:
        decisions: what runs.
        prediction: what it is expected to cost; empty if nothing is predicted.
        constraints: what the user requested.
        memory_limit_bytes: bytes per device that the plan was allowed to use.
        memory_error: relative error bound of the predicted peak memory; 0: unknown.
        optimality_gap: ``step_time_s`` is at most ``1 + optimality_gap`` times that of the best allowed plan among the
            candidates that the search considered, overlap included.  A plan with pipeline stages counts as slower by
            the mean error of predictions, which it must gain to be chosen.
        notes: what the user should know.
        planning_s: seconds spent, by stage ("trace", "search" ...).
        other_calls: decisions for calls in eval mode or with inputs of other shapes, identified by the fingerprints of
            their programs.  Parameters are stored as in `decisions`.
        groups: for a family of plans for sequences of many lengths, what groups of devices run in steps in which their
            programs differ; the largest group, which has the longest rows, comes first.  Parameters are gathered for
            them once a step.

    Example:
        >>> plan = autopar.plan(model, autopar.Cluster.of("h100"), {"input_ids": ids, "labels": ids})
        >>> plan.save("plan.json")
        >>> autopar.Plan.load("plan.json") == plan
        True
    """

    decisions: Decisions
    prediction: Prediction = field(default_factory=Prediction)
    constraints: tuple[str, ...] = ()
    memory_limit_bytes: float = math.inf
    memory_error: float = 0.0
    optimality_gap: float = math.inf
    notes: tuple[str, ...] = ()
    planning_s: tuple[tuple[str, float], ...] = ()
    other_calls: tuple[Decisions, ...] = ()
    groups: tuple[GroupPlan, ...] = ()

    def with_decisions(self, **changes: Any) -> Plan:
        """Return the plan with some fields of `decisions` changed, without prediction, `other_calls` and `groups`."""
        changed = replace(self.decisions, **changes)
        return replace(self, decisions=changed, prediction=Prediction(), other_calls=(), groups=())

    fingerprint = _From[str]("decisions")
    world_size = _From[int]("decisions")
    num_microbatches = _From[int]("decisions")
    layers = _From[tuple[PlannedLayer, ...]]("decisions")
    strategies = _From[tuple[LayerStrategy, ...]]("decisions")
    shared_mesh = _From[tuple[int, ...]]("decisions")
    shared_storage = _From[tuple[tuple[str, Layout], ...]]("decisions")
    stages = _From[tuple[Stage, ...]]("decisions")
    schedule = _From[str]("decisions")
    compiled = _From[bool]("decisions")
    piece_tokens = _From[int]("decisions")
    num_groups = _From[int]("decisions")
    group_size = _From[int]("decisions")
    device = _From[str]("prediction")
    price_source = _From[tuple[tuple[str, float], ...]]("prediction")
    step_time_s = _From[float]("prediction")
    overlapped_s = _From[float]("prediction")
    peak_memory_bytes = _From[float]("prediction")
    samples_per_step = _From[int]("prediction")
    costs = _From[tuple[LayerCost, ...]]("prediction")

    def group_peak_bytes(self, group: int) -> float:
        """The predicted peak memory of a device of this group, in bytes."""
        stages = zip(self.stages, self.prediction.stages, strict=False)
        peaks = (cost.peak_memory_bytes for stage, cost in stages if stage.group == group)
        return next(peaks, self.peak_memory_bytes)

    @property
    def headline(self) -> str:
        """The plan in one line (`autopar.plan.headline`): precision, degrees, rate per device, utilization, memory."""
        return describe_headline(self.decisions, self.prediction, self.memory_limit_bytes)

    def __str__(self) -> str:
        """The plan as a table for people."""
        return _format_plan(self)

    def to_json(self) -> str:
        """The plan as readable JSON; `from_json` reads it back as an equal plan."""
        data: dict[str, Any] = {"autopar_plan": FORMAT_VERSION} | encode_record(self)
        # The digest tells `from_json` that decisions were edited, and that the prediction isn't theirs.
        data["prediction"] = {"of": self.decisions.digest()} | data["prediction"]
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse what `to_json` wrote (or a person edited).

        A prediction that is missing or was made for other decisions is dropped: `prediction` is empty then.

        Raises:
            PlanFormatError: not JSON, another format version, or a field is missing, unknown or of the wrong
                form.
        """
        try:
            return _decode(text)
        except ValueError as error:
            raise PlanFormatError(str(error)) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` as readable JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanFormatError: the file can't be read, or holds no plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:  # not a readable file, not UTF-8, not a path
            raise PlanFormatError(
                f"plan={str(path)!r} can't be read: {error}. Pass a Plan, or the path of a file that Plan.save wrote "
                f"and that every rank sees{suggest_path(path)}"
            ) from error
        return cls.from_json(text)


def _decode(text: str) -> Plan:
    try:
        data = read_json(text)
    except ValueError as error:
        raise ValueError(f"a plan is JSON, but {error}") from error
    if not isinstance(data, dict) or cast("dict[str, Any]", data).pop("autopar_plan", None) != FORMAT_VERSION:
        raise ValueError(
            f"not a plan of format {FORMAT_VERSION}: the file must hold "
            f'"autopar_plan": {FORMAT_VERSION}; plan again with this version of autopar'
        )
    fields = cast("dict[str, Any]", data)
    fields.setdefault("other_calls", [])
    fields.setdefault("groups", [])
    others = [*objects_in(fields["other_calls"]), *(group.get("decisions") for group in objects_in(fields["groups"]))]
    for decisions in objects_in([fields.get("decisions"), *others]):
        complete_decisions(decisions)
    predicted = fields.pop("prediction", None)
    plan: Plan = decode_record(Plan, fields | {"prediction": encode_record(Prediction())}, "plan")
    for problem in _problems(plan):
        raise ValueError(problem)
    if not isinstance(predicted, dict) or cast("dict[str, Any]", predicted).pop("of", "") != plan.decisions.digest():
        return plan
    complete_prediction(cast("dict[str, Any]", predicted))
    prediction: Prediction = decode_record(Prediction, predicted, "prediction")
    is_complete = (len(prediction.costs), len(prediction.stages)) == (len(plan.layers), len(plan.stages))
    return replace(plan, prediction=prediction) if is_complete else plan


def _is_in_rounds(decisions: Decisions) -> bool:
    return all(group == stage % decisions.num_groups for stage, group in enumerate(decisions.groups))


def _problems(plan: Plan) -> Iterator[str]:
    yield from decision_problems(plan.decisions)
    if plan.groups and plan.decisions.host_storage:
        yield "groups: a plan with parameters in the host's memory has none"
    for number, group in enumerate(plan.groups):
        own = group.decisions
        if own.host_storage:
            yield f"groups[{number}]: a group has no parameters in the host's memory"
        if len(own.stages) != len(plan.decisions.stages) or own.num_groups != plan.num_groups:
            yield (
                f"groups[{number}]: {len(own.stages)} pipeline stages on {own.num_groups} device groups, but "
                f"decisions has {len(plan.decisions.stages)} on {plan.num_groups}: both must be the same"
            )
        elif len(own.stages) > 1 and (not _is_in_rounds(own) or own.num_microbatches > 1):
            yield (
                f"groups[{number}]: with pipeline stages a group has stage s on device group s % {own.num_groups}, and "
                "one microbatch"
            )
        yield from (f"groups[{number}]: {problem}" for problem in decision_problems(group.decisions))
    for number, decisions in enumerate(plan.other_calls):
        yield from (f"other_calls[{number}]: {problem}" for problem in decision_problems(decisions))
        if decisions.host_storage != plan.decisions.host_storage:
            yield f"other_calls[{number}]: host_storage differs from that of decisions, but both share one storage"


def _format_plan(plan: Plan) -> str:
    """Format the plan: its headline, its tables, then the totals."""
    above = (plan.headline, _heading(plan))
    return format_tables(plan.decisions, plan.prediction, above=above, below=_totals(plan))


def _heading(plan: Plan) -> str:
    speedups = (f"precision={name!r} is {factor:.2g}x faster by estimate" for name, factor in plan.prediction.speedups)
    gradients = f", gradients in {plan.decisions.gradients}" if plan.decisions.gradients else ""
    precision = "".join(f"; computes in float32: {text}" for text in speedups)
    return f"Plan for {plan.world_size} x {plan.device or 'any device'}{gradients}{precision}"


def _totals(plan: Plan) -> list[str]:
    lines = _predicted(plan) if plan.costs else ["no prediction for this plan: it was edited, or saved without"]
    first_with = {plan.strategies[layer.strategy].pieces_name: layer.name for layer in reversed(plan.layers)}
    for names, first in reversed(first_with.items()):
        if names:
            lines.append(f"in pieces            collectives overlapped with products, as in {first}: {names}")
    if plan.shared_storage:
        lines.append(f"shared parameters    {_shared_storage(plan)}")
    if plan.constraints:
        lines.append("constraints          " + "; ".join(plan.constraints))
    if plan.planning_s:
        stages = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in plan.planning_s)
        lines.append(f"planning             {stages}")
    lines.extend(f"note: {note}" for note in plan.notes)
    return lines


def _predicted(plan: Plan) -> list[str]:
    samples_per_s = plan.samples_per_step / plan.step_time_s if plan.step_time_s > 0 else 0.0
    seconds = plan.prediction.summary(plan.num_groups)
    lines = [
        f"predicted step time  {format_seconds(plan.step_time_s)} ({_shares(seconds, plan.step_time_s)})",
        *_overlapped(plan),
        *_gathered(plan.prediction),
        f"predicted throughput {digits(samples_per_s)} samples/s ({plan.samples_per_step} per step)",
        f"predicted peak       {of_limit(plan.peak_memory_bytes, plan.memory_limit_bytes)} per device allowed"
        f"{_error(plan.memory_error)}",
        *_offloaded(plan.prediction),
        *_lengths(plan.prediction.lengths),
        f"optimality           {describe_gap(plan.optimality_gap)}",
    ]
    if plan.price_source:
        lines.append("prices               " + ", ".join(f"{name} {share:.0%}" for name, share in plan.price_source))
    return lines


def _lengths(expected: LengthPrediction) -> list[str]:
    """The lines on a family of plans: its expected step time, its members, and where it saves time."""
    if not expected.plans:
        return []
    saved_s, error_s = expected.static_s - expected.step_time_s, expected.standard_error_s
    used_plans = [plan for plan in expected.plans if plan.share]
    gains = [f"{name} {format_seconds(seconds)}" for name, seconds in expected.gains if abs(seconds) > 0.01 * saved_s]
    return [
        f"lengths              {expected.lengths}",
        f"expected step time   {format_seconds(expected.step_time_s)} with {expected.sequences:,} sequences"
        f"{'' if expected.packs else ', each sequence in a row of its own'} (mean of "
        f"{expected.batches} drawn batches); the best plan for all of them "
        f"{format_seconds(expected.static_s)}: {expected.static_s / expected.step_time_s:.3f}x as long, "
        f"+- {error_s / expected.step_time_s:.3f}",
        *(
            f"rows of {plan.row.tokens:,} tokens: {plan.share:.0%} of steps, {format_seconds(plan.step_time_s)} "
            f"({plan.axes})"
            for plan in used_plans
        ),
        *([_groups(expected)] if expected.group_share else []),
        *([f"saved                {', '.join(gains)}"] if saved_s > 0 else []),
    ]


def _groups(expected: LengthPrediction) -> str:
    where = " of each stage" if any(row.fill_s for row in expected.groups) else ""
    rows = ", ".join(f"{row.tokens:,} tokens on {row.degree}{where} ({row.axes})" for row in expected.groups)
    peak = size(max(row.peak_bytes for row in expected.groups)).text
    nested = f", {expected.nested_share:.0%} with devices in several groups" if expected.nested_share else ""
    return (
        f"groups of different sizes: {expected.group_share:.0%} of steps, {format_seconds(expected.group_step_s)} "
        f"including {format_seconds(expected.coupling_s)} for parameters of all devices, up to {peak} per device"
        f"{nested}; rows of {rows}"
    )


def _offloaded(prediction: Prediction) -> list[str]:
    num_bytes = prediction.host_memory_bytes
    return [f"host memory          {size(num_bytes).text} per device"] if num_bytes else []


def _shared_storage(plan: Plan) -> str:
    """The parameters of `shared_storage` by layout: a few by name, many as a count."""
    by_layout: dict[Layout, list[str]] = {}
    for name, layout in plan.shared_storage:
        by_layout.setdefault(layout, []).append(name)
    texts: list[str] = []
    for layout, names in by_layout.items():
        shown = ", ".join(names) if len(names) <= _FEW_NAMES else f"{names[0]} and {len(names) - 1} more"
        texts.append(f"{shown} ({_format_layout_on(layout, plan.shared_mesh)})")
    return "; ".join(texts)


def _format_layout_on(layout: Layout, mesh: Sequence[int]) -> str:
    """Format a layout on a mesh, with equal placements on neighboring axes joined: ``"S(1) over 64"``."""
    runs = itertools.groupby(zip(layout, mesh, strict=True), lambda axis: axis[0])
    parts = [(format_layout((placement,)), math.prod(size for _, size in run)) for placement, run in runs]
    return " x ".join(f"{placement} over {size}" for placement, size in parts) or "whole"


def _overlapped(plan: Plan) -> list[str]:
    """The line on communication that adds nothing to the step time: overlapped with compute, or in shared buffers."""
    if plan.overlapped_s <= 0:
        return []
    seconds = format_seconds(plan.overlapped_s)
    return [f"hidden               {seconds} of collectives priced one by one: overlapped, or joined in one buffer"]


def _gathered(prediction: Prediction) -> list[str]:
    """The lines on collectives that the caller's script causes: for its optimizer and for the outputs that it reads."""
    lines = (
        ("optimizer gathers", prediction.optimizer_gathers_s, "of the step, for whole parameters"),
        ("output gathers", prediction.output_gathers_s, "of the step, for whole outputs"),
        ("output reads", prediction.output_reads_s, "more in a step whose outputs are all read"),
    )
    return [f"{name:20} {format_seconds(seconds)} {reason}" for name, seconds, reason in lines if seconds]


def _error(share: float) -> str:
    return f", within {share:.0%}" if share else ""


def _shares(seconds: dict[str, float], step_s: float) -> str:
    # Shares below 0.5 % would print as 0 %.
    return ", ".join(f"{name} {part / step_s:.0%}" for name, part in seconds.items() if part >= 0.005 * step_s > 0)
