"""``flex_attention`` trains as on one device, with any `score_mod` and block mask; what can't be done says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)  # fmt: skip
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.errors import InputShapeError, TraceError
from autopar.trace import dense_flex_attention, trace
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone

Call = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Network(nn.Module):
    """One attention with 4 heads, 2 of keys and values, slopes, and biases by distance."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.qkv, self.out, self.call = nn.Linear(8, 32), nn.Linear(16, 8), call
        self.slopes, self.near = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 13))

    def forward(self, x: Tensor, documents: Tensor, mask: BlockMask | None = None) -> Tensor:
        """[batch, sequence, 8], [batch, sequence] -> a scalar."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 8, 4).transpose(1, 2).split([4, 2, 2], dim=1)
        y = self.call(self, q, k, v, documents, mask)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def plain(net: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, mask: Any) -> Tensor:
    return flex_attention(q, k, v, enable_gqa=True, scale=0.3)


def packed(net: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, mask: Any) -> Tensor:
    """Documents of which none sees another; the first row of a batch's padding sees nothing at all."""

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (documents[b, i] == documents[b][j]) & (documents[b, j] >= 0)

    blocks = create_block_mask(and_masks(causal, same), len(q), None, 12, 12, device=q.device, _compile=True)
    compiled = torch.compile(flex_attention)
    return compiled(q, k, v, block_mask=blocks, enable_gqa=True)


def biased(net: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, mask: Any) -> Tensor:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = 2.0 * torch.tanh(score / 2.0) + net.slopes.exp()[h] * (j - i)
        score = score + net.near[h, (i - j).clamp(0, 12)] + net.near[0][(i - j).abs()]
        return torch.where((i >= j) & (documents[b, i] == documents[b, j]), score, -float("inf"))

    return flex_attention(q, k, v, score_mod, enable_gqa=True)


def with_statistics(net: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, mask: Any) -> Tensor:
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    blocks = create_block_mask(causal, None, None, 12, 12, device=q.device)
    y, aux = flex_attention(q, keys, values, block_mask=blocks, return_aux=AuxRequest(lse=True, max_scores=True))
    return y * torch.sigmoid(aux.lse - net.slopes[:, None])[..., None] + aux.max_scores[..., None].tanh()


def given(net: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, mask: Any) -> Tensor:
    return flex_attention(q, k, v, lambda s, b, h, i, j: s - 0.5 * (i - j).abs(), mask, enable_gqa=True)


CALLS: dict[str, Call] = {
    "plain": plain, "packed": packed, "biased": biased, "statistics": with_statistics, "given": given,
}  # fmt: skip


def window(documents: Tensor, width: int) -> BlockMask:
    """As a training loop makes it, for each batch."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < width) & (documents[b, q] == documents[b, k])

    return create_block_mask(mask_mod, len(documents), None, 12, 12, device="cpu")


def inputs_of(name: str, batch: int = 4) -> dict[str, Any]:
    documents = torch.randint(-1, 3, (batch, 12)).sort(dim=1).values
    inputs = {"x": torch.randn(batch, 12, 8, dtype=torch.float64), "documents": documents}
    return inputs | ({"mask": window(documents, 5)} if name == "given" else {})


@cache
def subject_of(name: str) -> Subject:
    if name == "given" and not hasattr(torch_flex, "_extract_callable_pytree"):
        pytest.skip("a BlockMask as an argument needs torch 2.13")
    torch.manual_seed(0)
    return trained_alone(Network(CALLS[name]).double(), inputs_of(name))


PLANS = (("data=2",), ("tensor=2",), ("data=2", "zero=3"), ("microbatches=2",))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "constraints"),
    [(name, PLANS[(number + turn) % 4]) for number, name in enumerate(CALLS) for turn in range(1 if number else 4)],
)
def test_it_trains_as_on_one_device(name: str, constraints: tuple[str, ...]) -> None:
    who = subject_of(name)
    assert any("flex_attention runs as plain ops" in note for note in who.traced.program.notes)
    assert_parity(who, forced_plan(who.traced.program, 2, *constraints))


@pytest.mark.parametrize("name", CALLS)
def test_it_computes_what_torch_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    who = subject_of(name)
    with dense_flex_attention():
        ours = who.model(**who.inputs)
    replaced = {"_validate_device": lambda *_: None, "flex_attention_hop": math_attention}
    for name, value in (replaced | {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}).items():
        monkeypatch.setattr(f"torch.nn.attention.flex_attention.{name}", value)
    monkeypatch.setattr("torch.nn.attention.flex_attention._apply_kernel_options", lambda *_, **__: {})
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(ours, who.model(**who.inputs), rtol=1e-12, atol=0)


def test_a_causal_mask_keeps_the_fast_kernel_and_heads_split() -> None:
    def call(net: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, mask: Any) -> Tensor:
        return flex_attention(q, k, v, block_mask=create_block_mask(causal, 4, 4, 12, 12, "cpu"), enable_gqa=True)

    ops = [op for layer in trace(Network(call).double(), (), inputs_of("")).program.layers for op in layer.ops]
    attention = next(op for op in ops if op.target == "aten.scaled_dot_product_attention.default")
    assert attention.args[3:] == (None, 0.0, True)
    assert {"d0", "d1"} <= {option.factor for option in attention.options}
    assert not any("arange" in op.target or "matmul" in op.target for op in ops)


def test_a_block_mask_is_an_input() -> None:
    """What its function captures is read in each call; another function is another program."""
    traced = subject_of("given").traced
    documents = torch.zeros(4, 12, dtype=torch.int64)
    call = inputs_of("given") | {"mask": window(documents, 5)}
    assert len(traced.program.inputs) == 3
    assert any(x is documents for x in traced.flatten_inputs((), call))
    for other in (window(documents, 6), create_block_mask(causal, 4, None, 12, 12, "cpu")):
        with pytest.raises(InputShapeError, match=r"argument 'mask\.\w+' is"):
            traced.flatten_inputs((), call | {"mask": other})


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "sum": (lambda s, b, h, i, j: s - (i + j).sum(), "calls sum"),
    "whole": (lambda s, b, h, i, j: s + torch.ones(12), "calls add"),
    "row": (lambda s, b, h, i, j: s + torch.ones(4, 12)[h].sum(), "calls sum of a row"),
    "row_added": (lambda s, b, h, i, j: s + torch.ones(4, 12)[h], "calls add of a row"),
    "slice": (lambda s, b, h, i, j: s + torch.ones(4, 12)[h, 1:][j], "mixes its arguments with others in an index"),
    "indexed": (lambda s, b, h, i, j: s[None] + 1, "indexes its arguments"),
    "constant": (lambda s, b, h, i, j: torch.zeros(()), "returns what does not depend on its arguments"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_of_more_than_single_scores_are_refused(name: str) -> None:
    score_mod, what = REFUSED[name]

    def call(net: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, mask: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod, enable_gqa=True)

    told = rf"{what}.*, which is not computed for all scores at once: .*as in bias\["
    with pytest.raises(TraceError, match=rf"\.py:\d+: the score_mod of flex_attention {told}"):
        trace(Network(call).double(), (), inputs_of(""))


def test_a_block_mask_as_an_argument_needs_a_torch_that_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_flex, "_extract_callable_pytree", raising=False)  # as before torch 2.13
    with pytest.raises(TraceError, match="an argument is a BlockMask, which autopar can't open with torch"):
        trace(Network(given).double(), (), inputs_of("given"))


def test_a_block_mask_needs_its_function() -> None:
    def call(net: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, mask: Any) -> Tensor:
        one = torch.ones(1, 1, 1, dtype=torch.int32)
        blocks = BlockMask.from_kv_blocks(one, one[..., None] * 0, BLOCK_SIZE=12, seq_lengths=(12, 12))
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)

    with pytest.raises(TraceError, match="BlockMask without a mask_mod"):
        trace(Network(call).double(), (), inputs_of(""))


@pytest.mark.slow
def test_hugging_face_computes_what_its_other_attention_does() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="flex_attention",
    )  # fmt: skip
    ids = torch.randint(0, 32, (4, 8))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(8) < torch.tensor([[5], [8], [6], [8]]))}
    model = LlamaForCausalLM(config).double()
    flex = trained_alone(model, inputs)
    config._attn_implementation = "sdpa"
    other = trained_alone(model, inputs)
    assert flex.alone.losses == pytest.approx(other.alone.losses, rel=1e-12)
    for constraint in ("data=2", "tensor=2"):
        assert_parity(flex, forced_plan(flex.traced.program, 2, constraint))
