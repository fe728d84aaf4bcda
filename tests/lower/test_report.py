"""`model.report()`: what is measured of a step, beside what was predicted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from autopar.errors import QuestionError
from autopar.lower import ParallelModule
from autopar.lower.observe.step_report import COLUMNS, StepReport
from autopar.timeline import Event, StepTimeline
from autopar.verify.rehearsal import loss_of, run_ranks
from tests.zoo import plan_for, subject


def reports(name: str, *constraints: str) -> list[StepReport]:
    who, plan = subject(name, torch.float32), plan_for(name, 2, constraints, torch.float32)

    def measure(model: ParallelModule) -> StepReport:
        return model.report(lambda: loss_of(model(**who.inputs)).backward(), steps=2)

    return run_ranks(who.model, who.traced, plan, measure)


def test_every_layer_and_collective_is_measured_once(tmp_path: Path) -> None:
    report = reports("llama", "data=2", "zero=3", "microbatches=1", "recompute=none")[0]
    compute = report.measured.on(0, "compute")
    for earlier, later in itertools.pairwise(compute):
        assert earlier.stop_s <= later.start_s, "compute does one thing at a time"
    passes = [(event.category, event.layer) for event in compute if event.layer >= 0]
    layers = sorted(report.layers)
    assert passes == [("forward", i) for i in layers] + [("backward", i) for i in reversed(layers)]
    assert sum(event.seconds for event in compute) <= report.measured.step_s
    moved = [(e.category, e.layer) for e in report.measured.on(0, "parameters")]
    for layer in layers[1:]:
        assert moved.count(("reduce", layer)) == 1
        assert moved.count(("gather", layer)) == 2, "forward and backward"
    (_, cells), *_ = report.rows()
    assert all(predicted_s is not None and predicted_s >= 0 for predicted_s, _ in cells)
    report.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(report.measured.events)


def test_the_table_adds_up_layers_that_run_alike() -> None:
    def step(scale: float) -> StepTimeline:
        events = [
            Event(0, "compute", f"layer{layer}", category, scale * layer, scale * (layer + 1), layer)
            for layer, category in ((0, "forward"), (1, "forward"), (2, "backward"))
        ]
        sent = [Event(0, "parameters", "layer0", "reduce", s * scale, (s + 2) * scale, 0) for s in (0, 1)]
        return StepTimeline(4 * scale, (*events, *sent))

    names = {0: "layer0", 1: "layer1", 2: "layer2"}
    report = StepReport.of([step(3e-3), step(1e-3), step(2e-3)], step(1e-3), names, ((0, 1), (2,)), 0)
    assert report.measured.step_s == pytest.approx(8e-3), "the median step"
    (alike, cells), (alone, _) = report.rows()
    assert (alike, alone) == ("layer0 ... layer1 (2)", "layer2")
    assert dict(zip(COLUMNS, cells, strict=True))["forward"] == pytest.approx((2e-3, 4e-3))
    assert report.stream_s(report.measured, "parameters") == pytest.approx(6e-3), "what overlaps counts once"
    assert "4 ms / 8 ms" in str(report)
    assert "2.00" in str(report)


def test_kernels_are_the_layers_own() -> None:
    who, plan = (
        subject("llama", torch.float32),
        plan_for("llama", 1, ("microbatches=1", "recompute=none"), torch.float32),
    )

    def measure(model: ParallelModule) -> StepReport:
        return model.report(lambda: loss_of(model(**who.inputs)).backward(), steps=1, kernels=True)

    (report,) = run_ranks(who.model, who.traced, plan, measure)
    ran = {(each.layer, each.category, each.name): each for each in report.kernels}
    products = {key for key in ran if key[2] in ("aten::mm", "aten::addmm", "aten::bmm")}
    assert {(layer, category) for layer, category, _ in products} >= {
        (layer, category) for layer in sorted(report.layers)[1:-1] for category in ("forward", "backward")
    }
    names = {name for _, category, name in ran if category == "forward"}
    assert not any("backward" in name.lower() for name in names), "each pass has its own"
    assert all(0 < sum(share for *_, share in kernels) <= 1 + 1e-9 for *_, kernels in report.top_kernels())
    assert "aten::" in str(report)


def test_a_step_of_another_form_is_refused() -> None:
    who, plan = subject("llama", torch.float32), plan_for("llama", 1, ("microbatches=1",), torch.float32)
    with pytest.raises(QuestionError, match="no measured step made one training call by a plan that was known before"):
        run_ranks(who.model, who.traced, plan, lambda model: model.report(lambda: None, steps=1))


def test_the_page_has_the_reports_numbers(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    report = reports("llama", "tensor=2", "microbatches=1")[1]
    report.html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f'id="measured-step" value="{report.measured.step_s}"' in page
    for name, _, measured_s in report.streams():
        assert name in page
        assert measured_s is None or f'value="{measured_s}"' in page
