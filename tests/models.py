"""The models that the tests train: real ones from transformers, and small ones that each hold one difficulty.

Every factory returns ``(module, inputs)``: a module with a fixed seed's weights and a dict of keyword arguments.
`batch` is the number of samples; sizes divide by 8 where a test wants to shard them.  `ZOO` holds the small ones,
`PIPELINE_ZOO` those with enough layers for several stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

Model = tuple[nn.Module, dict[str, Any]]
IGNORED = -100


def skip_before_transformers_5(reason: str) -> None:
    """Skip the test that runs with an older version, where what it is about is otherwise."""
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip(f"transformers {transformers.__version__}: {reason}")


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


def padding_mask(batch: int, length: int) -> Tensor:
    """[batch, length], int64: 1, but 0 at the last three positions of every other row."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[:, length - 3 :] = (torch.arange(batch) % 2)[:, None]
    return mask


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


def make_bert(batch: int = 8, layers: int = 2, length: int = 16, *, classifies: bool = False) -> Model:
    """An encoder with a padding mask that is an input; it predicts masked tokens, or a class for each text."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=8,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = tokens(batch, length, 64)
    model = (transformers.BertForSequenceClassification if classifies else transformers.BertForMaskedLM)(config)
    labels = tokens(batch, 1, 2)[:, 0] if classifies else unevenly_masked(ids)
    return model, {"input_ids": ids, "attention_mask": padding_mask(batch, length), "labels": labels}


def make_t5(batch: int = 8, layers: int = 2, length: int = 16) -> Model:
    """Encoder and decoder: a position bias that the first layer of each computes, one table for inputs and head."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=4, d_ff=64, num_layers=layers, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), _translation(batch, length)


def make_bart(batch: int = 8, layers: int = 2, length: int = 16) -> Model:
    """Encoder and decoder: learned positions, scaled embeddings tied to the head, a buffer that is added to logits."""
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0,
        scale_embedding=True, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), _translation(batch, length)


def _translation(batch: int, length: int) -> dict[str, Tensor]:
    """Padded texts, and shorter ones to make of them."""
    labels = unevenly_masked(tokens(batch, length // 2, 64, seed=1))
    return {
        "input_ids": tokens(batch, length, 64),
        "attention_mask": padding_mask(batch, length),
        "labels": labels,
    }


def make_mixtral(batch: int = 8, layers: int = 2, length: int = 16, products: str = "batched_mm") -> Model:
    """Four experts, two for each token; of the two ways to compute them only "batched_mm" runs in float64."""
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64, pad_token_id=0,
        experts_implementation=products,
    )  # fmt: skip
    ids = tokens(batch, length, 64)
    return transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": unevenly_masked(ids)}


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


class Level(nn.Module):
    """One resolution of a U-Net: two convolutions with group norm, and a way to the next resolution."""

    def __init__(self, before: int, width: int, move: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, width)
        self.move = move

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, before, ...] -> (what this resolution knows, the same at the next one)."""
        x = functional.silu(self.norm1(self.conv1(x)))
        x = x + functional.silu(self.norm2(self.conv2(x)))
        return x, self.move(x)


class SkipUNet(nn.Module):
    """Resolutions down and up again; the first skip spans the whole model.  No op couples samples."""

    def __init__(self, width: int = 8, levels: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        bottom = 2 * widths[-1]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.downs = nn.ModuleList(Level(w, w, nn.Conv2d(w, 2 * w, 3, stride=2, padding=1)) for w in widths)
        self.middle = Level(bottom, bottom, nn.ConvTranspose2d(bottom, widths[-1], 2, 2))
        self.ups = nn.ModuleList(
            Level(2 * w, w, nn.ConvTranspose2d(w, w // 2, 2, 2) if w > width else nn.Identity())
            for w in reversed(widths)
        )
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, image: Tensor, target: Tensor) -> dict[str, Tensor]:
        """[batch, 3, 8, 8] and [batch, 8, 8] class ids -> {"loss", "logits"}."""
        x = self.stem(image)
        skips: list[Tensor] = []
        for down in self.downs:
            skip, x = down(x)
            skips.append(skip)
        x = self.middle(x)[1]
        for up in self.ups:
            x = up(torch.cat([x, skips.pop()], dim=1))[1]
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits, target), "logits": logits}


def make_skip_unet(batch: int = 8) -> Model:
    """A U-Net-like model in many layers, with group norm, so that microbatches are exact."""
    generator = torch.Generator().manual_seed(0)
    return SkipUNet(), {
        "image": torch.randn(batch, 3, 8, 8, generator=generator),
        "target": torch.randint(0, 4, (batch, 8, 8), generator=generator),
    }


class Crossing(nn.Module):
    """What the first layer computes from ids - integers, booleans, numbers - is read by the last one only."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.groups = nn.Embedding(8, width)
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """[batch, length] ids and targets -> {"lengths", "loss", "hidden"}; id 0 is padding."""
        is_padding = ids == 0
        group = (ids * 5 + 3) % 8
        lengths = (~is_padding).sum(1)
        first = self.embed(ids)
        x = first
        for block in self.blocks:
            x = block(x)
        x = x + first * lengths[:, None, None] / 16 + self.groups(group)
        hidden = x.masked_fill(is_padding[:, :, None], 0.0)
        logits = self.head(hidden).flatten(0, 1)
        kept = torch.where(is_padding, IGNORED, targets).flatten()
        loss = functional.cross_entropy(logits, kept, ignore_index=IGNORED)
        return {"lengths": lengths, "loss": loss, "hidden": hidden}


def make_crossing(batch: int = 8, layers: int = 2, length: int = 16) -> Model:
    """Skips over all blocks: a tensor with a gradient, an int and a bool tensor; and an output of the first layer."""
    ids = tokens(batch, length, 64) * padding_mask(batch, length)
    return Crossing(layers=layers), {"ids": ids, "targets": tokens(batch, length, 64, seed=1)}


class NormedBlock(nn.Module):
    """A residual block with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.norm1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width, length] -> the same."""
        return x + self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))


class BatchNormed(nn.Module):
    """Residual blocks with batch norm, whose running statistics every step moves."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(NormedBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, 3, length] and [batch] class numbers -> (loss, logits)."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(-1))
        return functional.cross_entropy(logits, y), logits


def make_batch_normed(batch: int = 8, layers: int = 2) -> Model:
    """A model that couples samples in every layer, so that it has no microbatches, and moves buffers in every layer."""
    generator = torch.Generator().manual_seed(0)
    return BatchNormed(layers=layers), {
        "x": torch.randn(batch, 3, 8, generator=generator),
        "y": torch.randint(0, 4, (batch,), generator=generator),
    }


def make_half_frozen(batch: int = 8, layers: int = 4) -> Model:
    """A plain GPT whose first half gets no gradient at all."""
    model, inputs = make_plain_gpt(batch, layers)
    assert isinstance(model, PlainGPT)
    model.position.requires_grad_(requires_grad=False)
    for module in (model.embed, *model.blocks[: layers // 2]):
        module.requires_grad_(requires_grad=False)
    return model, inputs


ZOO: Mapping[str, Callable[[], Model]] = {
    "llama": make_llama,
    "gpt2": make_gpt2,
    "bert": make_bert,
    "t5": make_t5,
    "bart": partial(make_bart, layers=1),  # T5 has two layers in each half
    "vit": make_vit,
    "plain_gpt": make_plain_gpt,
    "flat": make_flat,
    "unet": make_unet,
    "skip_unet": make_skip_unet,
    "contrastive": make_contrastive,
    "frozen": make_frozen,
    "crossing": make_crossing,
}

# At least six layers each, and a batch for 4 microbatches on 4 devices a stage.
PIPELINE_ZOO: Mapping[str, Callable[[], Model]] = {
    "deep_gpt2": partial(make_gpt2, batch=16, layers=4, length=8),
    "deeper_gpt2": partial(make_gpt2, batch=16, layers=6, length=8),
    "deep_llama": partial(make_llama, batch=16, layers=4, length=8),
    "deep_t5": partial(make_t5, batch=16, layers=2, length=16),
    "deep_bert": partial(make_bert, batch=16, layers=4, length=8),
    "deep_vit": partial(make_vit, batch=16, layers=4),
    "deep_unet": partial(make_skip_unet, batch=16),
    "deep_crossing": partial(make_crossing, batch=16, layers=4, length=16),
    "deep_half_frozen": partial(make_half_frozen, batch=16, layers=4),
    "deep_batch_normed": partial(make_batch_normed, batch=16, layers=4),
}

# Which no suite over a zoo trains.
_OTHERS: Mapping[str, Callable[[], Model]] = {
    "mixtral": make_mixtral,
    "classifying_bert": partial(make_bert, layers=1, length=8, classifies=True),
    "short_t5": partial(make_t5, layers=1, length=8),
    "short_bart": partial(make_bart, layers=1, length=8),
    "grouped_mixtral": partial(make_mixtral, products="grouped_mm"),  # at most float32
}


def make(name: str, dtype: torch.dtype = torch.float64) -> Model:
    """The model of that name with seed 0, in `dtype`, in training mode, its floating inputs in that dtype too."""
    torch.manual_seed(0)
    model, inputs = (ZOO | PIPELINE_ZOO | _OTHERS)[name]()
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return model.to(dtype).train(), cast


class Gated(nn.Module):
    """Root mean square norm, two products, a gate, a product, a residual."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5) * self.scale
        return (x + self.down(functional.silu(self.gate(y)) * self.up(y))).sum()
