"""The Plan as plain data: what is decided, what is predicted of it, and what was asked for.

`Plan.decisions` alone says what runs: it is what is edited, compared across ranks, and hashed (`Decisions.digest`).
`Plan.prediction` follows from the decisions and prices (`autopar.step.pricing.predict`); a plan runs without one.

A plan holds no tensor, no module and no process group.  It names layers, ops and values as the traced graph
does, and parameters by their names in the module.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from autopar.decisions import Decisions, LayerStrategy, PlannedLayer, Stage, decision_problems, stages_problem
from autopar.errors import PlanFormatError
from autopar.headline import describe_headline, of_limit
from autopar.json_reading import read_json
from autopar.placement import Layout, format_layout
from autopar.prediction import LayerCost, LengthPrediction, Prediction, RowCost
from autopar.quantities import format_seconds, three_digits
from autopar.records import decode_record, encode_record
from autopar.schedules.action_lists import StageCost
from autopar.suggestions import suggest_path

if TYPE_CHECKING:
    from rich.table import Table

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

_WIDTH = 80
_LONG_NAME = 18  # "model.embed_tokens", the usual longest, is not folded
_SHORT_TEXT = 8  # "ZeRO-3," and "2 tensor" fold at no less
_FEW_STAGES = 16
_FEW_NAMES = 4

T = TypeVar("T")


class _From(Generic[T]):
    """A field of a part of a plan (its decisions or prediction), read from the plan itself."""

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
        tokens: of a row; the group computes one row after the other.
        decisions: for so many devices as form the group.
    """

    tokens: int
    decisions: Decisions


@dataclass(frozen=True)
class Plan:
    """Decisions for one program on one number of devices, what is predicted of them, and what was asked for.

    Fields of `decisions` and `prediction` can be read from the plan itself: ``plan.step_time_s``.

    Args:
        decisions: what runs.
        prediction: what is expected of it; without one nothing is known.
        constraints: what the user asked for.
        memory_limit_bytes: bytes per device that the plan was allowed.
        memory_error: how far the peak memory can be off, relative to it; 0: unknown.
        optimality_gap: the least ``step_time_s + overlapped_s`` that the search found, which is what it minimises, is
            at most ``1 + optimality_gap`` times that of the best plan in the search space that may be chosen.  Of what
            it found, the plan is the fastest when simulated.
        notes: what the user should know.
        planning_s: seconds spent, by stage ("trace", "search" ...).
        other_calls: decisions for calls in eval mode or with inputs of other shapes, by the fingerprints of their
            programs, with parameters stored as `decisions` says.
        groups: of a family for sequences of many lengths, what groups of devices run in steps in which they differ: the
            largest first, which has the longest rows.  Parameters are gathered for them once a step.

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
        """The plan with some fields of `decisions` changed, of which nothing is predicted then, for its calls only."""
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
        """Predicted peak bytes of a device of this group."""
        stages = zip(self.stages, self.prediction.stages, strict=False)
        peaks = (cost.peak_memory_bytes for stage, cost in stages if stage.group == group)
        return next(peaks, self.peak_memory_bytes)

    @property
    def headline(self) -> str:
        """The plan in one line: precision, degrees, rate per device, utilization and memory (`autopar.headline`)."""
        return describe_headline(self.decisions, self.prediction, self.memory_limit_bytes)

    def __str__(self) -> str:
        """The plan as a table for people."""
        return _format_plan(self)

    def to_json(self) -> str:
        """The plan as readable JSON; `from_json` reads it back to an equal plan."""
        data: dict[str, Any] = {"autopar_plan": FORMAT_VERSION} | encode_record(self)
        # So that it is known, when decisions are edited, that these are others.
        data["prediction"] = {"of": self.decisions.digest()} | data["prediction"]
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse what `to_json` wrote (or a person edited).

        A prediction that is missing or was made for other decisions is left out: `prediction` knows nothing then.

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
            PlanFormatError: there is no such file, or no plan in it.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:  # no file, no UTF-8, no path
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
    given = cast("dict[str, Any]", data)
    given.setdefault("other_calls", [])
    given.setdefault("groups", [])
    others = [*_dicts(given["other_calls"]), *(each.get("decisions") for each in _dicts(given["groups"]))]
    for each in _dicts([given.get("decisions"), *others]):
        _complete_decisions(each)
    predicted = given.pop("prediction", None)
    plan: Plan = decode_record(Plan, given | {"prediction": encode_record(Prediction())}, "plan")
    for problem in _problems(plan):
        raise ValueError(problem)
    if not isinstance(predicted, dict) or cast("dict[str, Any]", predicted).pop("of", "") != plan.decisions.digest():
        return plan
    _complete(cast("dict[str, Any]", predicted))
    prediction: Prediction = decode_record(Prediction, predicted, "prediction")
    is_whole = (len(prediction.costs), len(prediction.stages)) == (len(plan.layers), len(plan.stages))
    return replace(plan, prediction=prediction) if is_whole else plan


def _dicts(values: object) -> list[dict[str, Any]]:
    """Those of the entries of a list that are JSON objects; none if it is no list."""
    entries = cast("list[Any]", values) if isinstance(values, list) else []
    return [cast("dict[str, Any]", each) for each in entries if isinstance(each, dict)]


def _problems(plan: Plan) -> Iterator[str]:
    yield from decision_problems(plan.decisions)
    for number, group in enumerate(plan.groups):
        yield from (f"groups[{number}]: {problem}" for problem in decision_problems(group.decisions))
    for number, decisions in enumerate(plan.other_calls):
        yield from (f"other_calls[{number}]: {problem}" for problem in decision_problems(decisions))
        if decisions.host_storage != plan.decisions.host_storage:
            yield f"other_calls[{number}]: host_storage is another than in decisions, but storage is one"


def _complete_decisions(decided: dict[str, Any]) -> None:
    """Add what earlier versions did not decide."""
    for name, nothing in (("compiled", False), ("gradients", ""), ("host_storage", False), ("piece_tokens", 0)):
        decided.setdefault(name, nothing)
    for name in ("late_ops", "statistics"):
        decided.setdefault(name, [])
    strategies = decided.get("strategies")
    for strategy in cast("list[Any]", strategies) if isinstance(strategies, list) else []:
        if isinstance(strategy, dict):
            cast("dict[str, Any]", strategy).setdefault("pieces", {})


def _complete(predicted: dict[str, Any]) -> None:
    """Add what earlier versions did not predict."""
    for each in ("optimizer_gathers_s", "output_gathers_s", "output_reads_s"):
        predicted.setdefault(each, 0.0)
    predicted.setdefault("speedups", {})
    predicted.setdefault("host_memory_bytes", 0.0)
    for name, nothing in (("tokens_per_step", 0), ("dtype", ""), ("model_flops", 0.0), ("peak_flops_per_s", 0.0)):
        predicted.setdefault(name, nothing)
    row = predicted.setdefault("row", {})
    if isinstance(row, dict):
        predicted["row"] = encode_record(RowCost()) | cast("dict[str, Any]", row)
    lengths = predicted.setdefault("lengths", {})
    if isinstance(lengths, dict):
        predicted["lengths"] = encode_record(LengthPrediction()) | cast("dict[str, Any]", lengths)
    costs = predicted.get("costs")
    for cost in cast("list[Any]", costs) if isinstance(costs, list) else []:
        if isinstance(cost, dict):
            for name in ("split_bytes", "leave_s", "return_s", "host_bytes", "copies_s"):
                cast("dict[str, Any]", cost).setdefault(name, 0.0)


def _format_plan(plan: Plan) -> str:
    """The plan as text: its line, a row per group of consecutive layers that run alike, one per stage, then the totals.

    Bytes (parameters, gradients, optimizer state, saved for backward, temporary) are per device and layer, "ms" is per
    layer and step; of a stage the ms of one microbatch, of what it does once a step and of sending to its neighbours.
    """
    from rich.console import Console  # noqa: PLC0415  (a plan needs no rich until it is printed)

    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(plan.headline, soft_wrap=True)
    console.print(_heading(plan), soft_wrap=True)
    console.print(_layer_table(plan))
    console.print("sizes per device and layer (K, M, G: KiB, MiB, GiB); ms per layer and step")
    if plan.stages:
        console.print(_stage_table(plan))
        console.print("ms per microbatch of forward, backward, sending ahead and back; step: ms per step;")
        console.print("live: microbatches between forward and backward")
    for line in _totals(plan):
        console.print(line)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _heading(plan: Plan) -> str:
    speedups = (f"precision={name!r} is {times:.2g}x faster by estimate" for name, times in plan.prediction.speedups)
    gradients = f", gradients in {plan.decisions.gradients}" if plan.decisions.gradients else ""
    precision = "".join(f"; computes in float32: {text}" for text in speedups)
    return f"Plan for {plan.world_size} x {plan.device or 'any device'}{gradients}{precision}"


def _new_table() -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    return Table(box=box.ASCII2, pad_edge=False, padding=(0, 1, 0, 0))


def _layer_table(plan: Plan) -> Table:
    table = _new_table()
    table.add_column("layers", overflow="fold")
    table.add_column("how it runs", overflow="fold")
    for name in ("params", "grads", "optim", "saved", "temp", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    # Where there are many stages, their own table says where they are cut.
    starts = [stage.start for stage in plan.stages] if len(plan.stages) <= _FEW_STAGES else []
    costs = plan.costs or (None,) * len(plan.layers)

    def alike(index: int) -> tuple[int, LayerCost | None, int]:
        return plan.layers[index].strategy, costs[index], bisect(starts, index)

    for (strategy, cost, _), group in itertools.groupby(range(len(plan.layers)), alike):
        layers = [plan.layers[index] for index in group]
        names = layers[0].name if len(layers) == 1 else f"{layers[0].name} .. {layers[-1].name} ({len(layers)})"
        table.add_row(names, _describe_strategy(plan.strategies[strategy]), *_describe_cost(cost))
    return _with_whole_numbers(table)


def _stage_table(plan: Plan) -> Table:
    table = _new_table()
    table.add_column("stage", no_wrap=True, justify="right")
    table.add_column("layers", overflow="fold")
    table.add_column("ranks", no_wrap=True)
    for name in ("fwd", "bwd", "send", "back", "step", "live", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    number = 0
    # Neighbouring stages with equally many layers and equal times share a row.
    costs = plan.prediction.stages or (None,) * len(plan.stages)
    for columns, alike in itertools.groupby(zip(plan.stages, costs, strict=True), lambda both: _describe_stage(*both)):
        stages = [stage for stage, _ in alike]
        ranks = sorted(rank for stage in stages for rank in _end_ranks(plan, stage))
        names = [layer.name for layer in plan.layers[stages[0].start : stages[-1].stop]]
        table.add_row(
            _span(number, number + len(stages) - 1),
            names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})",
            _span(ranks[0], ranks[-1]),
            *columns[1:],
        )
        number += len(stages)
    return _with_whole_numbers(table)


def _with_whole_numbers(table: Table) -> Table:
    """Columns of text share what the others leave of a line: rich would cut off what stands at its end."""
    names, *texts = (column for column in table.columns if not column.no_wrap)
    numbers = (max(map(len, map(str, (column.header, *column.cells)))) for column in table.columns if column.no_wrap)
    edges = 2 * len(table.columns) + 1  # a space behind each column, and lines between and around them
    rest = _WIDTH - edges - sum(numbers)
    for column in texts:
        column.max_width = max(rest - _LONG_NAME, _SHORT_TEXT)
        rest -= min(column.max_width, max((len(str(cell)) for cell in column.cells), default=0))
    names.min_width = names.max_width = max(
        min(rest, max((len(str(cell)) for cell in names.cells), default=_LONG_NAME)), 1
    )
    return table


def _describe_stage(stage: Stage, cost: StageCost | None) -> tuple[str, ...]:
    """The number of layers, then the columns."""
    number = str(stage.stop - stage.start)
    if cost is None:
        return (number,)
    times_s = (cost.forward_s, cost.backward_s, cost.send_forward_s, cost.send_backward_s, cost.step_s)
    size = _format_size(cost.peak_memory_bytes)
    return (number, *(three_digits(each * 1e3) for each in times_s), str(cost.in_flight), size)


def _end_ranks(plan: Plan, stage: Stage) -> tuple[int, int]:
    return stage.group * plan.group_size, (stage.group + 1) * plan.group_size - 1


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} .. {last}"


def _describe_strategy(strategy: LayerStrategy) -> str:
    recompute = "" if strategy.recompute == "none" else f", {strategy.recompute_name} recompute"
    return f"{strategy.storage_name}, {strategy.axes}{recompute}"


def _describe_cost(cost: LayerCost | None) -> tuple[str, ...]:
    if cost is None:
        return ()
    sizes = (
        cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes, cost.saved_bytes,
        cost.transient_bytes
    )  # fmt: skip
    return (*(_format_size(size) for size in sizes), three_digits(cost.total_s * 1e3))


def _format_size(num_bytes: float) -> str:
    """Three digits and K, M, G or T for KiB to TiB: ``1.31G``."""
    size, units = num_bytes / 2**10, iter("KMGT")
    unit = next(units)
    while size >= 1000 and unit != "T":
        size, unit = size / 2**10, next(units)
    return f"{three_digits(size)}{unit}" if num_bytes else "0"


def _totals(plan: Plan) -> list[str]:
    lines = _predicted(plan) if plan.costs else ["nothing is predicted of this plan: it was edited, or saved without"]
    for index, strategy in enumerate(plan.strategies):
        if strategy.pieces:
            first = next((layer.name for layer in plan.layers if layer.strategy == index), "")
            lines.append(f"beside products      collectives in pieces, as in {first}: {strategy.pieces_name}")
    if plan.shared_storage:
        lines.append(f"shared parameters    {_shared(plan)} on mesh {'x'.join(map(str, plan.shared_mesh))}")
    if plan.constraints:
        lines.append("constraints          " + "; ".join(plan.constraints))
    if plan.planning_s:
        stages = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in plan.planning_s)
        lines.append(f"planning             {stages}")
    lines.extend(f"note: {note}" for note in plan.notes)
    return lines


def _predicted(plan: Plan) -> list[str]:
    rate = plan.samples_per_step / plan.step_time_s if plan.step_time_s > 0 else 0.0
    shares = plan.prediction.summary(plan.num_groups)
    lines = [
        f"predicted step time  {format_seconds(plan.step_time_s)} ({_shares(shares, plan.step_time_s)})",
        *_overlapped(plan),
        *_gathered(plan.prediction),
        f"predicted throughput {rate:.4g} samples/s ({plan.samples_per_step} per step)",
        f"predicted peak       {of_limit(plan.peak_memory_bytes, plan.memory_limit_bytes)} per device allowed"
        f"{_error(plan.memory_error)}",
        *_offloaded(plan.prediction),
        *_lengths(plan.prediction.lengths),
        f"optimality           at most {plan.optimality_gap:.2%} slower than the best candidate, excluding overlap",
    ]
    if plan.price_source:
        lines.append("prices               " + ", ".join(f"{name} {part:.0%}" for name, part in plan.price_source))
    return lines


def _lengths(expected: LengthPrediction) -> list[str]:
    """What a family of plans gains where sequences have many lengths, and from what."""
    if not expected.plans:
        return []
    saved_s, error_s = expected.static_s - expected.step_time_s, expected.standard_error_s
    used = [each for each in expected.plans if each.share]
    gains = [f"{name} {format_seconds(seconds)}" for name, seconds in expected.gains if abs(seconds) > 0.01 * saved_s]
    return [
        f"lengths              {expected.lengths}",
        f"expected step time   {format_seconds(expected.step_time_s)} with {expected.sequences:,} sequences (mean of "
        f"{expected.batches} drawn batches); the best plan for all of them "
        f"{format_seconds(expected.static_s)}: {expected.static_s / expected.step_time_s:.3f}x as long, "
        f"+- {error_s / expected.step_time_s:.3f}",
        *(
            f"rows of {each.row.tokens:,} tokens: {each.share:.0%} of steps, {format_seconds(each.step_time_s)} "
            f"({each.axes})"
            for each in used
        ),
        *([_groups(expected)] if expected.group_share else []),
        *([f"saved                {', '.join(gains)}"] if saved_s > 0 else []),
    ]


def _groups(expected: LengthPrediction) -> str:
    rows = ", ".join(f"{each.tokens:,} tokens on {each.degree} ({each.axes})" for each in expected.groups)
    peak = _format_size(max(each.peak_bytes for each in expected.groups))
    return (
        f"groups of unlike size: {expected.group_share:.0%} of steps, {format_seconds(expected.group_step_s)}, of it "
        f"{format_seconds(expected.coupling_s)} for parameters of all devices, and up to {peak}iB per device; rows of "
        f"{rows}"
    )


def _offloaded(prediction: Prediction) -> list[str]:
    size = prediction.host_memory_bytes
    return [f"host memory          {_format_size(size)}iB per device"] if size else []


def _shared(plan: Plan) -> str:
    """The parameters whose storage is the plan's: a few by name, many as a count for each layout."""
    names: dict[Layout, list[str]] = {}
    for name, layout in plan.shared_storage:
        names.setdefault(layout, []).append(name)
    results: list[str] = []
    for layout, each in names.items():
        said = ", ".join(each) if len(each) <= _FEW_NAMES else f"{each[0]} and {len(each) - 1} more"
        results.append(f"{said} ({format_layout(layout)})")
    return "; ".join(results)


def _overlapped(plan: Plan) -> list[str]:
    """The communication that the step time does not show: overlapped with compute, or saved by shared buffers."""
    if plan.overlapped_s <= 0:
        return []
    hidden = format_seconds(plan.overlapped_s)
    return [f"overlapped           {hidden} of communication, not part of the step time"]


def _gathered(prediction: Prediction) -> list[str]:
    """What the caller's script causes: collectives for its optimizer and for the outputs that it reads."""
    lines = (
        ("optimizer gathers", prediction.optimizer_gathers_s, "of the step, for whole parameters"),
        ("output gathers", prediction.output_gathers_s, "of the step, for whole outputs"),
        ("output reads", prediction.output_reads_s, "more in a step whose outputs are all read"),
    )
    return [f"{name:20} {format_seconds(seconds)} {what}" for name, seconds, what in lines if seconds]


def _error(share: float) -> str:
    return f", +- {share * 100:.2g} %" if share else ""


def _shares(seconds: dict[str, float], step_s: float) -> str:
    return ", ".join(f"{name} {each / step_s:.0%}" for name, each in seconds.items() if each >= 0.005 * step_s > 0)
