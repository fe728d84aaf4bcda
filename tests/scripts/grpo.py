"""In the style of TRL's GRPO: groups of sampled completions, a frozen reference, clipped ratios over minibatches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PLANS = {2: (("data=2", "zero=3"),)}
TOLERANCE = 1e-5  # the model computes its norms in float32

PAD, EOS, GROUP, PROMPTS = 0, 1, 4, 2


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities of the tokens `index`, row by row as TRL does to save memory."""
    rows = []
    for row_logits, row_labels in zip(logits, index, strict=True):
        row_logps = torch.nn.functional.log_softmax(row_logits, dim=-1)
        rows.append(row_logps.gather(dim=-1, index=row_labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


class GRPOTrainer:
    def __init__(self, model: Any, ref_model: Any, lr: float = 3e-3, beta: float = 0.1, epsilon: float = 0.2) -> None:
        self.model, self.ref_model, self.beta, self.epsilon = model, ref_model, beta, epsilon
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-5)
        self.metrics: list[float] = []

    def per_token_logps(self, model: Any, ids: Tensor, mask: Tensor, keep: int) -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits
        return selective_log_softmax(logits[:, :-1], ids[:, -keep:])

    def rollout(self, prompts: Tensor) -> dict[str, Tensor]:
        ids = prompts.repeat_interleave(GROUP, dim=0)
        self.model.eval()
        with torch.no_grad():
            full = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=6, top_k=8
            )
        completion = full[:, prompts.shape[1] :]
        is_eos = completion == EOS
        eos_idx = torch.full((len(is_eos),), is_eos.size(1))
        eos_idx[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
        completion_mask = (torch.arange(is_eos.size(1)) <= eos_idx[:, None]).int()
        mask = torch.cat([torch.ones_like(ids), completion_mask], dim=1)
        with torch.no_grad():
            old = self.per_token_logps(self.model, full, mask, completion.shape[1])
            ref = self.per_token_logps(self.ref_model, full, mask, completion.shape[1])
        rewards = ((completion % 2 == 0) * completion_mask).sum(1).double() / completion_mask.sum(1)
        grouped = rewards.view(-1, GROUP)
        mean, std = (x.repeat_interleave(GROUP) for x in (grouped.mean(1), grouped.std(1)))
        return {
            "ids": full, "mask": mask, "completion_mask": completion_mask, "old": old, "ref": ref,
            "advantages": (rewards - mean) / (std + 1e-4),
        }  # fmt: skip

    def compute_loss(self, x: dict[str, Tensor]) -> Tensor:
        keep = x["completion_mask"].shape[1]
        logps = self.per_token_logps(self.model, x["ids"], x["mask"], keep)
        kl = torch.exp(x["ref"] - logps) - (x["ref"] - logps) - 1
        ratio = torch.exp(logps - x["old"])
        clipped = torch.clamp(ratio, 1 - self.epsilon, 1 + self.epsilon)
        advantages = x["advantages"].unsqueeze(1)
        loss = -torch.min(ratio * advantages, clipped * advantages) + self.beta * kl
        mask = x["completion_mask"]
        self.metrics.append(((kl * mask).sum() / mask.sum()).item())
        return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()

    def step(self, prompts: Tensor) -> None:
        batch = self.rollout(prompts)
        self.model.train()
        for _ in range(2):
            for rows in torch.randperm(len(batch["ids"])).split(5):  # the last has 3
                loss = self.compute_loss({name: x[rows] for name, x in batch.items()})
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.metrics.append(loss.item())


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, bos_token_id=2, eos_token_id=EOS,
        pad_token_id=PAD,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    ref_model = copy.deepcopy(model).eval().requires_grad_(False)
    ids = torch.randint(3, 24, (8, 10))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 7}
    model = prepare(model, example)
    trainer = GRPOTrainer(model, prepare(ref_model, example))
    torch.manual_seed(1)
    for _ in range(2):
        trainer.step(torch.randint(3, 24, (PROMPTS, 4)))
    model.save_pretrained(folder / "policy")
    again = LlamaForCausalLM.from_pretrained(folder / "policy", dtype=torch.float64)
    return {"losses": trainer.metrics, "state": {name: x.clone() for name, x in again.state_dict().items()}}
