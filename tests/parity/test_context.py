"""Attention whose rows are cut over devices trains as one device does, alone and with all else."""

from __future__ import annotations

import re

import pytest

from autopar.plan import Plan
from autopar.search.labels import degrees
from tests.zoo import assert_parity, plan_for, subject

CASES = {
    "llama": (
        (2, ("context=2",)),
        (4, ("context=4",)),
        (4, ("context=4", "zero=3", "recompute=full")),
        (4, ("context=4", "recompute=selective")),
        (4, ("context=4", "offload=activations")),
        (4, ("mesh=2x2", "context=4")),
        (4, ("context=2", "sequence=2")),
        (4, ("context=2", "tensor=2", "microbatches=4")),
        (4, ("context=2", "data=2", "zero=2")),
        (8, ("context=2", "sequence=2", "data=2", "zero=3")),
    ),
    "gpt2": ((2, ("context=2",)), (4, ("context=4", "zero=3", "recompute=full"))),
    "bert": ((2, ("context=2",)), (4, ("context=4",))),
    "t5": ((2, ("context=2",)), (4, ("context=4",))),
    "plain_gpt": ((4, ("context=4",)),),
}
FAST = {("llama", 2), ("bert", 2)}


def cases() -> list:
    return [
        pytest.param(name, world, constraints, id=f"{name}-{world}-{'+'.join(constraints)}",
                     marks=() if (name, world) in FAST else pytest.mark.slow)
        for name, each in CASES.items() for world, constraints in each
    ]  # fmt: skip


def context_degrees(name: str, plan: Plan) -> set[int]:
    """What is cut so in the layers with attention."""
    kinds = {
        layer.kind for layer in subject(name).traced.program.layers for op in layer.ops if "attention" in op.target
    }
    strategies = [plan.strategies[layer.strategy] for layer in plan.layers if layer.kind in kinds]
    return {degrees(each.labels, each.mesh)["context"] for each in strategies}


@pytest.mark.parametrize(("name", "world", "constraints"), cases())
def test_context_parallelism_trains_as_one_device_does(name: str, world: int, constraints: tuple[str, ...]):
    plan = plan_for(name, world, constraints)
    (degree,) = re.findall(r"context=(\d)", " ".join(constraints))
    assert int(degree) in context_degrees(name, plan), plan.notes
    assert_parity(subject(name), plan)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_with_stages(schedule: str):
    constraints = ("pipeline=2", f"schedule={schedule}", "microbatches=4", "context=2")
    plan = plan_for("llama", 4, constraints, stages=True)
    assert context_degrees("llama", plan) == {2}
    assert_parity(subject("llama"), plan)
