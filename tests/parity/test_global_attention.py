"""Longformer asks which tokens attend to all: the places of the global attention mask are part of a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LongformerConfig, LongformerForMaskedLM

from autopar.planning.call_traces import trace_model
from autopar.verify.rehearsal import keep_double_program
from tests.lower.runs import assert_batches_train_alone


def small() -> nn.Module:
    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64,
        attention_window=[4], max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return LongformerForMaskedLM(config).double()


def batch_of(places: list[list[int]], seed: int) -> dict[str, Tensor]:
    """A row with each of these lists of places that attend to all."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (len(places), 8), generator=random)
    is_global = torch.zeros_like(ids)
    for row, own in zip(is_global, places, strict=True):
        row[own] = 1
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "global_attention_mask": is_global, "labels": ids,
    }  # fmt: skip


BATCHES = [batch_of([[0]] * 4, 1), batch_of([[0], [0, 3], [0], [0]], 2), batch_of([[0]] * 4, 3), batch_of([[]] * 4, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "constraints"), [(2, "data=2"), (2, "tensor=2"), (4, "data=4 zero=3")])
def test_places_of_global_attention_train_as_on_one_device(ranks: int, constraints: str) -> None:
    model = small()
    traced = keep_double_program(trace_model(model, BATCHES[0]))
    assert not traced.read_values
    # The third batch has the places of the first.
    assert_batches_train_alone(model, traced, BATCHES, ranks, constraints.split(), num_plans=3)
