"""In the style of Hugging Face's no_trainer examples: fine-tuning, accuracy, save_pretrained, from_pretrained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

PLANS = {2: (("tensor=2",),), 4: (("data=2", "pipeline=2"),)}


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids, labels = torch.randint(1, 64, (22, 12)), torch.randint(0, 3, (22,))
    mask = (torch.arange(12) < torch.randint(4, 13, (22, 1))).long()
    batches = [
        {"input_ids": ids[i : i + 8], "attention_mask": mask[i : i + 8], "labels": labels[i : i + 8]}
        for i in range(0, 22, 8)
    ]
    model = prepare(BertForSequenceClassification(config).double(), batches[0])
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not any(word in n for word in no_decay)], "weight_decay": 0.1},
            {"params": [p for n, p in named if any(word in n for word in no_decay)], "weight_decay": 0.0},
        ],
        lr=1e-3, eps=1e-5,
    )  # fmt: skip
    found: dict[str, Any] = {"losses": [], "params": model.num_parameters()}
    for _ in range(2):
        model.train()
        for batch in batches:
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(outputs.loss.item())
        model.eval()
        correct = 0
        for batch in batches:
            with torch.no_grad():
                outputs = model(**{name: x for name, x in batch.items() if name != "labels"})
            correct += int((outputs.logits.argmax(dim=-1) == batch["labels"]).sum())
        found["losses"].append(correct / 22)
    model.save_pretrained(folder / "bert")
    again: Any = BertForSequenceClassification.from_pretrained(folder / "bert", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    with torch.no_grad():
        found["losses"].append(again.eval()(**batches[0]).loss.item() - model(**batches[0]).loss.item())
    return found
