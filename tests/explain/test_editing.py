"""The editing loop: a plan is written, changed by short texts or in an editor, checked, rehearsed and run."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import pytest

from autopar.explain.cli import main
from autopar.plan import Plan
from tests.end_to_end.harness import assert_same_step, launch, parallelize
from tests.explain.targets import make_real

HERE = ("--cluster", "2xcpu", "--constraint", "pipeline=1", "--constraint", "data=2", "--why-seconds", "0")
REAL = "tests.explain.targets:make_real"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([REAL, *HERE, *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_plan_is_edited_checked_and_back_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    text = ask(capsys, "--edit", path)
    assert "--set" in text
    assert f"--check {path}" in text
    first = Plan.load(path)
    text = ask(capsys, "--edit", path, "--set", "blocks.1: recompute=full", "--set", "zero=3")
    assert "blocks.1: recompute" in text
    edited = Plan.load(path)
    ways = {layer.name: edited.strategies[layer.strategy] for layer in edited.layers}
    assert {name: way.recompute == "full" for name, way in ways.items()} == {name: name == "blocks.1" for name in ways}
    assert all(way.zero == 3 for way in ways.values())
    assert edited.step_time_s > first.step_time_s  # it was priced again
    assert edited.costs != first.costs
    assert all(any(placement.is_shard for layout in way.storage for placement in layout) for way in ways.values())
    found = json.loads(ask(capsys, "--check", path, "--json"))
    assert found["step_time_s"] == [first.step_time_s, edited.step_time_s]
    ask(capsys, "--edit", path, "--set", "blocks.1: like=blocks.0", "--set", "zero=0")
    assert Plan.load(path).strategies == first.strategies
    assert "+0.0%" in ask(capsys, "--check", path)


@pytest.mark.slow
def test_an_edited_plan_is_rehearsed_and_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    ask(capsys, "--edit", path, "--set", "blocks.*: zero=3", "--set", "*head: recompute=full")
    assert "2 ranks against one device" in ask(capsys, "--check", path, "--rehearse")
    launch(2, partial(check_that_it_runs, path))


def check_that_it_runs(path: str) -> None:
    """On a rank: one step by the plan at `path`, as one device takes it."""
    model, inputs = make_real()
    parallel = parallelize(copy.deepcopy(model), inputs, plan=path)
    assert parallel.plan == Plan.load(path)
    assert {strategy.zero for strategy in parallel.plan.strategies} == {0, 3}
    assert_same_step(parallel, model, inputs)
