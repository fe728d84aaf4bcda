"""Model FLOPs are those of the usual formula, counted by hand."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import autopar
from autopar.planning.call_traces import trace_model
from autopar.step.costs.model_flops import model_flops
from autopar.step.training import TrainingSpec

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 16, 32, 2, 64


class Small(nn.Module):
    """One layer of attention and a product, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.mixing = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mixing(x).chunk(3, dim=-1))
        x = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


TOKENS = BATCH * LENGTH
MIXING, HEAD = 2.0 * TOKENS * WIDTH * 3 * WIDTH, 2.0 * TOKENS * WIDTH * WORDS
ATTENTION = 0.5 * 2 * 2.0 * BATCH * LENGTH * LENGTH * WIDTH  # two products, of which causal attention needs half


def counted(model: nn.Module, *, is_training: bool = True) -> float:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    program = trace_model(model, (ids,)).program
    assert program.num_tokens == TOKENS
    return model_flops(program, TrainingSpec(is_training=is_training))["float32"]


def test_forward_and_twice_as_much_backward() -> None:
    assert counted(Small()) == pytest.approx(3 * (MIXING + ATTENTION + HEAD))
    assert counted(Small(), is_training=False) == pytest.approx(MIXING + ATTENTION + HEAD)


def test_frozen_weights_save_the_product_of_their_gradient() -> None:
    model = Small()
    model.mixing.weight.requires_grad_(False)
    assert counted(model) == pytest.approx(2 * MIXING + 3 * (ATTENTION + HEAD))


def test_logits_in_pieces_and_recomputation_change_nothing() -> None:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    flops = [
        autopar.plan(Small(), cluster, (ids,), constraints=[text, "data=2"]).prediction.model_flops
        for text in ("logits=whole", "logits=8", "recompute=full")
    ]
    assert flops == pytest.approx([3 * (MIXING + ATTENTION + HEAD)] * 3)
