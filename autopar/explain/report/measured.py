"""The page of `ParallelModule.report`: a step as it was predicted and as it was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autopar.errors import QuestionError
from autopar.explain.report.page import Section, render_page
from autopar.explain.report.shapes import Cell, Number, Table, digits, milliseconds
from autopar.explain.report.steps import timeline_figure, timeline_table
from autopar.lower.observe.step_report import COLUMNS, StepReport
from autopar.timeline import StepTimeline

__all__ = ["write_step_report"]


def write_step_report(path: str | Path, report: StepReport) -> None:
    """Write the page to `path`.

    Raises:
        QuestionError: what draws pages is not installed, or the file can't be written.
    """
    cards = [("measured-step", "Step measured, ms", milliseconds(report.measured.step_s), _spread(report))]
    verdict = "nothing was predicted of this step"
    if report.predicted is not None:
        ratio = report.measured.step_s / report.predicted.step_s
        cards.append(("predicted-step", "Step predicted, ms", milliseconds(report.predicted.step_s), "simulated"))
        cards.append(("ratio", "Measured to predicted", Number(ratio, digits(ratio)), "1 is as predicted"))
        verdict = f"the step takes {ratio:.2f} times what was predicted"
    about = (f"device group {report.group}", f"{len(report.layers)} layers on this rank")
    page = render_page("A step, predicted and measured", cards, verdict, about, tuple(_sections(report)))
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise QuestionError(f"the page {str(path)!r} can't be written: {error.strerror}") from error


def _spread(report: StepReport) -> str:
    fastest, slowest = (milliseconds(seconds).text for seconds in (min(report.steps_s), max(report.steps_s)))
    return f"median of {len(report.steps_s)}, {fastest} to {slowest} ms"


def _sections(report: StepReport) -> Iterator[Section]:
    yield Section("streams-section", "Streams", (), (), (_stream_table(report),))
    text = "Each cell is predicted and measured, in ms; layers that run alike are added up."
    yield Section("layers-section", "Layers", (text,), (), tuple(_layer_tables(report)))
    if report.kernels:
        text = "Of one more step, under torch.profiler, which takes time itself: the shares are what counts."
        yield Section("kernels-section", "Kernels", (text,), (), tuple(_kernel_tables(report)))
    yield _step_section("measured", "The step as it passed", report.measured)
    if report.predicted is not None:
        yield _step_section("predicted", "The step as it was predicted", report.predicted)


def _step_section(name: str, title: str, timeline: StepTimeline) -> Section:
    figure = replace(timeline_figure(timeline), name=name)
    return Section(f"{name}-section", title, (), (figure,), (timeline_table(timeline),))


def _stream_table(report: StepReport) -> Table:
    rows = [(name, _cell(predicted_s), milliseconds(measured_s)) for name, predicted_s, measured_s in report.streams()]
    return Table("What each stream does in a step", ("stream", "predicted, ms", "measured, ms"), tuple(rows))


def _layer_tables(report: StepReport) -> Iterator[Table]:
    for place, column in enumerate(COLUMNS):
        rows = [
            (name, _cell(cells[place][0]), milliseconds(cells[place][1]))
            for name, cells in report.rows()
            if any(cells[place])
        ]
        if rows:
            yield Table(column.capitalize(), ("layers", "predicted, ms", "measured, ms"), tuple(rows))


def _kernel_tables(report: StepReport) -> Iterator[Table]:
    for name, category, kernels in report.top_kernels():
        rows = [(kernel, milliseconds(seconds), f"{share:.0%}") for kernel, seconds, share in kernels]
        yield Table(f"{name}, {category}", ("kernel", "ms", "share"), tuple(rows))


def _cell(seconds: float | None) -> Cell:
    return "-" if seconds is None else milliseconds(seconds)
