"""In the style of timm's train.py with its Mixup, soft targets and EMA, on Hugging Face's ViT; resumed half-way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

PLANS = {4: (("data=2", "tensor=2"),)}
CLASSES = 4


class Mixup:
    """Mixes each image with that of the other end of the batch."""

    def __init__(self, mixup_alpha: float, label_smoothing: float) -> None:
        self.mixup_alpha, self.label_smoothing = mixup_alpha, label_smoothing
        self.random = np.random.default_rng(0)

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        lam = float(self.random.beta(self.mixup_alpha, self.mixup_alpha))
        x = x * lam + x.flip(0) * (1.0 - lam)
        off = self.label_smoothing / CLASSES
        y = torch.full((len(target), CLASSES), off, dtype=x.dtype)
        y.scatter_(1, target[:, None], 1.0 - self.label_smoothing + off)
        return x, y * lam + y.flip(0) * (1.0 - lam)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x: Any, target: Tensor) -> Tensor:
        return torch.sum(-target * torch.log_softmax(x.logits, dim=-1), dim=-1).mean()


def param_groups_layer_decay(model: Any, lr: float, decay: float) -> list[dict[str, Any]]:
    groups = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            depth = 0 if "embeddings" in name else 1 if ".0." in name else 2
            groups.append(
                {"params": [p], "lr": lr * decay ** (2 - depth), "weight_decay": 0.0 if p.ndim == 1 else 0.05}
            )
    return groups


def validate(model: Any, loader: Any) -> list[float]:
    """Top-1 and top-2 accuracies, and the sum of the logits."""
    model.eval()
    top1, top2, total = 0, 0, 0.0
    with torch.no_grad():
        for images, target in loader:
            output = model(pixel_values=images).logits
            picked = output.topk(2, 1).indices == target[:, None]
            top1, top2, total = top1 + int(picked[:, 0].sum()), top2 + int(picked.sum()), total + float(output.sum())
    return [top1, top2, total]


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    dataset = TensorDataset(torch.randn(22, 3, 8, 8, dtype=torch.float64), torch.randint(0, CLASSES, (22,)))
    train_loader: Any = DataLoader(dataset, batch_size=8, shuffle=True)
    eval_loader: Any = DataLoader(dataset, batch_size=11)
    mixup_fn, train_loss_fn = Mixup(0.8, 0.1), SoftTargetCrossEntropy()
    found: dict[str, Any] = {"losses": []}

    def start() -> tuple[Any, Any, Any]:
        images, target = mixup_fn(*dataset[:8])
        model = prepare(
            ViTForImageClassification(config).double(), {"pixel_values": images}, loss_fn=train_loss_fn,
            example_target=target,
        )  # fmt: skip
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return model, ema, torch.optim.AdamW(param_groups_layer_decay(model, 1e-2, 0.7), eps=1e-5)

    def train_epoch(model: Any, ema: Any, optimizer: Any) -> None:
        model.train()
        for images, target in train_loader:
            images, soft = mixup_fn(images, target)
            loss = loss_of(model, images, soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
            found["losses"].append(loss.item())
        found["losses"] += [*validate(model, eval_loader), *validate(ema, eval_loader)]

    def loss_of(model: Any, images: Tensor, target: Tensor) -> Tensor:
        if hasattr(model, "plan"):  # loss_fn is inside
            return model(pixel_values=images, target=target)
        return train_loss_fn(model(pixel_values=images), target)

    first = start()
    train_epoch(*first)
    if hasattr(first[0], "plan"):
        state = {"state_dict": first[0].full_state_dict(), "optimizer": first[0].full_optimizer_state_dict(first[2])}
    else:
        state = {"state_dict": first[0].state_dict(), "optimizer": first[2].state_dict()}
    file = folder / f"checkpoint-{dist.get_rank() if dist.is_initialized() else 0}.pth"  # each rank a whole one
    torch.save(state, file)
    second = start()
    checkpoint = torch.load(file, weights_only=False)
    second[0].load_state_dict(checkpoint["state_dict"])
    second[2].load_state_dict(checkpoint["optimizer"])
    train_epoch(*second)
    second[0].save_pretrained(folder / "vit")
    again: Any = ViTForImageClassification.from_pretrained(folder / "vit", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
