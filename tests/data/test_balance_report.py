"""`model.report` of balanced batches: which plan ran them, how even ranks were, and steps beside their prices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from torch.utils.data import DataLoader

import autopar
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.observe.balance import Dealt, compare_balance, computing_s
from autopar.lower.observe.step_report import StepReport
from autopar.plan.prediction import GroupRow, LengthPlan, LengthPrediction
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.search import SearchRequest
from autopar.timeline import Event, StepTimeline
from autopar.verify.rehearsal import planner_for
from tests.data.test_balanced import TOKENS, Documents, rows_of_tokens, size, small_llama
from tests.lower.groups.cases import family
from tests.lower.runs import build, loss_of
from tests.zoo import quick_search


def event(stream: str, category: str, start_s: float, stop_s: float, layer: int = 0) -> Event:
    return Event(0, stream, "layer", category, start_s, stop_s, layer)


def test_computing_leaves_out_collectives_that_are_under_way() -> None:
    moved = [("gather", 1.0, 2.0), ("gather", 1.5, 3.0), ("reduce", 5.5, 9.0)]
    timeline = StepTimeline(10.0, (
        event("compute", "forward", 0.0, 4.0), event("compute", "backward", 4.0, 6.0),
        event("compute", "optimizer", 6.0, 7.0, layer=-1),
        *(event("communication", category, *when) for category, *when in moved),
    ))  # fmt: skip
    assert computing_s(timeline, 0) == (4 - 2) + (2 - 0.5)
    dealt = Dealt(0, step_time_s=8.0, imbalance=1.2)
    balance = compare_balance([(dealt, timeline)], 0, lambda own: [list(own), [2 * n for n in own]])
    assert balance is not None
    assert (balance.assigned, balance.measured, balance.ratios) == (1.2, pytest.approx(4 / 3), (1.25,))
    assert "1.33, 1.20 was assigned" in str(balance)
    assert compare_balance([], 0, lambda own: [list(own)]) is None


def test_steps_that_some_rank_did_not_measure_are_left_out() -> None:
    timeline = StepTimeline(10.0, (event("compute", "forward", 0.0, 4.0),))
    steps = [(Dealt(0, 8.0, 1.2, "rows of 4"), timeline), (Dealt(0, 5.0, 1.4, "groups"), None),
             (Dealt(0, 5.0, 1.6, "rows of 8"), timeline)]  # fmt: skip
    balance = compare_balance(steps, 0, lambda own: [list(own), [8 * 10**9, 1, 4 * 10**9]])
    assert balance is not None
    assert (balance.assigned, balance.measured) == (pytest.approx(1.4), pytest.approx((8 / 6 + 1) / 2))
    assert (balance.ratios, balance.runs_as) == ((1.25, 2.0), ("rows of 4", "rows of 8"))
    assert str(balance).splitlines()[2:] == [
        "  rows of 4: 1.25 (1.25 to 1.25), 1 steps", "  rows of 8: 2.00 (2.00 to 2.00), 1 steps",
    ]  # fmt: skip
    assert compare_balance(steps[1:2], 0, lambda own: [list(own)]) is None


@pytest.mark.slow
def test_a_report_follows_the_plan_that_ran_and_says_how_even_it_was() -> None:
    model, example = small_llama(), rows_of_tokens(2, TOKENS)
    traced = trace_model(model, example)
    plan = quick_search(traced.program, 2, SearchRequest(constraints=("data=2",)))
    planner = planner_for(model, traced, plan, [rows_of_tokens(4, TOKENS)], training=True)

    def rank(talk: Communicator) -> StepReport:
        made: Any = build(model, traced, plan, talk, planner=planner)
        made.call_inputs = call_inputs(model, example, traced.program, made.data_split, talk, is_local=True)
        loader = DataLoader(Documents([16, 9, 12, 8]), batch_size=4)  # two rows for each rank: not the first plan
        batches = cycle(autopar.balanced(loader, made, length=size, shifts="labels"))
        return made.report(lambda: loss_of(made(**next(batches))).backward(), steps=2)

    reports = simulate(2, rank)
    for report in reports:
        balance = report.balance
        assert balance is not None
        assert report.predicted is None  # what is simulated is the first plan
        assert len(balance.ratios) == len(report.steps_s) == 2
        assert balance.measured >= 1 <= balance.assigned
        assert "was assigned" in str(report)
    assert reports[0].balance.measured == reports[1].balance.measured  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_report_follows_groups_of_unlike_size() -> None:
    found = family(small_llama(), 4, [(2, "tensor=2"), (1, "")], "data=4 zero=1")
    groups = (GroupRow(2, TOKENS, 1.0, 1e-3), GroupRow(1, TOKENS // 2, 1.0, 2e-3))
    row = replace(found.plan.prediction.row, step_s=100.0)
    expected = LengthPrediction(plans=(LengthPlan(row),), groups=groups, coupling_s=0.5)
    found = replace(found, plan=replace(found.plan, prediction=replace(found.plan.prediction, lengths=expected)))

    def rank(talk: Communicator) -> StepReport:
        made = found.build(talk)
        # In the second batch two ranks have nothing to compute.
        loader = DataLoader(Documents([TOKENS, 7, 8, 3, 2, TOKENS]), batch_sampler=[[0, 1, 2, 3, 4], [5]])
        batches = cycle(autopar.balanced(loader, made, length=size, shifts="labels"))
        return made.report(lambda: loss_of(made(**next(batches))).backward(), steps=2, warmup=2)

    reports = simulate(4, rank)
    for number, report in enumerate(reports):
        assert len(report.steps_s) == 2
        assert report.predicted is None
        assert "groups of unlike size" in report.headline
        balance = report.balance
        assert balance is not None
        assert balance.runs_as == ("groups of 1 x 2 (16) + 2 x 1 (8)", "groups of 1 x 2 (16) + 2 x 1 (8)")
        assert len(balance.ratios) == 2
        computed = [event for event in report.measured.events if event.stream == "compute" and event.layer >= 0]
        assert bool(computed) or number >= 2
    assert len({report.balance.measured for report in reports if report.balance is not None}) == 1
    # Half of the ranks wait in one of the steps.
    assert all(report.balance is not None and report.balance.measured > 1.4 for report in reports)


@pytest.mark.slow
def test_a_report_follows_ranks_in_several_groups() -> None:
    found = family(small_llama(), 4, [(2, "sequence=2"), (1, "")], "data=4 zero=1")
    groups = (GroupRow(2, TOKENS, 2.0, 0.0), GroupRow(1, TOKENS // 2, 1.0, 0.0))
    row = replace(found.plan.prediction.row, step_s=100.0)
    expected = LengthPrediction(plans=(LengthPlan(row),), groups=groups, coupling_s=0.5, nests=True)
    found = replace(found, plan=replace(found.plan, prediction=replace(found.plan.prediction, lengths=expected)))

    def rank(talk: Communicator) -> tuple[StepReport, list[int]]:
        made = found.build(talk)
        loader = DataLoader(Documents([TOKENS, *[8] * 8]), batch_size=9)
        (batch,) = autopar.balanced(loader, made, length=size, shifts="labels")
        rows = [len(row) for row in batch["input_ids"].unbind()]
        return made.report(lambda: loss_of(made(**batch)).backward(), steps=2), rows

    for number, (report, rows) in enumerate(simulate(4, rank)):
        assert rows == ([16, 8] if number < 2 else [8, 8, 8])
        assert report.balance is not None
        assert report.balance.runs_as == ("groups of 1 x 2 (16), then 4 x 1 (8)",) * 2
        forwards = [e for e in report.measured.events if e.stream == "compute" and e.category == "forward"]
        counts = {layer: sum(e.layer == layer for e in forwards) for layer in {e.layer for e in forwards}}
        assert set(counts.values()) == {len(rows)}  # every layer ran once for each row, whichever group's
        ordered = sorted(forwards, key=lambda e: e.start_s)
        assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(ordered))
