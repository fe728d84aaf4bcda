"""The tables of a printed plan: a row for each run of layers with equal strategy and cost, and one for each stage.

Bytes (parameters, gradients, optimizer state, saved for backward, temporary) are per device and layer, "ms" is per
layer and step.  The times of a stage are ms of one microbatch, of sending it to the neighbors, and of the work that
is done once per step.
"""

from __future__ import annotations

import io
import itertools
from bisect import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.plan.decisions import Decisions, LayerStrategy, Stage
from autopar.plan.prediction import LayerCost, Prediction
from autopar.schedules.action_lists import StageCost
from autopar.user_text.progress import random_kept
from autopar.user_text.quantities import three_digits

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["format_size", "format_tables", "layer_names", "row_layers"]

_WIDTH = 80
_LONG_NAME = 18  # wide enough for "model.embed_tokens", usually the longest name, so that it isn't folded
_SHORT_TEXT = 8  # wide enough for "ZeRO-3," and "2 tensor", between which the text of a strategy folds
_MAX_ROWS = 24  # longer tables are not read: rows of equal layers are joined, and only some stages are shown
_FEW_STAGES = 16  # with more stages, only their own table shows where layers are cut: the layer table stays short


def format_tables(
    decisions: Decisions, prediction: Prediction, *, above: Sequence[str] = (), below: Sequence[str] = ()
) -> str:
    """Format the table of layers and, with stages, the table of stages.

    Lines `above` are not wrapped, lines `below` are.
    """
    with random_kept():
        from rich.console import Console  # noqa: PLC0415  (rich is needed only when a plan is printed)

    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    for line in above:
        console.print(line, soft_wrap=True)
    console.print(_layer_table(decisions, prediction))
    console.print("sizes per device and layer (K, M, G: KiB, MiB, GiB); ms per layer and step")
    if decisions.stages:
        rows = _stage_rows(decisions, prediction)
        shown = _important_rows(prediction, rows) if len(rows) > _MAX_ROWS else rows
        console.print(_stage_table(decisions, prediction, shown))
        if len(shown) < len(rows):
            console.print(f"of {len(decisions.stages)} stages the first, the last, the slowest and the fullest")
        console.print("ms per microbatch of forward, backward, sending ahead and back; step: ms per step;")
        console.print("live: microbatches between forward and backward")
    for line in below:
        console.print(line)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _new_table() -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    return Table(box=box.ASCII2, pad_edge=False, padding=(0, 1, 0, 0))


def _layer_table(decisions: Decisions, prediction: Prediction) -> Table:
    table = _new_table()
    table.add_column("layers", overflow="fold")
    table.add_column("how it runs", overflow="fold")
    for name in ("params", "grads", "optim", "saved", "temp", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    starts = [stage.start for stage in decisions.stages] if len(decisions.stages) <= _FEW_STAGES else []
    costs = prediction.costs or (None,) * len(decisions.layers)
    for layers in row_layers(decisions, prediction, starts, _MAX_ROWS):
        strategy = decisions.strategies[decisions.layers[layers[0]].strategy]
        table.add_row(layer_names(decisions, layers), _describe_strategy(strategy), *_describe_cost(costs[layers[0]]))
    return _fit_columns(table)


def row_layers(decisions: Decisions, prediction: Prediction, starts: Sequence[int], max_rows: int) -> list[list[int]]:
    """The layers of each row of a table, by index: consecutive ones with equal strategy and cost, cut at `starts`.

    If these are more than `max_rows`, layers with equal strategy and cost share a row wherever they are.
    """
    costs = prediction.costs or (None,) * len(decisions.layers)

    def kind(index: int) -> tuple[int, LayerCost | None]:
        return decisions.layers[index].strategy, costs[index]

    runs = itertools.groupby(range(len(decisions.layers)), lambda index: (kind(index), bisect(starts, index)))
    rows = [list(run) for _, run in runs]
    if len(rows) <= max_rows:
        return rows
    joined: dict[tuple[int, LayerCost | None], list[int]] = {}
    for index in range(len(decisions.layers)):
        joined.setdefault(kind(index), []).append(index)
    return list(joined.values())


def layer_names(decisions: Decisions, layers: Sequence[int]) -> str:
    """Layers by index as text: ``"model.layers.0 .. 11 (12)"``, or ``(6 of 12)`` if others are between them."""
    first, last = (decisions.layers[layers[end]].name.split(".") for end in (0, -1))
    span = layers[-1] - layers[0] + 1
    if len(layers) == 1:
        return ".".join(first)
    common = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    how_many = f"{len(layers)} of {span}" if span > len(layers) else str(len(layers))
    return f"{'.'.join(first)} .. {'.'.join(last[common:])} ({how_many})"


def _stage_rows(decisions: Decisions, prediction: Prediction) -> list[range]:
    """Stages by number: consecutive ones with equally many layers and equal times share a row."""
    costs = prediction.stages or (None,) * len(decisions.stages)
    described = [_describe_stage(stage, cost) for stage, cost in zip(decisions.stages, costs, strict=True)]
    rows = (list(run) for _, run in itertools.groupby(range(len(described)), lambda number: described[number]))
    return [range(row[0], row[-1] + 1) for row in rows]


def _important_rows(prediction: Prediction, rows: Sequence[range]) -> list[range]:
    """The first and last rows, the slowest one, and the one with the highest peak memory."""
    costs = prediction.stages
    slowest = max(rows, key=lambda row: costs[row[0]].step_s) if costs else rows[0]
    fullest = max(rows, key=lambda row: costs[row[0]].peak_memory_bytes) if costs else rows[0]
    return [row for row in rows if row in (rows[0], rows[-1], slowest, fullest)]


def _stage_table(decisions: Decisions, prediction: Prediction, rows: Sequence[range]) -> Table:
    table = _new_table()
    table.add_column("stage", no_wrap=True, justify="right")
    table.add_column("layers", overflow="fold")
    table.add_column("ranks", no_wrap=True)
    for name in ("fwd", "bwd", "send", "back", "step", "live", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    costs = prediction.stages or (None,) * len(decisions.stages)
    for row in rows:
        stages = decisions.stages[row[0] : row[-1] + 1]
        ranks = sorted(rank for stage in stages for rank in _end_ranks(stage, decisions.group_size))
        table.add_row(
            _span(row[0], row[-1]),
            layer_names(decisions, range(stages[0].start, stages[-1].stop)),
            _span(ranks[0], ranks[-1]),
            *_describe_stage(stages[0], costs[row[0]])[1:],
        )
    return _fit_columns(table)


def _fit_columns(table: Table) -> Table:
    """Set the widths of text columns so that all numbers fit into the line: rich would cut off the last columns."""
    names, *texts = (column for column in table.columns if not column.no_wrap)
    widths = (max(map(len, map(str, (column.header, *column.cells)))) for column in table.columns if column.no_wrap)
    edges = 2 * len(table.columns) + 1  # a space after each column, and lines between and around them
    rest = _WIDTH - edges - sum(widths)
    for column in texts:
        column.max_width = max(rest - _LONG_NAME, _SHORT_TEXT)
        rest -= min(column.max_width, max((len(str(cell)) for cell in column.cells), default=0))
    names.min_width = names.max_width = max(
        min(rest, max((len(str(cell)) for cell in names.cells), default=_LONG_NAME)), 1
    )
    return table


def _describe_stage(stage: Stage, cost: StageCost | None) -> tuple[str, ...]:
    """The number of layers, then the cells of the columns after "ranks"."""
    num_layers = str(stage.stop - stage.start)
    if cost is None:
        return (num_layers,)
    times_s = (cost.forward_s, cost.backward_s, cost.send_forward_s, cost.send_backward_s, cost.step_s)
    size = format_size(cost.peak_memory_bytes)
    return (num_layers, *(three_digits(each * 1e3) for each in times_s), str(cost.in_flight), size)


def _end_ranks(stage: Stage, group_size: int) -> tuple[int, int]:
    return stage.group * group_size, (stage.group + 1) * group_size - 1


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} .. {last}"


def _describe_strategy(strategy: LayerStrategy) -> str:
    degrees = strategy.degrees.replace("tensor+sequence", "tensor+seq")  # short enough not to fold
    return ", ".join([strategy.storage_name, degrees, *strategy.keeping])


def _describe_cost(cost: LayerCost | None) -> tuple[str, ...]:
    if cost is None:
        return ()
    sizes = (
        cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes, cost.saved_bytes,
        cost.transient_bytes
    )  # fmt: skip
    return (*(format_size(size) for size in sizes), three_digits(cost.total_s * 1e3))


def format_size(num_bytes: float) -> str:
    """Format bytes with three digits and K, M, G or T for KiB to TiB: ``1.31G``."""
    size, units = num_bytes / 2**10, iter("KMGT")
    unit = next(units)
    while size >= 1000 and unit != "T":
        size, unit = size / 2**10, next(units)
    return f"{three_digits(size)}{unit}" if num_bytes else "0"
