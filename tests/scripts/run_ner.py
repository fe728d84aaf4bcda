"""In the style of transformers' run_ner_no_trainer.py under DDP: each rank loads its own rows, counts are reduced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DistilBertConfig, DistilBertForTokenClassification

PLANS = {4: (("data=2", "tensor=2"),)}


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=64, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32, num_labels=5,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    ids = torch.randint(1, 64, (20, 10))
    mask = (torch.arange(10) < torch.randint(3, 11, (20, 1))).long()
    labels = torch.randint(0, 5, (20, 10)).masked_fill(mask == 0, -100)
    dataset: Any = [
        {"input_ids": x, "attention_mask": m, "labels": y} for x, m, y in zip(ids, mask, labels, strict=True)
    ]
    model: Any = DistilBertForTokenClassification(config).double()
    example = {"input_ids": ids[:8], "attention_mask": mask[:8], "labels": labels[:8]}
    model = prepare(model, example, inputs="local")
    size, rank = getattr(model, "data_parallel_size", 1), getattr(model, "data_rank", 0)
    # Of 8 rows, each data rank has every size-th; so one device has them in that order.
    sampler: Any = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=True, seed=3)
    loader: Any = DataLoader(dataset, batch_size=8 // size, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-5)
    found: dict[str, Any] = {"losses": []}
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
        model.eval()
        counts = torch.zeros(2, dtype=torch.long)
        for batch in loader:
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            known = batch["labels"] != -100
            right = (logits.argmax(dim=-1) == batch["labels"]) & known
            counts += torch.stack([right.sum(), known.sum()])
        if size > 1:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (rank, counts))
            counts = torch.stack(list(dict(gathered).values())).sum(0)
        found["losses"] += counts.tolist()
    model.save_pretrained(folder / "ner")
    again: Any = DistilBertForTokenClassification.from_pretrained(folder / "ner", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
