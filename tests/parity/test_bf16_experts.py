"""Experts in bfloat16: given who computes what, gradients are as near to those of float32 as one device's are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from autopar.lower import ParallelModule
from autopar.lower.autograd import run_backward
from autopar.planning.call_traces import trace_model
from autopar.trace import Traced
from autopar.verify.differences import relative_error
from autopar.verify.rehearsal import Run, join_runs, run_ranks
from tests.zoo import forced_plan

pytest.importorskip("transformers.integrations.moe")

from tests.parity.test_experts import make

Gradients = Mapping[str, Tensor]


class Replayed(nn.Module):
    """Qwen3-MoE whose tokens go to given experts, so that rounding can't send them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = make("qwen")[0]
        self.model.config.output_router_logits = False  # of a router that is left out
        for layer in self.model.model.layers:
            layer.mlp.gate.forward = self.routed(layer.mlp.gate)

    @staticmethod
    def routed(gate: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            weights = logits.softmax(-1, dtype=torch.float32).gather(1, gate.chosen)
            return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), gate.chosen

        return forward

    def forward(self, input_ids: Tensor, labels: Tensor, chosen: Tensor) -> Tensor:
        """A scalar; `chosen` are [rows, tokens, k] experts."""
        for layer in self.model.model.layers:
            layer.mlp.gate.chosen = chosen.flatten(0, 1)
        return self.model(input_ids=input_ids, labels=labels).loss


@cache
def replayed() -> tuple[Replayed, dict[str, Tensor], Traced]:
    _, inputs = make("qwen")
    generator = torch.Generator().manual_seed(0)
    inputs["chosen"] = torch.rand(*inputs["input_ids"].shape, 8, generator=generator).topk(2).indices
    model = Replayed()
    return model, inputs, trace_model(model, inputs, dtype=torch.bfloat16)


def alone(dtype: torch.dtype) -> Gradients:
    """On one device that computes in `dtype`, of parameters in float32."""
    model, inputs, _ = replayed()
    model.zero_grad()
    functional_call(model, {n: p.to(dtype) for n, p in model.named_parameters()}, kwargs=inputs).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    return {n: relative_error(g, found[n]) for n, g in expected.items() if g.any()}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "constraints", [("expert=2",), ("tensor=2",), ("data=2", "zero=3"), ("data=2", "microbatches=2")], ids=" ".join
)
def test_gradients_round_as_one_devices_do(constraints: tuple[str, ...]):
    model, inputs, traced = replayed()
    plan = forced_plan(traced.program, 2, *constraints)

    def rank(parallel: ParallelModule) -> Run:
        loss = parallel(**inputs)
        run_backward(loss)
        return Run((loss.item(),), {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}, {}, {})

    found = join_runs(run_ranks(model, traced, plan, rank), plan.num_groups).gradients
    exact, rounded = alone(torch.float32), alone(torch.bfloat16)
    assert found.keys() == exact.keys()
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    unavoidable, made = max(errors(rounded, exact).values()), max(errors(found, exact).values())
    assert 1e-3 < unavoidable < 0.05, "the rounding is to be seen"
    assert made < 1.5 * unavoidable, f"{made} for {unavoidable} on one device"
