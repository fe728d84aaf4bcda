"""In the style of trl's SFT trainer: Mixtral with its auxiliary loss on padded chats, checkpointing asked for, a
reward head trained after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM, MixtralForSequenceClassification, get_scheduler

PLANS = {2: (("tensor=2",),)}
TOLERANCE = 1e-5  # the model computes its norms, its router and its loss in float32
PAD = 0


def collate(chats: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded on the left; only answers count."""
    length = 12
    ids = torch.stack([functional.pad(x["ids"], (length - len(x["ids"]), 0), value=PAD) for x in chats])
    answers = torch.stack([functional.pad(x["answer"], (length - len(x["ids"]), 0)) for x in chats])
    return {
        "input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.masked_fill(answers == 0, -100),
    }  # fmt: skip


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1, pad_token_id=PAD,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    lengths = torch.randint(6, 13, (10,)).tolist()
    chats: Any = [{"ids": torch.randint(3, 64, (n,)), "answer": (torch.arange(n) > n // 2).long()} for n in lengths]
    loader: Any = DataLoader(chats, batch_size=4, shuffle=True, collate_fn=collate)  # type: ignore
    model = prepare(model, collate(chats[:4]), optimizer="sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=2)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        for batch in loader:
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found["losses"] += [outputs.loss.item(), outputs.aux_loss.item()]
    model.save_pretrained(folder / "chat")

    reward: Any = MixtralForSequenceClassification.from_pretrained(folder / "chat", num_labels=1)
    reward.score.weight.data.copy_(torch.linspace(-1, 1, 16)[None])  # new: drawn otherwise
    batch = collate(chats[:4])
    pair = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    reward = prepare(reward, pair, optimizer="sgd")
    optimizer = torch.optim.SGD(reward.parameters(), lr=1e-3)
    reward.train()
    for _ in range(2):
        scores = reward(**pair).logits
        loss = -functional.logsigmoid(scores[::2] - scores[1::2]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    whole = reward.full_state_dict() if hasattr(reward, "plan") else reward.state_dict()
    found["state"] = {name: value.clone() for name, value in whole.items()}
    return found
