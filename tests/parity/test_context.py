"""Attention whose rows are cut over devices trains as one device does, alone and with all else."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from autopar.plan import Plan
from autopar.search import SearchRequest, search
from autopar.search.labels import degrees
from tests.models import make_llama, tokens
from tests.zoo import Subject, assert_parity, plan_for, quick_prices, subject, trained_alone

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
FAST = {("llama", 2), ("bert", 2), ("gpt2", 2)}


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
    assert not any("ignored for these layers" in note for note in plan.notes)  # head and loss, too, at a batch of 8
    assert_parity(subject(name), plan)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_with_stages(schedule: str):
    constraints = ("pipeline=2", f"schedule={schedule}", "microbatches=4", "context=2")
    plan = plan_for("llama", 4, constraints, stages=True)
    assert context_degrees("llama", plan) == {2}
    assert_parity(subject("llama"), plan)


def plan_of(who: Subject, *constraints: str) -> Plan:
    return search(who.traced.program, 4, quick_prices(4), SearchRequest(constraints=constraints))


def test_a_batch_of_one_is_cut_to_the_loss():
    """The head joins the tokens with the batch, and cuts them all the same."""
    torch.manual_seed(0)
    model, inputs = make_llama(batch=1)
    who = trained_alone(model.double().train(), inputs)
    plan = plan_of(who, "context=4")
    assert {plan.strategies[layer.strategy].labels for layer in plan.layers} == {("sequence",), ("context",)}
    assert not any("context" in note for note in plan.notes)
    assert_parity(who, plan)


def windowed() -> Subject:
    """Layers that see 5 tokens back, and layers that see all."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    ids = tokens(2, 16, 64)
    return trained_alone(transformers.Gemma3ForCausalLM(config).double().train(), {"input_ids": ids, "labels": ids})


@pytest.mark.slow
def test_alternating_windows():
    who = windowed()
    for constraints in (("context=4",), ("context=2", "sequence=2")):
        plan = plan_of(who, *constraints)
        labels = {plan.strategies[layer.strategy].labels[0] for layer in plan.layers}
        assert labels == {"sequence", "context"}, plan.notes
        assert_parity(who, plan)
