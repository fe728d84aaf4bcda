"""In the style of transformers' run_translation_no_trainer.py: BART, padded per batch, smoothed labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BartConfig, BartForConditionalGeneration

PLANS = {2: (("data=2",),)}
PAD = 1


class LabelSmoother:
    """As transformers.trainer_pt_utils has it."""

    epsilon, ignore_index = 0.1, -100

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = -torch.nn.functional.log_softmax(logits, dim=-1)
        labels = labels.unsqueeze(-1)
        padding_mask = labels.eq(self.ignore_index)
        labels = torch.clamp(labels, min=0)
        nll_loss = log_probs.gather(dim=-1, index=labels)
        smoothed_loss = log_probs.sum(dim=-1, keepdim=True)
        nll_loss.masked_fill_(padding_mask, 0.0)
        smoothed_loss.masked_fill_(padding_mask, 0.0)
        num_active = padding_mask.numel() - padding_mask.long().sum()
        nll, smoothed = nll_loss.sum() / num_active, smoothed_loss.sum() / (num_active * log_probs.shape[-1])
        return (1 - self.epsilon) * nll + self.epsilon * smoothed


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    ids = pad_sequence([x for x, _ in rows], batch_first=True, padding_value=PAD)
    labels = pad_sequence([y for _, y in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def make_dataset(count: int) -> list[tuple[Tensor, Tensor]]:
    rows = []
    for n in torch.randint(4, 10, (count,)).tolist():
        text = torch.randint(4, 40, (n,))
        end = torch.tensor([2])
        rows.append((torch.cat([text[torch.randperm(n)], end]), torch.cat([text, end])))
    return rows


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=40, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, dropout=0.0,
        init_std=0.3, forced_eos_token_id=None,
    )  # fmt: skip
    model: Any = BartForConditionalGeneration(config).double()
    train, test = make_dataset(11), make_dataset(7)
    train_loader: Any = DataLoader(train, batch_size=4, shuffle=True, collate_fn=collate)  # type: ignore
    test_loader: Any = DataLoader(test, batch_size=5, collate_fn=collate)  # type: ignore
    model = prepare(model, collate(train[:4]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-5)
    smoother = LabelSmoother()
    found: dict[str, Any] = {"losses": [], "texts": []}
    for epoch in range(2):
        model.train()
        for batch in train_loader:
            if epoch == 0:
                loss = model(**batch).loss
            else:
                labels = batch.pop("labels")
                batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
                loss = smoother(model(**batch).logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found["losses"].append(loss.item())
        model.eval()
        for batch in test_loader:
            with torch.no_grad():
                outputs = model(**batch)
                predictions = outputs.logits.argmax(-1)
                right = ((predictions == batch["labels"]) & (batch["labels"] != -100)).sum()
                found["losses"] += [outputs.loss.item(), int(right)]
    tokens = model.generate(**{k: v for k, v in collate(test[:3]).items() if k != "labels"}, num_beams=2, max_length=7)
    found["texts"] = torch.nn.functional.pad(tokens, (0, 7 - tokens.shape[1]))
    model.save_pretrained(folder / "bart")
    again = BartForConditionalGeneration.from_pretrained(folder / "bart", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
