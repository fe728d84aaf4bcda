"""In the style of transformers' run_mlm_no_trainer.py: masked words, padding per batch, frozen layers, no trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

PLANS = {2: (("tensor=2",),)}
PAD, MASK = 0, 4


def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Dynamic padding to a multiple of 4, then 15 % of the words: 80 % masked, 10 % random, 10 % kept."""
    ids = pad_sequence(texts, batch_first=True, padding_value=PAD)
    ids = torch.nn.functional.pad(ids, (0, -ids.shape[1] % 4), value=PAD)
    labels = ids.clone()
    probabilities = torch.full(labels.shape, 0.4).masked_fill_(ids == PAD, 0.0)
    masked = torch.bernoulli(probabilities).bool()
    labels[~masked] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked
    inputs = ids.clone()
    inputs[replaced] = MASK
    random = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & masked & ~replaced
    inputs[random] = torch.randint(5, 64, labels.shape)[random]
    return {"input_ids": inputs, "attention_mask": (ids != PAD).long(), "labels": labels}


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    texts = [torch.randint(5, 64, (length,)) for length in torch.randint(5, 17, (18,)).tolist()]
    train_loader: Any = DataLoader(texts[:14], shuffle=True, collate_fn=collate, batch_size=4)  # type: ignore
    eval_loader: Any = DataLoader(texts[14:], collate_fn=collate, batch_size=6)  # type: ignore
    model: Any = BertForMaskedLM(config).double()
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad = False
    model.bert.encoder.layer[0].requires_grad_(False)
    model = prepare(model, collate(texts[:4]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, eps=1e-5)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            found["losses"].append(loss.detach().item())
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(outputs.loss.item())
            picked = outputs.logits.argmax(-1) == batch["labels"]
            found["losses"].append(picked.sum().item())
        found["losses"].append(math.exp(sum(losses) / len(losses)))
    with torch.no_grad():  # fill-mask: one text without a mask
        text = texts[0][None].clone()
        text[0, 2] = MASK
        found["filled"] = model(text).logits[0, 2].topk(3).indices
    model.save_pretrained(folder / "bert")
    again: Any = BertForMaskedLM.from_pretrained(folder / "bert", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
