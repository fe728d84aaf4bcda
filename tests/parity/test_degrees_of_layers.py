"""Degrees that patterns demand of some layers: what they mean beside those of the whole plan, and what is refused."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.errors import ConstraintError
from autopar.search.settings.labels import degrees
from tests.models import make_mixtral
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone

pytest.importorskip("transformers.integrations.moe")


@cache
def mixture() -> Subject:
    model, inputs = make_mixtral(layers=2)
    return trained_alone(model.double().train(), inputs)


def degrees_of(who: Subject, *constraints: str) -> dict[str, dict[str, int]]:
    """Name of a layer -> its degrees, in a plan for 4 devices that trains as one device does."""
    plan = forced_plan(who.traced.program, 4, *constraints)
    assert_parity(who, plan, priced=False)
    strategies = {layer.name: plan.strategies[layer.strategy] for layer in plan.layers}
    return {name: degrees(strategy.labels, strategy.mesh) for name, strategy in strategies.items()}


@pytest.mark.slow
def test_a_layers_own_degree_counts_before_that_of_the_whole_plan() -> None:
    found = degrees_of(mixture(), "data=4", "model.layers.1: expert=4")
    assert (found["model.layers.0"]["data"], found["model.layers.0"]["expert"]) == (4, 1)
    assert (found["model.layers.1"]["data"], found["model.layers.1"]["expert"]) == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraints", "own"),
    [
        (("model.layers.0: expert=2", "model.layers.1: expert=4"), ("expert=2", "expert=4")),
        (("model.layers.0: tensor=4", "model.layers.1: expert=4"), ("tensor=4", "expert=4")),
        (("model.layers.0: context=4", "model.layers.1: context=2"), ("context=4", "context=2")),
        (("context=4", "model.layers.1: sequence=2", "model.layers.1: context=1"), ("context=4", "sequence=2")),
    ],
)
def test_layers_of_unlike_degrees_train_as_one_device(constraints: tuple[str, ...], own: tuple[str, ...]) -> None:
    found = degrees_of(mixture(), *constraints)
    for index, text in enumerate(own):
        name, _, degree = text.partition("=")
        assert found[f"model.layers.{index}"][name] == int(degree)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (("lm_head: expert=2",), r"expert=2: no layer that the pattern matches has experts; those .* model.layers.0, "),
        (("model.layers.*: expert=4", "*.0: data=4"), r"both match layer 'model.layers.0'.* multiple of 16 devices"),
        (("pipeline=2", "*.0: data=2", "*.0: tensor=2"), r"multiple of 4 devices, but there are 2"),
        (("pipeline=2", "*.0: context=4"), r"4 does not divide the 2 devices"),
    ],
)
def test_what_layers_can_not_meet_is_refused(constraints: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        forced_plan(mixture().traced.program, 4, *constraints)


def test_a_degree_that_patterns_override_wherever_there_are_experts_is_no_error() -> None:
    found = degrees_of(mixture(), "expert=4", "model.layers.*: expert=2")
    assert {found[f"model.layers.{index}"]["expert"] for index in (0, 1)} == {2}
