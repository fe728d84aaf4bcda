"""In the style of DLRM: bags of ids with offsets, products of all pairs of features, several learning rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PLANS = {2: (("data=2", "zero=3"),)}
TABLES = (10, 6, 16)


class DLRM(nn.Module):
    def __init__(self, dense: int = 5, dim: int = 8) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in TABLES)
        self.bot_l = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, dim), nn.ReLU())
        pairs = (len(TABLES) + 1) * len(TABLES) // 2
        self.top_l = nn.Sequential(nn.Linear(dim + pairs, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def interact_features(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        batch_size, d = x.shape
        stacked = torch.cat([x, *ly], dim=1).view(batch_size, -1, d)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        _, ni, nj = products.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, products[:, li, lj]], dim=1)

    def forward(self, dense_x: Tensor, ls_o: Tensor, ls_i: list[Tensor]) -> Tensor:
        x = self.bot_l(dense_x)
        ly = [table(i, o) for table, i, o in zip(self.emb_l, ls_i, ls_o, strict=True)]
        return self.top_l(self.interact_features(x, ly))


def make_batch(rows: int) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Dense features, offsets [tables, rows], ids of each table, and clicks."""
    offsets, ids = [], []
    for n in TABLES:
        counts = torch.randint(1, 4, (rows,))
        counts[-1] += 3 * rows - int(counts.sum())  # ids come in bags of unlike sizes
        offsets.append(torch.cat([torch.zeros(1).long(), counts.cumsum(0)[:-1]]))
        ids.append(torch.randint(n, (3 * rows,)))
    dense = torch.rand(rows, 5, dtype=torch.float64).log1p()
    return dense, torch.stack(offsets), ids, torch.randint(2, (rows, 1)).double()


def roc_auc(scores: Tensor, targets: Tensor) -> float:
    pos, neg = scores[targets == 1], scores[targets == 0]
    return float((pos[:, None] > neg[None, :]).double().mean())


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    train = [make_batch(rows) for rows in (8, 8, 8, 5)]
    test = [make_batch(12), make_batch(3)]
    model = DLRM().double()
    model = prepare(model, train[0][:3])
    parameters = [
        {"params": [p for table in model.emb_l for p in table.parameters()], "lr": 0.5},
        {"params": model.bot_l.parameters(), "lr": 0.1},
        {"params": model.top_l.parameters(), "lr": 0.1},
    ]
    optimizer = torch.optim.Adagrad(parameters, lr=0.1, eps=1e-6)
    loss_fn = nn.BCELoss(reduction="none")
    weights = torch.tensor([0.5, 1.5], dtype=torch.float64)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        for dense, offsets, ids, clicks in train:
            scores = model(dense, offsets, ids)
            loss = (weights[clicks.view(-1).long()].view_as(clicks) * loss_fn(scores, clicks)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found["losses"].append(loss.item())
        model.eval()
        with torch.inference_mode():
            outputs = [(model(*batch[:3]), batch[3]) for batch in test]
            scores, targets = (torch.cat(x) for x in zip(*outputs, strict=True))
            found["losses"] += [roc_auc(scores, targets), float(scores.sum())]
    found["state"] = model.full_state_dict() if hasattr(model, "plan") else model.state_dict()
    return found
