"""Multi-task tabular learning: embeddings of categories, uncertainty weights, autocast and a GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

PLANS = {2: (("tensor=2",),)}
TOLERANCE = 1e-3  # of a loss; products are rounded to bfloat16, of 8 bits, in another order on slices

CARDINALITIES = (7, 5, 11)


class TabularModel(nn.Module):
    def __init__(self, num_continuous: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, min(8, (n + 1) // 2)) for n in CARDINALITIES)
        self.norm = nn.LayerNorm(num_continuous)
        inputs = num_continuous + sum(table.embedding_dim for table in self.embeddings)
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.regression, self.classification = nn.Linear(width, 1), nn.Linear(width, 3)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, categories: Tensor, numbers: Tensor, price: Tensor, kind: Tensor) -> Tensor:
        embedded = [table(categories[:, i]) for i, table in enumerate(self.embeddings)]
        h = self.trunk(torch.cat([*embedded, self.norm(numbers)], dim=1))
        regression, classification = self.regression(h).squeeze(1).float(), self.classification(h).float()
        losses = functional.mse_loss(regression, price), functional.cross_entropy(classification, kind)
        return sum(torch.exp(-s) * x + s for s, x in zip(self.log_vars, losses, strict=True))


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    categories = torch.stack([torch.randint(0, n, (44,)) for n in CARDINALITIES], dim=1)
    numbers, kind = torch.randn(44, 6), torch.randint(0, 3, (44,))
    dataset = TensorDataset(categories, numbers, numbers.sum(1), kind)
    train_loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model = prepare(TabularModel(), dataset[:16], optimizer="sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        for cats, nums, price, kinds in train_loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(cats, nums, price, kinds)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found["losses"].append(loss.item())
        model.eval()
        total = 0.0
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            for cats, nums, price, kinds in DataLoader(dataset, batch_size=20):
                total += model(cats, nums, price, kinds).item() * len(cats)
        scheduler.step(total / 44)
        found["losses"] += [total / 44, scheduler.get_last_lr()[0]]
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    if master:
        torch.save({"model": state, "scaler": scaler.state_dict()}, folder / "last.pt")
    return found | {"state": {name: value.clone() for name, value in state.items()}}
