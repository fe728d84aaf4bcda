"""Attention whose rows are cut over devices trains as one device does, alone and with all else."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.errors import ConstraintError
from autopar.ops.attention import WINDOWS
from autopar.plan import Plan
from autopar.program import Op, Program
from autopar.search import SearchRequest, search
from autopar.search.settings.labels import degrees
from autopar.trace import trace
from tests.models import make_llama, tokens
from tests.zoo import Subject, assert_parity, forced_plan, plan_for, subject, trained_alone

CASES = {
    "llama": (
        (2, ("context=2",)),
        (4, ("context=4", "zero=3", "recompute=full")),
        (4, ("context=4", "offload=activations")),
        (4, ("mesh=2x2", "context=4")),
        (4, ("context=2", "sequence=2")),
        (4, ("context=2", "tensor=2", "microbatches=4")),
        (8, ("context=2", "sequence=2", "data=2", "zero=3")),
    ),
    "bert": ((4, ("context=4",)),),
    "t5": ((4, ("context=4",)), (4, ("context=2", "sequence=2"))),
}
FAST = {("llama", 2)}


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
def test_with_stages():
    constraints = ("pipeline=2", "schedule=1f1b", "microbatches=4", "context=2")
    plan = plan_for("llama", 4, constraints, stages=True)
    assert context_degrees("llama", plan) == {2}
    assert_parity(subject("llama"), plan)


def plan_of(who: Subject, *constraints: str) -> Plan:
    return forced_plan(who.traced.program, 4, *constraints)


@pytest.mark.slow
def test_a_batch_of_one_is_cut_to_the_loss():
    """The head joins the tokens with the batch, and cuts them all the same."""
    torch.manual_seed(0)
    model, inputs = make_llama(batch=1)
    who = trained_alone(model.double().train(), inputs)
    plan = plan_of(who, "context=4")
    assert {plan.strategies[layer.strategy].labels for layer in plan.layers} == {("sequence",), ("context",)}
    assert not any("context" in note for note in plan.notes)
    assert_parity(who, plan)


RINGS = {
    "llama": (
        (2, ("context=2",)),
        (4, ("context=4", "zero=3", "recompute=full")),
        (4, ("context=2", "tensor=2", "microbatches=4")),
        (8, ("context=4", "sequence=2")),  # heads on the other axis
    ),
}


@pytest.mark.parametrize(
    ("name", "world", "constraints"),
    [pytest.param(name, world, texts, marks=() if (name, world) == ("llama", 2) else pytest.mark.slow)
     for name, each in RINGS.items() for world, texts in each],
)  # fmt: skip
def test_a_ring_trains_as_one_device_does(name: str, world: int, constraints: tuple[str, ...]):
    who = subject(name)
    ring = replace(who, traced=replace(who.traced, program=with_ring_only(who.traced.program)))
    plan = forced_plan(ring.traced.program, world, *constraints)
    kinds = [layer for layer in ring.traced.program.layers if any("attention" in op.target for op in layer.ops)]
    used = {
        factor for layer in kinds for planned in plan.layers if planned.kind == layer.kind
        for factors in plan.strategies[planned.strategy].assignments for factor in factors
    }  # fmt: skip
    assert "r" in used
    assert_parity(ring, plan)


@pytest.mark.slow
def test_the_search_takes_the_cheaper_way_and_a_ring_needs_less_memory():
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=1 << 16, dtype="bfloat16", use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, 1 << 16, dtype=torch.int64)
    program = trace(model, (), {"input_ids": ids, "labels": ids}, training=True).program
    prices = ClusterPrices(Cluster.of("h100", devices_per_node=8))
    request = SearchRequest(constraints=("context=8", "zero=0", "recompute=none"))
    both, ring, gathered = (
        search(each, 8, prices, request)
        for each in (program, with_ring_only(program), without(program, "ring_attention"))
    )
    assert ring.step_time_s < gathered.step_time_s  # its messages are hidden, and gathers of layers are not
    assert both.step_time_s <= ring.step_time_s * (1 + both.optimality_gap)
    assert ring.peak_memory_bytes < gathered.peak_memory_bytes


def with_ring_only(program: Program) -> Program:
    """Without the way that gathers keys and values."""
    return without(program, "context_attention")


def without(program: Program, kernel: str) -> Program:
    def change(op: Op) -> Op:
        return replace(op, options=tuple(option for option in op.options if option.kernel != kernel))

    return replace(program, layers=tuple(replace(layer, ops=tuple(map(change, layer.ops))) for layer in program.layers))


@pytest.mark.slow
def test_a_degree_that_divides_no_tokens_is_refused():
    """And the length that the message names is a way out, with the same loss."""
    length, degree, padded = 20, 4, 24
    model, inputs = make_llama(batch=2, layers=1, length=length)
    program = trace(model.double().train(), (), inputs).program
    message = f"context={degree}': rows of {length} tokens do not divide over {degree} .* Pad rows to {padded} tokens"
    with pytest.raises(ConstraintError, match=message):
        forced_plan(program, 4, f"context={degree}")
    ids = torch.nn.functional.pad(inputs["input_ids"], (0, padded - length))
    labels = torch.nn.functional.pad(inputs["labels"], (0, padded - length), value=-100)
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, model(**inputs).loss, rtol=1e-12, atol=0)
    program = trace(model, (), {"input_ids": ids, "labels": labels}).program
    forced_plan(program, 4, "context=4")


class VideoTransformer(nn.Module):
    """Attention between all patches of a video, modulated by a condition."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.modulation = nn.Conv3d(4, width, (1, 2, 2), (1, 2, 2)), nn.Linear(8, 3 * width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 16)

    def forward(self, video: Tensor, condition: Tensor, target: Tensor) -> Tensor:
        x = self.patches(video).flatten(2).transpose(1, 2)
        shift, scale, gate = self.modulation(silu(condition)).unsqueeze(1).chunk(3, -1)
        qkv = self.qkv(layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        q, k, v = qkv.view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return (self.head(x + gate * self.out(mixed)) - target).square().mean()


@pytest.mark.slow
def test_ring_and_ulysses_in_a_transformer_of_videos():
    torch.manual_seed(0)
    sizes = {"video": (2, 4, 2, 8, 8), "condition": (2, 8), "target": (2, 32, 16)}
    inputs = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    who = trained_alone(VideoTransformer().double(), inputs)
    plan = plan_of(who, "context=2", "sequence=2")
    assert {label for each in plan.strategies for label in each.labels} >= {"context", "sequence (Ulysses)"}
    assert_parity(who, plan)


@cache
def windowed() -> Subject:
    """Layers that see 5 tokens back, and layers that see all."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    ids = tokens(2, 16, 64)
    return trained_alone(transformers.Gemma3ForCausalLM(config).double().train(), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("world", "constraints"),
    [
        pytest.param(world, texts, marks=pytest.mark.slow)
        for world, texts in ((2, ("context=2",)), (4, ("context=2", "sequence=2")), (8, ("context=8",)))
    ],
)  # fmt: skip
def test_alternating_windows(world: int, constraints: tuple[str, ...]):
    """Keys and values of the device before are enough where the window reaches no further; else all are gathered."""
    who = windowed()
    windows = [op for layer in who.traced.program.layers for op in layer.ops if op.target == WINDOWS]
    assert [option.extent for op in windows for option in op.options if option.factor == "r"] == [4]
    degree = max(int(each) for each in re.findall(r"context=(\d)", " ".join(constraints)))
    for kernel in ("context_windows", "neighbor_windows")[: 2 if degree <= 4 else 1]:
        other = "neighbor_windows" if kernel == "context_windows" else "context_windows"
        one = replace(who, traced=replace(who.traced, program=without(who.traced.program, other)))
        plan = forced_plan(one.traced.program, world, *constraints)
        assert "context" in {label for layer in plan.layers for label in plan.strategies[layer.strategy].labels}
        assert_parity(one, plan)
