"""Calls with a text that grows by a token a call: one plan for many lengths, where that is exact."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.lower import ParallelModule
from autopar.trace import Traced, trace
from autopar.verify.rehearsal import planner_for, run_ranks
from tests.scripts.nanogpt import GPT, GPTConfig
from tests.zoo import forced_plan, plan_for, subject

Calls = Sequence[Mapping[str, Tensor]]


def forms(model: nn.Module, traced: Traced, plan: Any, calls: Calls) -> list[str]:
    """The forms of calls in eval mode that were planned; what they give is what one device gives."""
    planner = planner_for(model, traced, plan, calls)  # the first length alone is one of many that are known then
    alone = copy.deepcopy(model).eval()
    with torch.no_grad():
        expected = [first(alone(**call)) for call in calls]

    def rank(parallel: ParallelModule) -> Any:
        parallel.eval()
        with torch.no_grad():
            found = [first(parallel(**call)).clone() for call in calls]
        return found, [call.inputs for call in parallel.plans if not call.is_training]

    runs = run_ranks(model, traced, plan, rank, planner)
    for found, _ in runs:
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-12, atol=1e-12)
    assert all(planned == runs[0][1] for _, planned in runs)
    return runs[0][1]


def first(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs.logits


def nanogpt(block_size: int) -> tuple[nn.Module, Traced, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=block_size)).double()
    ids = torch.randint(64, (8, 16))
    traced = trace(model, (), {"idx": ids, "targets": ids}, training=True)
    return model, traced, forced_plan(traced.program, 2, "data=2")


@pytest.mark.slow
def test_nanogpt_samples_by_one_plan() -> None:
    """It gives the logits of the last token only."""
    torch.manual_seed(1)
    ids = torch.randint(64, (1, 70))
    calls = [{"idx": ids[:, :n]} for n in (5, 6, 7, 40, 63, 5, 70, 66)]
    found = forms(*nanogpt(128), calls)
    assert sorted(found) == ["idx [1, 2 to 64]", "idx [1, 65 to 128]"]


@pytest.mark.slow
def test_texts_do_not_reach_behind_the_table_of_positions() -> None:
    """16 positions: padded to the length of training, not to 64."""
    ids = torch.arange(16)[None]
    found = forms(*nanogpt(16), [{"idx": ids[:, :n]} for n in (5, 6, 9, 15)])
    assert sorted(found) == ["idx [1, 2 to 16]"]


@pytest.mark.parametrize(
    ("name", "text", "has_mask"),
    [
        pytest.param("gpt2", "data=2", False, marks=pytest.mark.slow),
        pytest.param("llama", "data=2", True, marks=pytest.mark.slow),
    ],
)
def test_models_of_transformers(name: str, text: str, has_mask: bool) -> None:
    who = subject(name)
    calls = [texts(2, n, has_mask=has_mask) for n in (5, 6, 9, 12)]
    found = forms(who.model, who.traced, plan_for(name, 2, (text,)), calls)
    if not has_mask:
        assert found == ["input_ids [2, 2 to 64]"]


def texts(rows: int, length: int, *, has_mask: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(30, (rows, 64))[:, :length]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if has_mask else {"input_ids": ids}


@pytest.mark.slow
def test_places_that_see_all_others_are_not_padded() -> None:
    who = subject("bert")
    found = forms(who.model, who.traced, plan_for("bert", 2, ("data=2",)), [texts(2, n) for n in (5, 6)])
    assert len(found) == 2


class ByLength(nn.Module):
    """Its code looks at the length: what is known of two lengths is not so for all between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 64, dtype=torch.float64)

    def forward(self, idx: Tensor) -> tuple[Tensor]:
        x = self.embedding(idx)
        return (self.head(2 * x if idx.shape[1] == 9 else x),)


def test_code_that_looks_at_the_length_is_not_padded() -> None:
    model = ByLength()
    traced = trace(model, (torch.zeros(8, 16, dtype=torch.long),), {}, training=True)
    plan = forced_plan(traced.program, 2, "data=2")
    ids = torch.arange(16)[None]
    assert len(forms(model, traced, plan, [{"idx": ids[:, :n]} for n in (5, 6, 9)])) == 3
