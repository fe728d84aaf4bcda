"""In the style of transformers' run_summarization_no_trainer.py: T5, padded per batch, summaries are generated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration, get_scheduler

PLANS = {2: (("pipeline=2", "microbatches=1"),)}
TOLERANCE = 1e-5  # the model computes its norms in float32
PAD = 0


class DataCollatorForSeq2Seq:
    def __init__(self, model: Any, multiple: int = 12) -> None:
        self.model, self.multiple = model, multiple

    def pad(self, rows: list[torch.Tensor], value: int) -> torch.Tensor:
        padded = pad_sequence(rows, batch_first=True, padding_value=value)
        return torch.nn.functional.pad(padded, (0, -padded.shape[1] % self.multiple), value=value)

    def encode(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = self.pad([x["input_ids"] for x in features], PAD)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = self.pad([x["labels"] for x in features], -100)
        decoder_input_ids = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
        return {**self.encode(features), "labels": labels, "decoder_input_ids": decoder_input_ids}


def make_dataset(count: int) -> list[dict[str, Any]]:
    lengths = torch.randint(3, 12, (count,)).tolist()
    return [{"input_ids": torch.randint(3, 64, (n,)), "labels": torch.randint(3, 64, (n // 2 + 1,))} for n in lengths]


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, feed_forward_proj="gated-gelu", initializer_factor=3.0,
    )  # fmt: skip
    model: Any = T5ForConditionalGeneration(config).double()
    train_dataset, eval_dataset = make_dataset(10), make_dataset(6)
    collate = DataCollatorForSeq2Seq(model)
    train_loader: Any = DataLoader(train_dataset, shuffle=True, collate_fn=collate, batch_size=4)  # type: ignore
    eval_loader: Any = DataLoader(eval_dataset, collate_fn=collate, batch_size=3)  # type: ignore
    model = prepare(model, collate(train_dataset[:4]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-5)
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=6)
    found: dict[str, Any] = {"losses": [], "summaries": []}
    for _ in range(2):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            found["losses"].append(loss.item())
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        for batch in eval_loader:
            with torch.no_grad():
                tokens = model.generate(
                    batch["input_ids"], attention_mask=batch["attention_mask"], max_length=8, num_beams=2
                )
                found["summaries"] += torch.nn.functional.pad(tokens, (0, 8 - tokens.shape[1])).tolist()
                found["losses"].append(model(**batch).loss.item())
    found["sampled"] = model.generate(**collate.encode(eval_dataset[:3]), do_sample=True, max_new_tokens=5)
    model.save_pretrained(folder / "t5")
    again = T5ForConditionalGeneration.from_pretrained(folder / "t5", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
