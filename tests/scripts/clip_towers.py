"""In the style of open_clip: two towers, a softmax over the global batch, logit_scale clamped in place, zero-shot."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PLANS = {2: (("tensor=2",),)}

WIDTH = 16


class VisionTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 4, 4, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH) / 4)
        self.positional_embedding = nn.Parameter(torch.randn(5, WIDTH) / 4)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.proj = nn.Parameter(torch.randn(WIDTH, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_embedding.view(1, 1, -1).expand(x.shape[0], -1, -1), x], dim=1)
        return self.transformer(x + self.positional_embedding)[:, 0] @ self.proj


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.text_projection = nn.Parameter(torch.randn(WIDTH, 8) / 4)

    def forward(self, text: Tensor) -> Tensor:
        x = self.transformer(self.token_embedding(text))
        return x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = VisionTower(), TextTower()
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        features = self.visual(image)
        return functional.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        features = self.text(text)
        return functional.normalize(features, dim=-1) if normalize else features

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image_features = self.encode_image(image, normalize=True)
        text_features = self.encode_text(text, normalize=True)
        logits = self.logit_scale.exp() * image_features @ text_features.T
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def cosine_lr(optimizer: torch.optim.Optimizer, base_lr: float, warmup: int, steps: int) -> Callable[[int], None]:
    def adjust(step: int) -> None:
        lr = base_lr * (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * step / steps)) * base_lr
        for group in optimizer.param_groups:
            group["lr"] = lr

    return adjust


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line, and the sampler asks the model."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(24, 3, 8, 8, dtype=torch.float64), torch.randint(0, 32, (24, 6)))
    model: Any = prepare(CLIP().double(), dataset[:8], inputs="local")
    replicas, rank = getattr(model, "data_parallel_size", 1), getattr(model, "data_rank", 0)
    sampler: Any = DistributedSampler(dataset, num_replicas=replicas, rank=rank, shuffle=True)
    dataloader: Any = DataLoader(dataset, batch_size=8 // replicas, sampler=sampler)

    def exclude(n: str, p: Tensor) -> bool:
        return p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n

    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if exclude(n, p)], "weight_decay": 0.0},
            {"params": [p for n, p in named if not exclude(n, p)], "weight_decay": 0.2},
        ],
        lr=5e-3, betas=(0.9, 0.98), eps=1e-5,
    )  # fmt: skip
    scheduler = cosine_lr(optimizer, 5e-3, 2, 6)
    found: dict[str, Any] = {"losses": []}
    step = 0
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for images, texts in dataloader:
            scheduler(step)
            optimizer.zero_grad()
            loss = model(images, texts)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(15))
            found["losses"] += [loss.item(), model.logit_scale.item()]
            step += 1
        model.eval()
        with torch.no_grad():
            classifier = model.encode_text(dataset[:5][1], normalize=True).T
            logits = 100.0 * model.encode_image(dataset[:7][0], normalize=True) @ classifier
            found["losses"] += logits.flatten().tolist()
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    if master:
        torch.save({"epoch": 2, "state_dict": state}, folder / "epoch_2.pt")
    found["state"] = {name: value.clone() for name, value in state.items()}
    return found
