"""Models that ask whether they are being traced are traced as they run when they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.compiler import is_exporting as asks
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from autopar.errors import TraceError
from autopar.trace import trace
from tests import models
from tests.trace.interpreter import interpret


class Asks(nn.Module):
    def __init__(self, *, reads_values: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.reads_values = reads_values

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if torch.compiler.is_compiling() or torch.compiler.is_exporting() or is_compiling() or asks():
            return h.exp().sum()
        return h.sin().sum() if not self.reads_values or float(h.detach().sum()) else h.cos().sum()


def test_the_program_is_what_a_call_computes() -> None:
    model, x = Asks(reads_values=False), torch.randn(4, 8)
    traced = trace(model, (x,), {})
    assert not traced.program.notes
    ((found,), _) = interpret(traced, model, [x])
    torch.testing.assert_close(found, model(x))


def test_a_note_says_where_a_call_can_not_be_traced() -> None:
    traced = trace(Asks(reads_values=True), (torch.randn(4, 8),), {})
    (note,) = traced.program.notes
    assert "test_tracing_questions.py:" in note
    assert "asks here whether it is being traced" in note


def paligemma() -> tuple[nn.Module, dict[str, Any]]:
    text = {"model_type": "gemma", "head_dim": 8, "num_key_value_heads": 1, "vocab_size": 64}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 16}
    kind: Any = PaliGemmaConfig
    config = kind(
        text_config=text | sizes, vision_config=vision | sizes, projection_dim=16, image_token_id=63, hidden_size=16
    )
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    ids = torch.randint(2, 60, (2, 10))
    ids[:, :4] = 63
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64), "labels": ids.clone()}
    return PaliGemmaForConditionalGeneration(config).double(), inputs


def assert_as_called(model: nn.Module, inputs: dict[str, Any]) -> None:
    traced = trace(model, (), inputs)
    outputs, _ = interpret(traced, model, list(traced.flatten_inputs((), inputs)))
    loss = outputs[0]
    torch.testing.assert_close(loss, model(**inputs).loss, rtol=1e-6, atol=0)  # it is computed in float32


@pytest.mark.slow
def test_masks_that_a_call_leaves_out() -> None:
    """Its attention is not causal by itself, so that all tokens see each other where there is no mask."""
    models.skip_before_transformers_5("its masks are made elsewhere")
    model, inputs = paligemma()
    assert_as_called(model, inputs)
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    masked = inputs | {"attention_mask": torch.ones_like(tokens), "token_type_ids": tokens}
    assert_as_called(model, masked)
    del masked["token_type_ids"]
    with pytest.raises(TraceError, match="or pass token_type_ids"):
        trace(model, (), masked)
