"""In the style of MoCo: a key encoder that follows the query encoder, and a queue of keys, written by a pointer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PLANS = {2: ((), ("pipeline=2",))}


def encoder(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, dim))


class MoCo(nn.Module):
    def __init__(self, dim: int = 8, size: int = 24, momentum: float = 0.9, temperature: float = 0.2) -> None:
        super().__init__()
        self.size, self.momentum, self.temperature = size, momentum, temperature
        self.encoder_q, self.encoder_k = encoder(dim), encoder(dim)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", functional.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            k = functional.normalize(self.encoder_k(im_k), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)), k


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, images = MoCo().double(), torch.randn(3, 8, 12, dtype=torch.float64)
    model = prepare(model, (images[0], images[0]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses: list[float] = []
    for batch in images:
        with torch.no_grad():
            for q, k in zip(model.encoder_q.parameters(), model.encoder_k.parameters(), strict=True):
                k.data = k.data * model.momentum + q.data * (1.0 - model.momentum)
        loss, keys = model(batch, batch + 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            first, count = int(model.queue_ptr), len(keys)
            model.queue[:, first : first + count] = keys.T
            model.queue_ptr[0] = (first + count) % model.size
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {"losses": losses, "state": state}
