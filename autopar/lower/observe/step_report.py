"""`StepReport`: a step as predicted and as measured, per layer and per stream."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.errors import QuestionError
from autopar.lower.observe.balance import Balance
from autopar.lower.observe.kernel_profile import KernelTime
from autopar.pages.html import Section, render_page
from autopar.pages.shapes import Cell, Number, Table, digits, milliseconds
from autopar.pages.timelines import timeline_figure, timeline_table
from autopar.timeline import STREAMS, Event, StepTimeline
from autopar.user_text.quantities import format_seconds

__all__ = ["COLUMNS", "StepReport"]

COLUMNS: dict[str, tuple[str, ...]] = {
    "forward": ("forward",),
    "backward": ("backward", "weight", "recompute"),
    "activations": ("activation communication",),
    "gathers": ("gather",),
    "reductions": ("reduce",),
}
"""Name of a column -> the categories of events that it adds up."""

_NUM_LONGEST = 5  # kernels of a category that are shown: most have a few that take nearly all of its time


@dataclass(frozen=True)
class StepReport:
    """Of one rank.

    Args:
        measured: the step with the median time.
        steps_s: seconds of every measured step.
        predicted: None where nothing was.
        layers: names of this rank's layers, by index in the program.
        equal_layers: groups of indices of layers that run the same program, in the order of the first.
        group: the device group of this rank.
        kernels: what layers spent their time on in a step of its own, the longest first; () if that was not requested.
        expert_rows: rows of each expert in one step of the whole batch, by the name of the layer: of mixtures of
            experts that run as one op, and of the layers that this rank's device group runs.  ``imbalance=`` takes it.
        headline: the plan and its measured rate in one line (`autopar.plan.headline`).
        balance: of steps whose batches `autopar.balanced` gave; None: of no step.
        other_steps: measured steps that ran by other plans than the one shown; `balance` knows them, too.
    """

    measured: StepTimeline
    steps_s: tuple[float, ...]
    predicted: StepTimeline | None
    layers: dict[int, str]
    equal_layers: tuple[tuple[int, ...], ...]
    group: int = 0
    kernels: tuple[KernelTime, ...] = ()
    expert_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    headline: str = ""
    balance: Balance | None = None
    other_steps: int = 0

    def layer_s(self, timeline: StepTimeline, layers: Iterable[int], column: str) -> float:
        """Seconds of these layers in one of `COLUMNS`, by one of the two timelines."""
        chosen, categories = set(layers), COLUMNS[column]
        return sum(e.seconds for e in self._events(timeline) if e.layer in chosen and e.category in categories)

    def stream_s(self, timeline: StepTimeline, stream: str) -> float:
        """Seconds in which a stream of this rank's group does something: what runs at once counts once."""
        busy_s, until_s = 0.0, 0.0
        for event in timeline.on(self.group, stream):
            busy_s += max(0.0, event.stop_s - max(event.start_s, until_s))
            until_s = max(until_s, event.stop_s)
        return busy_s

    def rows(self) -> list[tuple[str, list[tuple[float | None, float]]]]:
        """Name of layers that run the same program -> predicted and measured seconds of each column, of all of them."""
        return [
            (self._name(indices), [self._both(indices, column) for column in COLUMNS]) for indices in self.equal_layers
        ]

    def streams(self) -> list[tuple[str, float | None, float | None]]:
        """Stream, or the whole step -> predicted and measured seconds; None: not known.  Nobody measures the host's."""
        results: list[tuple[str, float | None, float | None]] = [
            (s, self.stream_s(self.predicted, s) if self.predicted else None,
             None if s == "host" else self.stream_s(self.measured, s))
            for s in STREAMS
        ]  # fmt: skip
        predicted_s = self.predicted.step_s if self.predicted else None
        return [*results, ("step", predicted_s, self.measured.step_s)]

    def top_kernels(self) -> list[tuple[str, str, list[tuple[str, float, float]]]]:
        """Name of layers that run the same program, category -> name, seconds and share of its longest kernels."""
        results: list[tuple[str, str, list[tuple[str, float, float]]]] = []
        for indices in self.equal_layers:
            for category in dict.fromkeys(each.category for each in self.kernels):
                own = [k for k in self.kernels if k.layer in indices and k.category == category]
                seconds = {k.name: sum(e.seconds for e in own if e.name == k.name) for k in own}
                total = sum(seconds.values())
                longest = sorted(seconds.items(), key=lambda item: -item[1])[:_NUM_LONGEST]
                if total:
                    results.append((self._name(indices), category, [(name, s, s / total) for name, s in longest]))
        return results

    def __str__(self) -> str:
        """A table of layers and one of streams; each cell is predicted / measured."""
        header = ["predicted / measured", *COLUMNS]
        lines = [[name, *(_cell(*both) for both in cells)] for name, cells in self.rows()]
        text = _table([header, *lines])
        streams = [[name, _cell(predicted_s, measured_s), _ratio(predicted_s, measured_s)]
                   for name, predicted_s, measured_s in self.streams()]  # fmt: skip
        spread = f"{format_seconds(min(self.steps_s))} to {format_seconds(max(self.steps_s))}"
        count = f"{len(self.steps_s)} steps measured, {spread}; the table shows the median step on this rank"
        count += f"\n{self.other_steps} more steps ran by other plans" if self.other_steps else ""
        text = self.headline + "\n" * bool(self.headline) + text
        text = f"{text}\n\n{_table([['stream', 'predicted / measured', 'ratio'], *streams])}\n{count}"
        text += f"\n{self._expert_text()}" if self.expert_rows else ""
        text += f"\n{self.balance}" if self.balance else ""
        return f"{text}\n\n{self._kernel_text()}" if self.kernels else text

    def _expert_text(self) -> str:
        """The busiest expert of each layer over the mean, and how many got nothing."""
        ratios = {name: max(rows) * len(rows) / max(1, sum(rows)) for name, rows in self.expert_rows.items()}
        worst = max(ratios, key=lambda name: ratios[name])
        idle = sum(rows.count(0) for rows in self.expert_rows.values())
        total = sum(map(len, self.expert_rows.values()))
        return (
            f"experts: the busiest gets {ratios[worst]:.2f} times the mean ({worst}; mean over layers "
            f"{statistics.fmean(ratios.values()):.2f}), {idle} of {total} get nothing"
        )

    def _kernel_text(self) -> str:
        rows = [
            (name if not place else "", category if not place else "", kernel, format_seconds(seconds), f"{share:.0%}")
            for name, category, kernels in self.top_kernels()
            for place, (kernel, seconds, share) in enumerate(kernels)
        ]
        note = "of one more step under torch.profiler, which slows it down: only the shares are meaningful"
        return f"{_table([('kernels', '', '', 'seconds', 'share'), *rows])}\n{note}"

    def trace(self, path: str | Path) -> None:
        """Write the measured step for https://ui.perfetto.dev; `predicted.to_chrome()` is the other one."""
        Path(path).write_text(self.measured.to_chrome(), encoding="utf-8")

    def html(self, path: str | Path) -> None:
        """Write a self-contained page with both steps.

        Raises:
            QuestionError: what draws pages is not installed, or the file can't be written.
        """
        _write_page(path, self)

    def _events(self, timeline: StepTimeline) -> Iterable[Event]:
        return (event for event in timeline.events if event.group == self.group)

    def _name(self, layers: Sequence[int]) -> str:
        first, last = self.layers[layers[0]], self.layers[layers[-1]]
        return first if len(layers) == 1 else f"{first} ... {last} ({len(layers)})"

    def _both(self, layers: Sequence[int], column: str) -> tuple[float | None, float]:
        predicted_s = self.layer_s(self.predicted, layers, column) if self.predicted else None
        return predicted_s, self.layer_s(self.measured, layers, column)

    @classmethod
    def of(
        cls,
        measured: Sequence[StepTimeline],
        predicted: StepTimeline | None,
        layers: dict[int, str],
        equal_layers: tuple[tuple[int, ...], ...],
        group: int,
        kernels: tuple[KernelTime, ...] = (),
    ) -> StepReport:
        """Of several measured steps, the one whose time is the median (of an even number, the faster)."""
        steps_s = tuple(timeline.step_s for timeline in measured)
        median = next(timeline for timeline in measured if timeline.step_s == statistics.median_low(steps_s))
        return cls(median, steps_s, predicted, layers, equal_layers, group, kernels)


def _cell(predicted_s: float | None, measured_s: float | None) -> str:
    return " / ".join("-" if seconds is None else format_seconds(seconds) for seconds in (predicted_s, measured_s))


def _ratio(predicted_s: float | None, measured_s: float | None) -> str:
    return f"{measured_s / predicted_s:.2f}" if predicted_s and measured_s is not None else "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _write_page(path: str | Path, report: StepReport) -> None:
    """Write the page; raises what `StepReport.html` does."""
    cards = [("measured-step", "Step measured, ms", milliseconds(report.measured.step_s), _spread(report))]
    verdict = "nothing was predicted of this step"
    if report.predicted is not None:
        ratio = report.measured.step_s / report.predicted.step_s
        cards.append(("predicted-step", "Step predicted, ms", milliseconds(report.predicted.step_s), "simulated"))
        cards.append(("ratio", "Measured to predicted", Number(ratio, digits(ratio)), "1 is as predicted"))
        verdict = f"the step is {ratio:.2f} times as long as predicted"
    about = (f"device group {report.group}", f"{len(report.layers)} layers on this rank")
    page = render_page(
        "A step, predicted and measured", report.headline, cards, verdict, about, tuple(_sections(report))
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise QuestionError(f"the page {str(path)!r} can't be written: {error.strerror}") from error


def _spread(report: StepReport) -> str:
    fastest, slowest = (milliseconds(seconds).text for seconds in (min(report.steps_s), max(report.steps_s)))
    return f"median of {len(report.steps_s)}, {fastest} to {slowest} ms"


def _sections(report: StepReport) -> Iterator[Section]:
    yield Section("streams-section", "Streams", (), (), (_stream_table(report),))
    text = "Each cell is predicted and measured, in ms; layers that run the same program are summed."
    yield Section("layers-section", "Layers", (text,), (), tuple(_layer_tables(report)))
    if report.kernels:
        text = "From one more step under torch.profiler, which slows it down: only the shares are meaningful."
        yield Section("kernels-section", "Kernels", (text,), (), tuple(_kernel_tables(report)))
    yield _step_section(report)


def _step_section(report: StepReport) -> Section:
    """Both steps on one scale."""
    text = "Zoom with the keys w and s, move with a and d, or drag; 0 or a double click shows the whole step."
    measured = timeline_table(report.measured)
    if report.predicted is None:
        return Section("step-section", "The step over time", (text,), (timeline_figure(report.measured),), (measured,))
    own = tuple(event for event in report.predicted.events if event.group == report.group)
    predicted = replace(report.predicted, events=own)
    figure = timeline_figure(report.measured, predicted, ("measured", "predicted"))
    tables = (replace(measured, caption="Measured"), replace(timeline_table(predicted), caption="Predicted"))
    return Section("step-section", "The step over time, measured and predicted", (text,), (figure,), tables)


def _stream_table(report: StepReport) -> Table:
    rows = [
        (name, _page_cell(predicted_s), _page_cell(measured_s)) for name, predicted_s, measured_s in report.streams()
    ]
    return Table("What each stream does in a step", ("stream", "predicted, ms", "measured, ms"), tuple(rows))


def _layer_tables(report: StepReport) -> Iterator[Table]:
    for place, column in enumerate(COLUMNS):
        rows = [
            (name, _page_cell(cells[place][0]), milliseconds(cells[place][1]))
            for name, cells in report.rows()
            if any(cells[place])
        ]
        if rows:
            yield Table(column.capitalize(), ("layers", "predicted, ms", "measured, ms"), tuple(rows))


def _kernel_tables(report: StepReport) -> Iterator[Table]:
    for name, category, kernels in report.top_kernels():
        rows = [(kernel, milliseconds(seconds), f"{share:.0%}") for kernel, seconds, share in kernels]
        yield Table(f"{name}, {category}", ("kernel", "ms", "share"), tuple(rows))


def _page_cell(seconds: float | None) -> Cell:
    return "-" if seconds is None else milliseconds(seconds)
