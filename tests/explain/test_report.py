"""The report: its numbers are the plan's, it loads nothing, and it works in a browser with a keyboard."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autopar.explain.alternatives import Alternative
from autopar.explain.explanation import explain
from autopar.explain.findings import Findings
from autopar.explain.next_steps import next_steps
from autopar.explain.planner import Planner
from autopar.explain.question import Question, parse_cluster
from autopar.explain.report import render_report, write_report
from autopar.explain.report.layer_strip import layer_strip, layer_table
from autopar.explain.report.page import sections
from autopar.pages.shapes import COLORS, MEMORY_COLORS
from autopar.pages.timelines import condense, shown_groups, timeline_figure
from autopar.plan import PlannedLayer
from autopar.plan.prediction import SPENT
from autopar.timeline import CATEGORIES, MEMORY_KINDS, Event, MemoryPoint, StepTimeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Findings:
    """A plan in two stages, with a memory that is made up: one curve for each group."""
    question = Question(parse_cluster("4xh100"), constraints=("pipeline=2",))
    answer = Planner("tests.explain.targets:make").answer(question)
    forced = (Alternative("zero=3", answer.plan), Alternative("tensor=8", problem="<8 devices>"))
    findings = Findings("targets:make", answer, explain(answer), forced, (Alternative("nodes=2", answer.plan),))
    timeline = findings.timeline
    memory = tuple(
        tuple(
            MemoryPoint(timeline.step_s * n / 8, (3e5, *[2e4 * (n % 5)] * (len(MEMORY_KINDS) - 1)))
            for n in range(start, 8)
        )
        for start in (0, 1)
    )
    vars(findings)["timeline"] = replace(timeline, memory=memory)
    return findings


class Numbers(HTMLParser):
    """Every exact number of a page: those with a name, and all of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.named: dict[str, float] = {}
        self.all: list[float] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "data":
            value = float(given["value"] or "nan")
            self.all.append(value)
            if given.get("id"):
                self.named[str(given["id"])] = value


def test_the_numbers_on_the_page_are_the_plans(found: Findings) -> None:
    plan, page = found.answer.plan, render_report(found)
    numbers = Numbers(page)
    assert numbers.named == {
        "step-time": plan.step_time_s,
        "throughput": plan.samples_per_step / plan.step_time_s,
        "peak-memory": plan.peak_memory_bytes,
        "gap": plan.optimality_gap,
        "mfu": plan.prediction.model_flops / plan.step_time_s / plan.world_size / plan.prediction.peak_flops_per_s,
    }
    for row in found.explanation.links:
        assert {float(row.runs), row.num_bytes, row.seconds} <= set(numbers.all)
    for runner in found.explanation.runners_up:
        assert {runner.step_time_s, runner.peak_memory_bytes, runner.loses} <= set(numbers.all)
    assert "&lt;8 devices&gt;" in page
    assert len(page) < 8e6


def test_the_page_loads_nothing(found: Findings) -> None:
    page = render_report(found)
    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"(?!data:)", page)


def test_nothing_offers_to_upload_a_chart(found: Findings) -> None:
    page = render_report(found)
    assert "form-action 'none'" in page
    config = page[page.rindex("const config = ") :].partition("};")[0]
    assert "showSendToCloud: false" in config
    assert 'plotlyServerURL: ""' in config


def test_charts_are_what_plotly_knows(found: Findings) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    figures = [figure for section in sections(found) for figure in section.figures]
    assert {"layers", "timeline", "memory", "kind-seconds", "kind-bytes", "links", "roofline", "front"} == {
        figure.name for figure in figures
    }
    for figure in figures:
        graph_objects.Figure(json.loads(json.dumps(figure.spec)))  # raises at an attribute that there is not
        assert figure.data, figure.name
    strip = next(figure for figure in figures if figure.name == "layers")
    colors = {trace["name"]: trace["marker"]["color"] for trace in strip.data}
    assert [name for name, color in colors.items() if color.startswith("rgba")] == ["no recompute"]


def test_the_drawn_step_is_the_simulated_one(found: Findings) -> None:
    timeline = found.timeline
    chart = next(f for section in sections(found) for f in section.figures if f.name == "timeline")
    *bars, arrows = chart.data
    drawn = sum(sum(trace["x"]) for trace in bars) / 1e3
    assert drawn == pytest.approx(sum(event.seconds for event in timeline.events), rel=1e-5)
    assert max(x + base for trace in bars for x, base in zip(trace["x"], trace["base"], strict=True)) / 1e3 == (
        pytest.approx(timeline.step_s, rel=1e-5)
    )
    sends = sum(event.to_group >= 0 for event in timeline.events)
    assert (len(arrows["x"]), sends) == (3 * sends, len(list(timeline.arrivals())))
    assert all(sent <= read for sent, read in zip(arrows["x"][::3], arrows["x"][1::3], strict=True))


def test_two_steps_are_drawn_on_one_scale(found: Findings) -> None:
    timeline = found.timeline
    slower = StepTimeline(2 * timeline.step_s, (replace(timeline.events[0], stop_s=2 * timeline.step_s),))
    chart = timeline_figure(timeline, slower, ("predicted", "measured"))
    assert chart.layout["xaxis"]["range"] == [0, pytest.approx(2e3 * timeline.step_s, rel=1e-5)]
    names = chart.layout["yaxis"]["ticktext"]
    assert names.count("group 0 compute predicted") == names.count("group 0 compute measured") == 1
    assert max(x for trace in chart.data if trace["type"] == "bar" for x in trace["x"]) == (
        pytest.approx(2e3 * timeline.step_s - timeline.events[0].start_s * 1e3, rel=1e-5)
    )


def test_every_part_of_a_step_has_a_color(found: Findings) -> None:
    for names, colors in ((SPENT, COLORS), (CATEGORIES, COLORS), (MEMORY_KINDS, MEMORY_COLORS)):
        assert set(names) <= set(colors)
    assert {name for kind in found.explanation.kinds for name, _ in kind.num_bytes} <= set(MEMORY_COLORS)


def test_temporary_bytes_count_once(found: Findings) -> None:
    plan, kinds = found.answer.plan, found.explanation.kinds
    for kind in kinds:
        costs = [c for layer, c in zip(plan.layers, plan.costs, strict=True) if layer.name in kind.layers]
        assert dict(kind.num_bytes)["transient"] == max(cost.transient_bytes for cost in costs)
        assert dict(kind.num_bytes)["saved"] == pytest.approx(sum(cost.saved_bytes for cost in costs))


def test_alternating_layers_share_rows(found: Findings) -> None:
    plan = found.answer.plan
    layers = tuple(PlannedLayer(f"layers.{n}", 0, n % 2) for n in range(126))
    decisions = replace(plan.decisions, layers=layers, stages=(), schedule="")
    costs = (plan.costs[0], plan.costs[-1]) * 63
    large = replace(plan, decisions=decisions, prediction=replace(plan.prediction, costs=costs))
    assert [row[0] for row in layer_table(large).rows] == ["layers.0 .. 124 (63 of 125)",
                                                           "layers.1 .. 125 (63 of 125)"]  # fmt: skip
    assert len(str(large).splitlines()) < 40


def test_the_page_says_what_to_try_next(found: Findings) -> None:
    page = render_report(found)
    steps = list(next_steps(found.answer, found.explanation, found.forced))
    assert steps
    assert "What to try next" in page
    assert all(step.partition("--")[0][:60] in page.replace("&#34;", '"') for step in steps)
    full = replace(found.explanation, memory_share=0.95)
    assert any("--what-if memory=" in step for step in next_steps(found.answer, full))


@pytest.mark.slow
def test_a_large_plan_stays_a_small_page(found: Findings) -> None:
    events = tuple(
        Event(group, stream, f"layers.{n}", category, (n + group) * 1e-3, (n + group + 0.9) * 1e-3, microbatch=n // 9)
        for group in range(64)
        for stream, category in (("compute", "forward"), ("communication", "gather"))
        for n in range(1500)
    )
    points = tuple(MemoryPoint(n / 1e4, (float(n % 977), *[1.0] * (len(MEMORY_KINDS) - 1))) for n in range(9999))
    timeline = StepTimeline(1.6, events, (points,) * 64)
    large = replace(found)
    vars(large)["timeline"] = timeline
    groups = shown_groups(timeline)
    assert len(groups) == 8
    assert {0, 63} <= set(groups)
    joined = condense(timeline, groups)
    assert len(joined) <= 4000
    computed = {group: sum(e.seconds for e in joined if e.group == group and e.stream == "compute") for group in groups}
    assert computed[0] == pytest.approx(1500 * 0.9e-3, rel=0.2)  # joined bars also cover the short gaps between
    memory = next(f for section in sections(large) for f in section.figures if f.name == "memory")
    assert max(max(trace["y"]) for trace in memory.data[:1]) == pytest.approx(976, rel=1e-4)  # the peak is kept
    assert len(render_report(large)) < 8e6
    plan = found.answer.plan
    layers = tuple(PlannedLayer(f"layers.{n}", 0, n % 2) for n in range(126))
    decisions = replace(plan.decisions, layers=layers, stages=(), schedule="")
    costs = plan.costs[:1] * len(layers)
    strip = layer_strip(replace(plan, decisions=decisions, prediction=replace(plan.prediction, costs=costs)))
    assert sum(len(trace["x"]) for trace in strip.data) == 3 * 126


@pytest.mark.slow
def test_many_alternating_events_are_drawn_at_once_and_keep_their_seconds() -> None:
    """A pipeline's compute stream alternates between microbatches' forwards and backwards: nothing to join touches."""
    num_events = 100_000
    events = tuple(
        Event(0, "compute", f"layers.{n}", ("forward", "backward")[n % 2], n * 1e-3, (n + 0.5 + n % 2 / 4) * 1e-3,
              microbatch=n // 2)
        for n in range(num_events)
    )  # fmt: skip
    timeline = StepTimeline(num_events * 1e-3, events)
    started_s = time.process_time()
    drawn = condense(timeline, (0,))
    assert time.process_time() - started_s < 10  # it took for ever
    assert 1000 < len(drawn) <= 4000
    for category, seconds in (("forward", 0.5e-3), ("backward", 0.75e-3)):
        bars = [event for event in drawn if event.category == category]
        assert sum(bar.seconds for bar in bars) == pytest.approx(seconds * num_events / 2)
    in_order = sorted(drawn, key=lambda event: event.start_s)
    assert all(a.stop_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(in_order))
    assert in_order[0].name.startswith("layers.0 .. ")


def test_overlapping_sends_are_bounded_too_and_stay_where_they_are() -> None:
    events = tuple(
        Event(0, "pipeline", f"value {n}", ("send", "broadcast")[n % 2], n * 1e-3, (n + 5) * 1e-3) for n in range(9000)
    )
    timeline = StepTimeline(9.005, events)
    drawn = condense(timeline, (0,), max_bars=100)
    assert len(drawn) <= 100
    assert max(event.stop_s for event in drawn) <= timeline.step_s * 1.02
    assert condense(timeline, (0,), max_bars=1)  # fewer than one of each category is not possible, and not waited for
    assert condense(timeline, (0,), max_bars=9000) == events


@contextmanager
def browser(path: Path, scheme: str) -> Iterator[tuple[Any, list[str]]]:
    """The page in Chromium, drawn, and what it has complained about or loaded."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: make browser")
    seen: list[str] = []
    with api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = chromium.new_page(viewport={"width": 1366, "height": 768}, color_scheme=scheme)
        page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("request", lambda request: seen.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]", state="attached", timeout=120_000)
        yield page, seen
        chromium.close()


@pytest.mark.slow
def test_the_page_works_in_a_browser(found: Findings, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, found)
    with browser(path, "light") as (page, seen):
        charts = page.locator(".chart .main-svg").count()
        assert charts >= 8
        assert page.locator(".modebar-btn").count() >= charts
        assert page.locator(".modebar-btn[data-title*='hare'], .modebar-btn[data-title*='loud']").count() == 0
        assert float(page.locator("#step-time").get_attribute("value")) == found.answer.plan.step_time_s
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        # With the keyboard alone: first the link past the header, then the colors, then a chart.
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_function(f"{background} !== '{light}'")
        assert page.locator("#theme").get_attribute("aria-pressed") == "true"
        page.locator("button[data-figure=timeline][data-do=in]").focus()
        page.keyboard.press("Enter")
        left, right = page.evaluate("document.getElementById('timeline').layout.xaxis.range")
        assert (left, right) == pytest.approx((found.timeline.step_s * 250, found.timeline.step_s * 750), rel=1e-3)
        whole = right - left
        # Perfetto's keys, on the chart under the pointer, which a zoom leaves where it is.
        box = page.locator("#timeline").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
        width = "(([low, high]) => high - low)(document.getElementById('timeline').layout.xaxis.range)"
        for key, factor in (("w", 0.5), ("s", 1.0), ("d", 1.0), ("a", 1.0)):
            page.keyboard.press(key)
            page.wait_for_function(f"Math.abs({width} - {factor * whole}) < {whole / 1e3}")
        assert page.evaluate("document.getElementById('timeline').layout.xaxis.range") == pytest.approx([left, right])
        page.keyboard.press("0")
        page.wait_for_function(f"{width} > {1.9 * whole}")
        page.locator("select[data-figure=memory]").select_option(label="device group 1")
        visible = page.evaluate("document.getElementById('memory').data.map((trace) => trace.visible)")
        assert visible == [False] * len(MEMORY_KINDS) + [True] * len(MEMORY_KINDS)
        texts = page.evaluate("[...document.querySelectorAll('svg text, td, dd')].map((each) => each.textContent)")
        assert len(texts) > 100
        assert [text for text in texts if re.search(r"\de[+-]?\d|[\u00d7x]10", text)] == []
        page.locator("#roofline-section summary").click()
        assert not page.locator("#roofline").is_visible()
        assert seen == []
    with browser(path, "dark") as (page, seen):
        assert page.evaluate(background) not in (light, "rgba(0, 0, 0, 0)")
        assert seen == []
