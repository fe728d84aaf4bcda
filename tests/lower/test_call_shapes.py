"""Calls with inputs of other shapes than planned for: planned when they come, on the parameters as they are stored."""

from __future__ import annotations

import pytest

from tests.shapes import assert_exact, of_length, of_rows, random_batches, train_in_turns
from tests.zoo import plan_for, subject

TEXTS = ("llama", "gpt2", "t5", "deep_gpt2", "deep_llama")


def train_on(name: str, world: int, constraints: tuple[str, ...], others: list[dict[str, object]]) -> None:
    who = subject(name)
    plan = plan_for(name, world, constraints, stages=any(text.startswith("pipeline") for text in constraints))
    assert_exact(train_in_turns(who, plan, others))


@pytest.mark.parametrize(
    ("name", "world", "text"),
    [
        ("plain_gpt", 2, "data=2 zero=3"),
        pytest.param("plain_gpt", 2, "data=2 microbatches=2 zero=2 recompute=full", marks=pytest.mark.slow),
        pytest.param("llama", 4, "data=2 tensor=2 zero=1", marks=pytest.mark.slow),
        pytest.param("unet", 2, "data=2 zero=3", marks=pytest.mark.slow),
        pytest.param("t5", 2, "tensor=2", marks=pytest.mark.slow),
        pytest.param("deep_llama", 4, "pipeline=2 schedule=zbv microbatches=4 data=2 zero=2", marks=pytest.mark.slow),
        pytest.param("deep_batch_normed", 2, "data=2", marks=pytest.mark.slow),
    ],
)
def test_other_shapes_train_as_one_device_does(name: str, world: int, text: str) -> None:
    inputs = subject(name).inputs
    others = [of_rows(inputs, 4), of_rows(inputs, 7)]
    if name in TEXTS:
        others.append(of_length(inputs, 6))
    train_on(name, world, tuple(text.split()), others)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_shapes_train_as_one_device_does(seed: int) -> None:
    name = ("plain_gpt", "gpt2", "flat")[seed]
    constraints = (("data=2", "zero=3"), ("tensor=2",), ("data=2", "microbatches=2"))[seed]
    train_on(name, 2, constraints, random_batches(subject(name).inputs, seed, 3, has_lengths=name in TEXTS))
