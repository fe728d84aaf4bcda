"""Plans of real models: priced again they have the numbers of their search; constraints hold with stages as well."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.search import TrainingSpec
from autopar.step.pricing import predict
from tests.zoo import plan_for, quick_prices, subject


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("model", "constraints"),
    [
        pytest.param("gpt2", ("pipeline=1",), marks=pytest.mark.slow),
        pytest.param("llama", ("pipeline=1", "tensor=2", "zero=3"), marks=pytest.mark.slow),
        ("plain_gpt", ("pipeline=1", "microbatches=2", "zero=2")),
        ("gpt2", ("pipeline=2", "schedule=1f1b", "microbatches=2")),
    ],
)
def test_of_a_searched_plan_nothing_changes(model: str, constraints: tuple[str, ...]) -> None:
    staged = "pipeline=2" in constraints
    plan = plan_for(model, 4, constraints, stages=True)
    assert bool(plan.stages) == staged
    program = subject(model).traced.program
    assert predict(program, plan.decisions, quick_prices(4), TrainingSpec(), schedule_actions) == plan.prediction


def test_a_plan_that_recomputes_more_is_slower() -> None:
    plan = plan_for("plain_gpt", 4, ("pipeline=1", "recompute=none"), stages=True)
    edited = replace(plan.decisions, strategies=tuple(replace(each, recompute="full") for each in plan.strategies))
    found = predict(subject("plain_gpt").traced.program, edited, quick_prices(4), TrainingSpec(), schedule_actions)
    assert found.step_time_s > plan.step_time_s


@pytest.mark.slow
def test_a_pipeline_never_excuses_a_plan_from_a_degree() -> None:
    """On groups of two devices no layer can be cut into four: such pipelines are out, not the demand."""
    constraints = ("model.layers.0: tensor=4", "model.layers.1: data=2", "model.layers.1: tensor=2")
    plan = plan_for("llama", 4, constraints, stages=True)
    layer = next(layer for layer in plan.layers if layer.name == "model.layers.0")
    strategy = plan.strategies[layer.strategy]
    axes = zip(strategy.mesh, strategy.labels, strict=True)
    assert math.prod(size for size, label in axes if "tensor" in label.split("+")) == 4
    assert not plan.stages
