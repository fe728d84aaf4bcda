"""Torch's own attention and transformer layers, in whose kernels the batch is the first dim of no tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.trace import trace
from tests.trace.interpreter import interpret
from tests.zoo import assert_parity, forced_plan, trained_alone

X, Y, PADDED = torch.randn(4, 8, 32).double(), torch.randn(4, 6, 16).double(), torch.arange(8).expand(4, 8) > 5
CAUSAL = torch.ones(8, 8, dtype=torch.bool).triu(1)
Call = Callable[..., Any]


class Calls(nn.Module):
    """A module, and how it is called."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module.double(), call

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        """[4, 8, 32], others -> a scalar."""
        made = self.call(self.module, x, **inputs)
        return sum((each.square().mean() for each in made), x.new_zeros(())) if isinstance(made, tuple) else made.sum()


def attention(**kwargs: Any) -> nn.Module:
    return nn.MultiheadAttention(32, 4, **kwargs)


def each_head(m: Any, x: Tensor, padding: Tensor) -> Any:
    return m(x, x, x, key_padding_mask=padding, average_attn_weights=False)


def without_weights(m: Any, x: Tensor, padding: Tensor) -> Any:
    return m(x, x, x, key_padding_mask=padding, attn_mask=CAUSAL, need_weights=False)[:1]


def masks_of_heads(m: Any, x: Tensor, bias: Tensor) -> Any:
    return m(x, x, x, attn_mask=bias.flatten(0, 1), need_weights=False)[:1]


def tokens_first(m: Any, x: Tensor) -> Any:
    x = x.transpose(0, 1)
    return m(x, x, x, need_weights=False)[:1]


def decoder(m: Any, x: Tensor, y: Tensor) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(8, dtype=x.dtype)
    return m(x, y @ y.new_ones(16, 32), tgt_mask=mask, tgt_is_causal=True).square()


class Fairseq(nn.Module):
    """Attention as research code writes it: tokens first, with the rows of all samples merged for products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, 32] -> the same."""
        rows, tokens, width = x.shape
        q, k, v = (
            part.reshape(tokens, rows * 4, 8).transpose(0, 1) for part in self.qkv(x.transpose(0, 1)).chunk(3, -1)
        )
        made = torch.bmm(functional.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
        made = torch.tanh(made.transpose(0, 1).reshape(tokens * rows, width))
        return self.out(made).relu().view(tokens, rows, width).transpose(0, 1)


BATCH = {"batch_first": True}
CALLS: Mapping[str, tuple[Callable[[], nn.Module], Call, Mapping[str, Tensor]]] = {
    "weights": (lambda: attention(**BATCH), lambda m, x: m(x, x, x), {}),
    "weights of each head": (lambda: attention(**BATCH), each_head, {"padding": PADDED}),
    "masks": (lambda: attention(**BATCH, bias=False), without_weights, {"padding": PADDED}),
    "masks of heads": (lambda: attention(**BATCH), masks_of_heads, {"bias": torch.randn(4, 4, 8, 8).double()}),
    "keys of another width": (
        lambda: attention(**BATCH, kdim=16, vdim=16), lambda m, x, y: m(x, y, y, need_weights=False)[:1], {"y": Y},
    ),
    "other values": (lambda: attention(**BATCH), lambda m, x: m(x, x.sin(), x.cos()), {}),
    "tokens first": (attention, tokens_first, {}),
    "decoder": (lambda: nn.TransformerDecoderLayer(32, 4, 64, 0.0, **BATCH), decoder, {"y": Y}),
    "written by hand": (Fairseq, lambda m, x: m(x).square(), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_batch_is_sliced_and_shared(name: str) -> None:
    torch.manual_seed(0)
    make, call, inputs = CALLS[name]
    who = trained_alone(Calls(make(), call), {"x": X, **inputs})
    for constraint in ("data=2", "microbatches=2"):
        plan = forced_plan(who.traced.program, 2, constraint)
        if name not in ("tokens first", "written by hand"):  # there the first dim is no batch
            assert not any("can't use" in note for note in plan.notes)
        assert_parity(who, plan)


@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_further_keys_are_traced(extra: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = Calls(attention(**BATCH, **extra), lambda m, x: m(x, x, x, need_weights=False)[:1])
    (found,), _ = interpret(trace(model, (X,), {}), model, [X])
    torch.testing.assert_close(found, model(X))
