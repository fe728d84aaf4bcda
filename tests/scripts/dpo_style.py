"""In the style of trl's DPO trainer: a policy against a frozen copy of it, the loss of log-probabilities outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

PLANS = {2: (("data=2",),)}


def get_batch_logps(logits: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    """[rows, length, words], [rows, length], [rows, length] -> the log-probability of each row's completion."""
    labels, logits, loss_mask = labels[:, 1:].clone(), logits[:, :-1, :], loss_mask[:, 1:].bool()
    labels[~loss_mask] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1)


def concatenated_forward(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    ids = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]])
    mask = torch.cat([batch["chosen_mask"], batch["rejected_mask"]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    chosen, rejected = get_batch_logps(logits, ids, mask).chunk(2)
    return chosen, rejected


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config).double()
    prompts, answers = torch.randint(3, 64, (10, 6)), torch.randint(3, 64, (2, 10, 5))
    mask = torch.cat([torch.zeros(10, 6), torch.ones(10, 5)], 1).long()
    dataset: Any = [
        {
            "chosen_input_ids": torch.cat([prompts[i], answers[0, i]]), "chosen_mask": mask[i],
            "rejected_input_ids": torch.cat([prompts[i], answers[1, i]]), "rejected_mask": mask[i],
        }
        for i in range(10)
    ]  # fmt: skip
    loader: Any = DataLoader(dataset, batch_size=4, shuffle=True)
    ids = torch.zeros(8, 11, dtype=torch.long)
    model = prepare(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False})
    ref_model = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    found: dict[str, Any] = {"losses": []}
    beta, label_smoothing = 0.1, 0.1
    for _ in range(2):
        model.train()
        for batch in loader:
            policy_chosen, policy_rejected = concatenated_forward(model, batch)
            with torch.no_grad():
                ref_chosen, ref_rejected = concatenated_forward(ref_model, batch)
            logits = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
            losses = -functional.logsigmoid(beta * logits) * (1 - label_smoothing)
            losses = losses - functional.logsigmoid(-beta * logits) * label_smoothing
            loss = losses.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            margins = beta * (policy_chosen - ref_chosen - policy_rejected + ref_rejected).detach()
            accuracies = (margins > 1e-9).double()  # in the first step the policy is the reference, up to rounding
            found["losses"] += [loss.item(), accuracies.mean().item(), margins.mean().item()]
    model.save_pretrained(folder / "policy")
    again: Any = GPT2LMHeadModel.from_pretrained(folder / "policy", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
