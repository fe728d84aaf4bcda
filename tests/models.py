"""The models that the tests train: real ones from transformers, and small ones that each hold one difficulty.

Every factory returns ``(module, inputs)``: a module with a fixed seed's weights and a dict of keyword arguments.
`batch` is the number of samples; sizes divide by 8 where a test wants to shard them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

Model = tuple[nn.Module, dict[str, Any]]
IGNORED = -100


def tokens(batch: int, length: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Random token ids [batch, length], int64."""
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def unevenly_masked(labels: Tensor) -> Tensor:
    """`labels` with a different number of ignored positions in each row (the first row keeps one)."""
    masked = labels.clone()
    for row in range(len(masked)):
        keep = 2 + (row * 5) % (masked.shape[1] - 2)
        masked[row, keep:] = IGNORED
    return masked


def make_llama(batch: int = 8, layers: int = 2, length: int = 16) -> Model:
    """Rotary positions, grouped key/value heads, SwiGLU, untied head, loss over masked labels."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    ids = tokens(batch, length, 64)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": unevenly_masked(ids)}


def make_gpt2(batch: int = 8, layers: int = 2, length: int = 16, dropout: float = 0.0) -> Model:
    """Learned positions, Conv1D, embedding tied to the head."""
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=layers, n_head=8, n_positions=64,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = tokens(batch, length, 64)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": unevenly_masked(ids)}


def make_bert(batch: int = 8, layers: int = 2, length: int = 16) -> Model:
    """An encoder with a padding mask that is an input."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=8,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = tokens(batch, length, 64)
    mask = torch.ones_like(ids)
    mask[:, length - 3 :] = (torch.arange(batch) % 2)[:, None]
    return transformers.BertForMaskedLM(config), {
        "input_ids": ids, "attention_mask": mask, "labels": unevenly_masked(ids),
    }  # fmt: skip


def make_vit(batch: int = 8, layers: int = 2) -> Model:
    """Images: a convolution into patches, a class token, a classifier."""
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=8, image_size=16,
        patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 4, (batch,), generator=generator),
    }


class Block(nn.Module):
    """A pre-norm transformer block in plain torch."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class PlainGPT(nn.Module):
    """The model somebody writes in an afternoon."""

    def __init__(self, width: int = 32, heads: int = 8, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, length] ids and targets -> (logits, loss)."""
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def make_plain_gpt(batch: int = 8, layers: int = 2, dropout: float = 0.0) -> Model:
    """A plain nn.Module GPT that returns (logits, loss)."""
    ids = tokens(batch, 16, 64)
    return PlainGPT(layers=layers, dropout=dropout), {"ids": ids, "targets": unevenly_masked(ids)}


class FlatFunction(nn.Module):
    """All parameters on one module, one long forward: nothing repeats by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(32, 32) / 6) for _ in range(6))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(32)) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, 32] twice -> the mean squared error."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + torch.tanh(x @ weight + bias) * self.scale
        return functional.mse_loss(x.softmax(-1), y)


def make_flat(batch: int = 8) -> Model:
    """A model that is one flat function."""
    generator = torch.Generator().manual_seed(0)
    return FlatFunction(), {
        "x": torch.randn(batch, 32, generator=generator),
        "y": torch.rand(batch, 32, generator=generator),
    }


class UNet(nn.Module):
    """Down, up, with skips over the middle, and batch norm (with buffers that forward updates)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm2 = nn.BatchNorm2d(16)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor, target: Tensor) -> dict[str, Tensor]:
        """[batch, 3, 8, 8] and [batch, 8, 8] class ids -> {"loss", "logits"}."""
        skip = functional.relu(self.norm1(self.stem(image)))
        x = functional.relu(self.norm2(self.down(skip)))
        x = x + functional.silu(self.middle(x))
        x = functional.interpolate(self.up(x), scale_factor=2.0, mode="nearest")
        logits = self.head(torch.cat([x, skip], dim=1))
        return {"loss": functional.cross_entropy(logits, target), "logits": logits}


def make_unet(batch: int = 8) -> Model:
    """A U-Net-like model: skip connections, batch norm."""
    generator = torch.Generator().manual_seed(0)
    return UNet(), {
        "image": torch.randn(batch, 3, 8, 8, generator=generator),
        "target": torch.randint(0, 4, (batch, 8, 8), generator=generator),
    }


class Contrastive(nn.Module):
    """A CLIP-style loss: every sample is compared with every other one of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """[batch, 24] and [batch, 40] -> the symmetric contrastive loss."""
        a = functional.normalize(self.image(image), dim=-1)
        b = functional.normalize(self.text(text), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.t(), labels)) / 2


def make_contrastive(batch: int = 8) -> Model:
    """A loss that couples samples."""
    generator = torch.Generator().manual_seed(0)
    return Contrastive(), {
        "image": torch.randn(batch, 24, generator=generator),
        "text": torch.randn(batch, 40, generator=generator),
    }


def make_frozen(batch: int = 8) -> Model:
    """A plain GPT whose embedding and first block don't train."""
    model, inputs = make_plain_gpt(batch)
    assert isinstance(model, PlainGPT)
    for module in (model.embed, model.blocks[0]):
        module.requires_grad_(requires_grad=False)
    return model, inputs


ZOO: Mapping[str, Callable[[], Model]] = {
    "llama": make_llama,
    "gpt2": make_gpt2,
    "bert": make_bert,
    "vit": make_vit,
    "plain_gpt": make_plain_gpt,
    "flat": make_flat,
    "unet": make_unet,
    "contrastive": make_contrastive,
    "frozen": make_frozen,
}


def make(name: str, dtype: torch.dtype = torch.float64) -> Model:
    """A model of the zoo with seed 0, in `dtype`, in training mode, its floating inputs in that dtype too."""
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return model.to(dtype).train(), cast
