"""The page of a plan: its sections of charts, tables and text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autopar.errors import QuestionError
from autopar.explain.findings import Findings
from autopar.explain.kind_work import kind_works
from autopar.explain.next_steps import next_steps
from autopar.explain.report.choices import front_figure, front_table
from autopar.explain.report.costs import (
    bytes_figure,
    link_figure,
    roofline_figure,
    roofline_table,
    seconds_figure,
)
from autopar.explain.report.layer_strip import layer_strip, layer_table
from autopar.explain.report.length_section import length_sections
from autopar.explain.tables import (
    forced_table,
    kind_table,
    link_table,
    runner_table,
    share_table,
    sweep_table,
    what_if_table,
)
from autopar.pages.html import Section, render_page
from autopar.pages.shapes import Number, Table, digits, milliseconds, percent, size
from autopar.pages.timelines import (
    MAX_BARS,
    memory_figure,
    memory_table,
    shown_groups,
    timeline_figure,
    timeline_table,
)
from autopar.plan.headline import describe_gap, throughput

__all__ = ["render_report", "sections", "write_report"]


def write_report(path: str | Path, findings: Findings) -> None:
    """Write the page to `path`.

    Raises:
        QuestionError: plotly is not installed, or the file can't be written.
    """
    page = render_report(findings)
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise QuestionError(f"--html {str(path)!r} can't be written: {error.strerror}") from error


def render_report(findings: Findings) -> str:
    """The page as one HTML text, which loads nothing from anywhere."""
    plan = findings.answer.plan
    return render_page(
        f"{findings.target} on {plan.world_size} x {plan.device}",
        plan.headline,
        tuple(_cards(findings)),
        findings.explanation.binds,
        _conditions(findings),
        tuple(sections(findings)),
        tuple(next_steps(findings.answer, findings.explanation, findings.forced)),
    )


def _cards(findings: Findings) -> Iterator[tuple[str, str, Number, str]]:
    """Id, name, number and what stands below it."""
    plan = findings.answer.plan
    rate = plan.samples_per_step / plan.step_time_s
    yield "step-time", "Step, ms", milliseconds(plan.step_time_s), f"predicted, for {plan.samples_per_step:,} rows"
    each, *flops = throughput(plan.prediction, plan.world_size, plan.step_time_s).split(" · ")
    yield "throughput", "Rows per second", Number(rate, digits(rate)), each
    if len(flops) > 1:
        share = plan.prediction.model_flops / plan.step_time_s / plan.world_size / plan.prediction.peak_flops_per_s
        yield "mfu", "Model FLOPs utilization", percent(share), f"{flops[0]} of each device"
    margin = f", within {plan.memory_error:.0%}" if plan.memory_error else ""
    limit = f"of {size(plan.memory_limit_bytes).text} allowed{margin}"
    yield "peak-memory", "Peak memory", size(plan.peak_memory_bytes), limit
    yield "gap", "From the best plan", percent(plan.optimality_gap), "at most, in the search space"


def _conditions(findings: Findings) -> tuple[str, ...]:
    plan, question = findings.answer.plan, findings.answer.question
    cluster = question.cluster
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    results = [f"{nodes} of {cluster.devices_per_node} x {plan.device}"]
    results.append(f"{cluster.within.name} inside a node, {cluster.between.name} between nodes")
    if plan.stages:
        groups = f"{len(plan.stages)} stages on {plan.num_groups} device groups of {plan.group_size}"
        results.append(f"{groups}, schedule {plan.schedule}")
    if plan.num_microbatches > 1:
        results.append(f"{plan.num_microbatches} microbatches")
    if question.constraints:
        results.append("constraints: " + "; ".join(question.constraints))
    return tuple(results)


def sections(findings: Findings) -> Iterator[Section]:
    """What the page shows, top to bottom."""
    answer, explanation, plan = findings.answer, findings.explanation, findings.answer.plan
    yield Section(
        "layers-section",
        "Layers",
        (
            "Every layer from first to last, and what is decided for it."
            + (" Dashed lines are borders of pipeline stages." if plan.stages else ""),
        ),
        (layer_strip(plan),),
        (layer_table(plan),),
    )
    yield _step_section(findings)
    yield _memory_section(findings)
    yield from length_sections(answer)
    yield Section(
        "time-section",
        "Where time and bytes go",
        ("Temporary (transient) bytes are those of one layer, as one runs at a time.",),
        (seconds_figure(explanation), bytes_figure(explanation)),
        (share_table(explanation, plan.step_time_s), kind_table(explanation.kinds)),
    )
    if explanation.links:
        text = "The traffic of one device's collectives in one step, by link."
        yield Section(
            "links-section", "Communication", (text,), (link_figure(explanation),), (link_table(explanation),)
        )
    works = kind_works(answer)
    text = (
        "Arithmetic intensity of each layer kind (operations per byte read or written) against its predicted rate. "
        "Below the slope it is bound by memory bandwidth, below the flat part by compute. Larger marks take more time."
    )
    yield Section(
        "roofline-section", "Roofline", (text,), (roofline_figure(answer, works),), (roofline_table(answer, works),)
    )
    yield from _choice_sections(findings)
    yield _certainty_section(findings)


def _step_section(findings: Findings) -> Section:
    timeline = findings.timeline
    groups = sorted({event.group for event in timeline.events})
    shown = shown_groups(timeline)
    text = [
        "The streams of a device over time; where a row is empty, the stream is idle. Zoom with the keys w and s, "
        "move with a and d, or drag; 0 or a double click shows the whole step.",
        "A kernel that runs while the device communicates takes longer, so the compute row is fuller than the share of "
        "compute at the top, which counts kernels as if they ran alone.",
    ]
    if any(event.to_group >= 0 for event in timeline.events):
        text.append(
            "Arrows connect a stage's send with the work that waits for it, between the device groups that are drawn; "
            "the legend shows and hides them."
        )
    if len(shown) < len(groups):
        text.append(f"{len(shown)} of {len(groups)} device groups are drawn; the table has all of them.")
    num_events = sum(event.group in set(shown) for event in timeline.events)
    if num_events > MAX_BARS:
        text.append(f"{num_events:,} events are merged with their neighbors; --trace writes each of them for Perfetto.")
    return Section(
        "step-section", "The step over time", tuple(text), (timeline_figure(timeline),), (timeline_table(timeline),)
    )


def _memory_section(findings: Findings) -> Section:
    timeline, plan = findings.timeline, findings.answer.plan
    if not any(timeline.memory):
        peak, limit = (size(each).text for each in (plan.peak_memory_bytes, plan.memory_limit_bytes))
        text = f"Memory over time was not simulated for this plan. Its predicted peak is {peak} of {limit} per device."
        return Section("memory-section", "Memory over time", (text,))
    return Section(
        "memory-section",
        "Memory over time",
        (
            "Memory of a device during the step. The dashed line is its capacity; the peak and the limit at the "
            "top exclude the overhead (context, communicators, fragments).",
        ),
        (memory_figure(timeline),),
        (memory_table(timeline),),
    )


def _choice_sections(findings: Findings) -> Iterator[Section]:
    answer, plan = findings.answer, findings.answer.plan
    if answer.considered:
        text = (
            f"{len(answer.considered):,} of the plans that the search considered: the fast ones and a sample of the "
            "others. Most are sums without overlap; where the step was simulated, overlapped communication does not "
            "count, so these points (and the plan) may be below the front. Point at one to see its decisions."
        )
        tables = (runner_table(findings.explanation.runners_up), front_table(answer))
        yield Section("front-section", "Time against memory", (text,), (front_figure(answer),), tables)
    tables = ()
    if findings.forced:
        tables += (forced_table(findings.forced, plan),)
    if findings.what_if:
        tables += (what_if_table(findings.what_if, plan),)
    if findings.sweep[1]:
        tables += (sweep_table(*findings.sweep),)
    if tables:
        text = "Each row is the best plan under that condition, from a search of its own."
        yield Section("choices-section", "Other choices", (text,), (), tables)


def _certainty_section(findings: Findings) -> Section:
    plan = findings.answer.plan
    rows = tuple((name, percent(share)) for name, share in findings.explanation.sources)
    spent = tuple((name, Number(seconds, f"{seconds:.2f}")) for name, seconds in plan.planning_s)
    return Section(
        "certainty-section",
        "Confidence",
        (
            f"The plan is {describe_gap(plan.optimality_gap)}.",
            *plan.notes,
        ),
        (),
        (
            Table("Sources of the step's prices", ("source", "share of seconds"), rows),
            Table("Planning", ("part", "seconds"), spent),
        ),
    )
