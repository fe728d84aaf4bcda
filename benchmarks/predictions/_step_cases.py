"""The models and plans of ``accuracy.py steps``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

Model = tuple[nn.Module, dict[str, Any]]
_WHOLE = ("pipeline=1", "microbatches=1", "recompute=none")
CASES: dict[int, tuple[tuple[str, ...], ...]] = {
    2: (
        (),
        (*_WHOLE, "data=2", "zero=3"),
        (*_WHOLE, "tensor=2", "zero=0"),
        (*_WHOLE, "sequence=2", "zero=0"),
        ("pipeline=1", "microbatches=1", "data=2", "zero=0", "recompute=full"),
        ("pipeline=1", "microbatches=4", "data=2", "zero=3", "recompute=full"),
        ("pipeline=1", "microbatches=4", "tensor=2", "zero=0", "recompute=full"),
        ("pipeline=2", "schedule=gpipe", "microbatches=4", "recompute=none"),
        ("pipeline=2", "schedule=1f1b", "microbatches=4", "recompute=full"),
    ),
    4: (
        (),
        (*_WHOLE, "data=4", "zero=3"),
        (*_WHOLE, "data=2", "tensor=2", "zero=0"),
        (*_WHOLE, "tensor=4", "zero=0"),
        (*_WHOLE, "data=2", "sequence=2", "zero=0"),
        ("pipeline=1", "microbatches=2", "data=4", "zero=1", "recompute=full"),
        ("pipeline=2", "schedule=1f1b", "data=2", "microbatches=2", "recompute=none"),
        ("pipeline=2", "schedule=gpipe", "tensor=2", "microbatches=4", "recompute=full"),
        ("pipeline=4", "schedule=1f1b", "microbatches=4", "recompute=full"),
    ),
}
"""Per number of ranks, what each plan is forced to; ``()``: nothing."""


def _llama() -> Model:
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (16, 128))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def _gpt2() -> Model:
    config = transformers.GPT2Config(
        vocab_size=2048, n_embd=256, n_layer=4, n_head=8, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 2048, (16, 128))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


MODELS = {"llama": _llama, "gpt2": _gpt2}
