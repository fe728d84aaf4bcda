"""The editing loop: a plan is written, changed by short texts or in an editor, checked, rehearsed and run."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import pytest

from autopar.cost.profile import Curve, Point, Profile
from autopar.explain.cli import main
from autopar.plan import Plan
from tests.end_to_end.harness import assert_same_step, launch, parallelize
from tests.explain.targets import make_real

HERE = ("--cluster", "2xcpu", "--constraint", "pipeline=1", "--constraint", "data=2", "--why-seconds", "0")
REAL = "tests.explain.targets:make_real"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([REAL, *HERE, *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
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


CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
def test_a_config_gets_values_to_be_rehearsed_with_where_it_is_small(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = (str(tmp_path / "config.json"), "--batch", "4", *HERE)
    plan = str(tmp_path / "plan.json")
    assert main([*given, "--save", plan]) == 0
    assert main([*given, "--check", plan, "--rehearse"]) == 0
    assert "2 ranks against one device" in capsys.readouterr().out
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 8)
    assert main([*given, "--check", plan, "--rehearse"]) == 1
    assert "smaller copy of the model, with fewer and narrower layers" in capsys.readouterr().err


def test_measured_prices_are_told_and_belong_to_the_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    optimizer = {"optimizer": Curve((Point(1.0, 1e-3), Point(1e9, 10.0)))}
    Profile("cpu", 2, "2026", {}, optimizer).save(path)
    found = json.loads(ask(capsys, "--profile", path, "--json"))
    assert dict(found["explanation"]["sources"])["measured"] > 0
    assert main([REAL, "--cluster", "2xh100", "--profile", path]) == 1
    assert "is of cpu, but --cluster has H100" in capsys.readouterr().err
    assert main([REAL, "--cluster", "2xcpu", "--profile", str(tmp_path)]) == 1
    assert "python -m autopar.profile --output" in capsys.readouterr().err


def check_that_it_runs(path: str) -> None:
    """On a rank: one step by the plan at `path`, as one device takes it."""
    model, inputs = make_real()
    parallel = parallelize(copy.deepcopy(model), inputs, plan=path)
    assert parallel.plan == Plan.load(path)
    assert {strategy.zero for strategy in parallel.plan.strategies} == {0, 3}
    assert_same_step(parallel, model, inputs)
