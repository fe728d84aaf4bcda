"""In the style of transformers' run_clm_no_trainer.py: accumulation, a schedule, perplexity, samples, resuming."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

PLANS = {2: (("pipeline=2", "microbatches=1"),)}
TOLERANCE = 1e-5  # the model computes its loss in float32


def group_texts(tokens: torch.Tensor, block_size: int) -> list[dict[str, Any]]:
    length = len(tokens) // block_size * block_size
    blocks = tokens[:length].view(-1, block_size)
    return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x.clone()} for x in blocks]


def evaluate(model: Any, loader: DataLoader[Any], batch_size: int, count: int) -> tuple[float, float]:
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(outputs.loss.repeat(batch_size))
    eval_loss = torch.mean(torch.cat(losses)[:count])
    return eval_loss.item(), math.exp(eval_loss)


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config).double()
    tokenizer_length = 64
    if tokenizer_length > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(tokenizer_length)
    train_dataset = group_texts(torch.randint(3, 64, (14 * 12 + 5,)), 12)
    eval_dataset = group_texts(torch.randint(3, 64, (6 * 12,)), 12)
    train_loader: Any = DataLoader(train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=4)  # type: ignore
    eval_loader: Any = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=6)  # type: ignore
    model = prepare(model, default_data_collator(train_dataset[:4]))

    no_decay = ["bias", "ln_f.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.1,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-5)
    accumulation, epochs = 2, 3
    steps_per_epoch = math.ceil(len(train_loader) / accumulation)
    scheduler = get_scheduler(
        "cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=epochs * steps_per_epoch
    )
    found: dict[str, Any] = {"losses": [], "params": sum(p.numel() for p in model.parameters())}

    def train_epoch() -> None:
        model.train()
        total_loss = 0.0
        for step, batch in enumerate(train_loader):
            outputs = model(**batch)
            total_loss += outputs.loss.detach().float()
            (outputs.loss / accumulation).backward()
            if (step + 1) % accumulation == 0 or step == len(train_loader) - 1:
                found["losses"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        found["losses"] += [float(total_loss) / len(train_loader), *evaluate(model, eval_loader, 6, len(eval_dataset))]

    def save(where: Path) -> None:
        model.save_pretrained(where)
        state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state, where / "training.pt")

    prompt = torch.tensor([[1, 5, 9, 11], [1, 7, 8, 3]])
    for epoch in range(2):
        train_epoch()
        found[f"samples{epoch}"] = model.generate(prompt, do_sample=True, top_k=20, max_new_tokens=6)
    model.save_pretrained(folder / "checkpoint", is_main_process=master)
    again = GPT2LMHeadModel.from_pretrained(folder / "checkpoint", dtype=torch.float64)
    found["losses"].append(evaluate(again, eval_loader, 6, len(eval_dataset))[0])
    outputs = model.eval()(**default_data_collator(eval_dataset[:3]), output_hidden_states=True)
    found["losses"] += [x.sum().item() for x in (*outputs.hidden_states, outputs.logits)]
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
