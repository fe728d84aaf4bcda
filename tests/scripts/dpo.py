"""Direct preference optimization: a frozen copy as reference, chosen and rejected answers in one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PLANS = {2: (("tensor=2",),)}


class GPT(nn.Module):
    def __init__(self, vocab: int = 32, dim: int = 16, length: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        layers = (nn.TransformerEncoderLayer(dim, 2, 32, 0.0, "gelu", batch_first=True) for _ in range(2))
        self.h = nn.ModuleList(layers)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        x = self.wte(input_ids) + self.wpe(torch.arange(length, device=input_ids.device))
        for block in self.h:
            x = block(x, src_mask=causal, src_key_padding_mask=attention_mask == 0)
        return self.lm_head(x)


def get_batch_logps(logits: Tensor, labels: Tensor) -> Tensor:
    labels, logits = labels[:, 1:].clone(), logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token * loss_mask).sum(-1)


def concatenated_forward(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    ids = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]])
    mask = torch.cat([batch["chosen_attention_mask"], batch["rejected_attention_mask"]])
    labels = torch.cat([batch["chosen_labels"], batch["rejected_labels"]])
    logps = get_batch_logps(model(ids, mask), labels)
    half = len(logps) // 2
    return logps[:half], logps[half:]


def make_batch(size: int, length: int) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = {}
    for kind in ("chosen", "rejected"):
        ids = torch.randint(1, 32, (size, length))
        mask = (torch.arange(length) < torch.randint(length - 3, length + 1, (size, 1))).long()
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :4] = -100  # the prompt
        batch |= {f"{kind}_input_ids": ids, f"{kind}_attention_mask": mask, f"{kind}_labels": labels}
    return batch


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    batches = [make_batch(4, 12), make_batch(4, 12), make_batch(3, 10)]
    example = (torch.ones(8, 12, dtype=torch.long), torch.ones(8, 12, dtype=torch.long))
    policy = prepare(GPT().double(), example)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    found: dict[str, Any] = {"losses": []}
    for mode in (True, True, False):
        policy.train(mode)
        for batch in batches:
            with torch.set_grad_enabled(mode):
                chosen, rejected = concatenated_forward(policy, batch)
            with torch.no_grad():
                reference_chosen, reference_rejected = concatenated_forward(reference, batch)
            logits = (chosen - rejected) - (reference_chosen - reference_rejected)
            losses = -functional.logsigmoid(0.1 * logits)
            loss = losses.mean()
            if mode:
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
                optimizer.step()
                scheduler.step()
            margins = (chosen.detach() - reference_chosen) - (rejected.detach() - reference_rejected)
            found["losses"] += [loss.item(), margins.mean().item(), *chosen.detach().tolist()]
    state = policy.full_state_dict() if hasattr(policy, "full_state_dict") else policy.state_dict()
    if master:
        torch.save({"state": state}, folder / "policy.pt")
    return found | {"state": {name: value.clone() for name, value in state.items()}}
