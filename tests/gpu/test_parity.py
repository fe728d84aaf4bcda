"""Plans with CUDA's kernels: all ranks share one GPU, and are no further from float64 than one device alone is.

In 16 bits and in float32, attention, products of experts, copies to the host and compiled layers run other code than
on a CPU.  Every rank is a thread of this process, so these tests need one GPU; without one they are skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest, search
from autopar.trace import Traced
from autopar.verify import verify
from autopar.verify.rehearsal import Run, join_runs, run_ranks, run_single, train
from tests.models import tokens, unevenly_masked
from tests.parity.test_context import with_ring_only
from tests.parity.test_documents import positions
from tests.zoo import quick, quick_prices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

STEPS = 2
LENGTH = 64
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip

Batch = dict[str, Tensor]


def texts() -> Batch:
    ids = tokens(8, LENGTH, 128)
    return {"input_ids": ids, "labels": unevenly_masked(ids)}


def packed_texts() -> Batch:
    ids = tokens(8, LENGTH, 128)
    return {"input_ids": ids, "labels": ids, "position_ids": positions(([20, 1, 30, 13], [64], [63, 1]))}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def windowed() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=9))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=128, n_embd=128, n_layer=2, n_head=4, n_positions=LENGTH, resid_pdrop=0.0,
                                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False)
    )  # fmt: skip


def experts() -> nn.Module:
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, experts_implementation="grouped_mm"
    )
    return transformers.MixtralForCausalLM(config)


def deepseek() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 8}, moe_intermediate_size=64, n_routed_experts=8, n_group=4, topk_group=2,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, experts_implementation="grouped_mm",
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "llama": (llama, texts),
    "documents": (llama, packed_texts),
    "windows": (windowed, texts),
    "gpt2": (gpt2, texts),
    "experts": (experts, texts),
    "deepseek": (deepseek, texts),
}
CASES = {
    "llama": (
        (1, ()),
        (2, ("context=2",)),
        (4, ("context=4", "recompute=full")),
        (4, ("context=2", "sequence=2")),
        (2, ("tensor=2", "recompute=selective")),
        (4, ("data=2", "tensor=2", "zero=3")),
        (2, ("data=2", "offload=activations", "microbatches=2")),
        (2, ("data=2", "zero=1", "offload=optimizer")),
        (2, ("pipeline=2", "microbatches=4", "schedule=1f1b")),
    ),
    "documents": ((1, ()), (2, ("context=2",)), (4, ("context=2", "tensor=2"))),
    "windows": ((1, ()), (2, ("context=2",))),
    "gpt2": ((2, ("context=2",)),),
    "experts": ((1, ()), (2, ("expert=2",)), (4, ("expert=4",)), (2, ("tensor=2",))),
    "deepseek": ((2, ("expert=2",)),),
}


class Subject:
    """A model on the GPU, its trace there, and what one device makes of it, in its dtype and in float64."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        make, batch = MODELS[name]
        self.model = make().cuda().to(dtype).train()
        self.inputs = {key: x.cuda() for key, x in batch().items()}
        self.traced = trace_model(copy.deepcopy(self.model), self.inputs, device_type="cuda")
        self.alone = run_single(self.model, self.inputs, STEPS)
        double = copy.deepcopy(self.model).double()
        for module in double.modules():  # torch's grouped product is in 16 bits only
            if hasattr(module, "config"):
                module.config._experts_implementation = "batched_mm"
        self.exact = run_single(double, self.inputs, STEPS, in_double=True)


@cache
def subject(name: str, dtype: torch.dtype) -> Subject:
    return Subject(name, dtype)


def planned(traced: Traced, world: int, *constraints: str) -> Plan:
    request = SearchRequest(constraints=quick(constraints), schedules=schedule_actions)
    return search(traced.program, world, quick_prices(world), request)


def errors(run: Run, exact: Run) -> dict[str, float]:
    """Of each parameter's gradient the norm of the difference, relative to the norm of the exact one."""
    assert run.gradients.keys() == exact.gradients.keys()
    largest = max(float(x.norm()) for x in exact.gradients.values())
    return {
        name: float((run.gradients[name].to(x) - x).norm()) / max(float(x.norm()), 1e-3 * largest)
        for name, x in exact.gradients.items()
    }


def assert_as_exact(run: Run, alone: Run, exact: Run, floor: float) -> None:
    """No gradient is further from the exact one than twice what one device's is, but for `floor`; so for losses."""
    found, single = errors(run, exact), errors(alone, exact)
    worst = max(found, key=lambda name: found[name] - 2 * single[name])
    assert found[worst] <= 2 * single[worst] + floor, (worst, found[worst], single[worst])
    for mine, one, right in zip(run.losses, alone.losses, exact.losses, strict=True):
        assert abs(mine - right) <= 2 * abs(one - right) + floor * abs(right), (run.losses, alone.losses, exact.losses)
    print(
        f"gradients within {max(found.values()):.1e} of float64, those of one device within {max(single.values()):.1e}"
    )


FLOORS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
"""About five units in the last place: what another order of sums may add to one device's own error."""


def run_by(who: Subject, traced: Traced, plan: Plan) -> Run:
    return join_runs(run_ranks(who.model, traced, plan, lambda model: train(model, who.inputs, STEPS)), plan.num_groups)


@pytest.mark.parametrize(
    ("name", "world", "constraints"),
    [pytest.param(name, *case, id=f"{name}-{case[0]}-{'+'.join(case[1])}") for name in CASES for case in CASES[name]],
)
def test_in_16_bits(name: str, world: int, constraints: tuple[str, ...]) -> None:
    who = subject(name, torch.bfloat16)
    plan = planned(who.traced, world, *constraints)
    assert_as_exact(run_by(who, who.traced, plan), who.alone, who.exact, FLOORS[torch.bfloat16])


@pytest.mark.parametrize(("name", "constraints"), [
    ("llama", ("context=2",)), ("llama", ("tensor=2",)), ("gpt2", ("context=2",)), ("documents", ("context=2",)),
    ("windows", ("context=2",)),
])  # fmt: skip
def test_in_float32(name: str, constraints: tuple[str, ...]) -> None:
    """With the memory-efficient kernel in place of FlashAttention."""
    who = subject(name, torch.float32)
    plan = planned(who.traced, 2, *constraints)
    assert_as_exact(run_by(who, who.traced, plan), who.alone, who.exact, FLOORS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_ring(dtype: torch.dtype) -> None:
    who = subject("llama", dtype)
    traced = replace(who.traced, program=with_ring_only(who.traced.program))
    assert_as_exact(run_by(who, traced, planned(traced, 2, "context=2")), who.alone, who.exact, FLOORS[dtype])


@pytest.mark.parametrize("tokens", [48, 160])
def test_logits_in_pieces(tokens: int) -> None:
    who = subject("llama", torch.bfloat16)
    traced = who.traced.in_pieces(tokens)
    run = run_by(who, traced, planned(traced, 2, "tensor=2"))
    assert_as_exact(run, who.alone, who.exact, FLOORS[torch.bfloat16])


@pytest.mark.parametrize("constraints", [("data=2", "zero=3"), ("tensor=2",)], ids="+".join)
def test_verify_on_the_gpu(constraints: tuple[str, ...]) -> None:
    who = subject("llama", torch.float32)
    inputs: Mapping[str, Tensor] = who.inputs
    report = verify(who.model, planned(who.traced, 2, *constraints), inputs)
    assert report.loss_error < 1e-12
