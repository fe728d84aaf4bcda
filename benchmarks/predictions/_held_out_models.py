"""Models that the memory walk was not made by: small ones of real proportions, built without weights from afar.

The list, and the plans of `CASES`, were written down before any of them was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["HELD_OUT_MODELS"]

Model = tuple[nn.Module, dict[str, Any]]

_DECODER: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 1024, (batch, length), generator=_generator())


def _causal(name: str, **settings: Any) -> Callable[[], Model]:
    def make() -> Model:
        config = getattr(transformers, f"{name}Config")(**(_DECODER | settings))
        ids = _ids(8, 128)
        return getattr(transformers, f"{name}ForCausalLM")(config), {"input_ids": ids, "labels": ids.clone()}

    return make


def _images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=_generator())


def _classifier(name: str, size: int, **settings: Any) -> Callable[[], Model]:
    def make() -> Model:
        config = getattr(transformers, f"{name}Config")(num_labels=16, **settings)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        return model, {"pixel_values": _images(8, size), "labels": torch.arange(8)}

    return make


def _whisper() -> Model:
    config = transformers.WhisperConfig(
        vocab_size=1024, num_mel_bins=40, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=64,
        max_target_positions=64, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    sound = torch.randn(8, 40, 128, generator=_generator())
    return transformers.WhisperForConditionalGeneration(config), {"input_features": sound, "labels": _ids(8, 48)}


def _bart() -> Model:
    config = transformers.BartConfig(
        vocab_size=1024, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, forced_eos_token_id=0,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), {"input_ids": _ids(8, 96), "labels": _ids(8, 48)}


def _clip() -> Model:
    text: dict[str, Any] = {
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32, "projection_dim": 64, "eos_token_id": 1023,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": 64, "patch_size": 8, "projection_dim": 64,
    }  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    inputs = {"input_ids": _ids(8, 32), "pixel_values": _images(8, 64), "return_loss": True}
    return transformers.CLIPModel(config), inputs


def _deberta() -> Model:
    config = transformers.DebertaV2Config(
        vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, relative_attention=True, position_buckets=32, pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm", share_att_key=True, type_vocab_size=0,
    )  # fmt: skip
    ids = _ids(8, 64)
    return transformers.DebertaV2ForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


class _Perceptron(nn.Module):
    """Products and activations only."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        self.body = nn.Sequential(nn.Linear(64, width), *blocks)
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(self.body(x)), y)


def _perceptron() -> Model:
    return _Perceptron(), {"x": torch.randn(2048, 64, generator=_generator()), "y": torch.randn(2048, 8)}


class _Separable(nn.Module):
    """Depthwise and pointwise convolutions with a squeeze, as mobile networks have them; no batch norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([_Inverted(width) for _ in range(4)])
        self.head = nn.Linear(width, 16)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = nn.functional.hardswish(self.stem(image))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), target)


class _Inverted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(width, 4 * width, 1)
        self.depthwise = nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width)
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(4 * width, width, 1), nn.ReLU(), nn.Conv2d(width, 4 * width, 1),
            nn.Sigmoid(),
        )  # fmt: skip
        self.project = nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.hardswish(self.depthwise(nn.functional.hardswish(self.expand(x))))
        return x + self.project(inner * self.squeeze(inner))


def _separable() -> Model:
    return _Separable(), {"image": _images(8, 48), "target": torch.arange(8)}


HELD_OUT_MODELS: dict[str, Callable[[], Model]] = {
    "qwen2": _causal("Qwen2", intermediate_size=352, num_key_value_heads=2, tie_word_embeddings=True),
    "mistral": _causal("Mistral", intermediate_size=352, num_key_value_heads=2, sliding_window=64),
    "gemma2": _causal("Gemma2", intermediate_size=352, num_key_value_heads=2, head_dim=32, sliding_window=64),
    "phi": _causal("Phi", intermediate_size=512),
    "opt": _causal("OPT", ffn_dim=512, word_embed_proj_dim=128),
    "bloom": _causal("Bloom", n_head=4, n_layer=4),
    "falcon": _causal("Falcon", new_decoder_architecture=False, multi_query=True),
    "gpt_neox": _causal("GPTNeoX", intermediate_size=512),
    "mixtral": _causal("Mixtral", intermediate_size=256, num_key_value_heads=2, num_local_experts=4),
    "deepseek_v3": _causal(
        "DeepseekV3", intermediate_size=256, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2,
        n_group=4, topk_group=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32,
    ),
    "swin": _classifier("Swin", 64, image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4],
                        window_size=4),
    "convnext": _classifier("ConvNext", 64, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3),
    "resnet": _classifier("ResNet", 64, embedding_size=16, hidden_sizes=[32, 64, 128], depths=[1, 2, 1]),
    "whisper": _whisper,
    "bart": _bart,
    "clip": _clip,
    "deberta": _deberta,
    "perceptron": _perceptron,
    "separable": _separable,
}  # fmt: skip
