"""In the style of nanoGPT's train.py and sample.py: decay groups, estimate_loss, clipping, checkpoints, sampling."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PLANS = {2: (("tensor=2",),)}


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def get_num_params(self, non_embedding: bool = True) -> int:
        count = sum(p.numel() for p in self.parameters())
        return count - self.transformer.wpe.weight.numel() if non_embedding else count

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return self.lm_head(x[:, [-1], :]), None

    def configure_optimizers(self, weight_decay: float, learning_rate: float, device_type: str) -> Any:
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        use_fused = "fused" in inspect.signature(torch.optim.AdamW).parameters and device_type == "cuda"
        extra = {"fused": True} if use_fused else {}
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-5, **extra)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        for _ in range(max_new_tokens):
            idx_cond = idx if idx.size(1) <= self.config.block_size else idx[:, -self.config.block_size :]
            logits, _ = self(idx_cond)
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < v[:, [-1]]] = -float("Inf")
            idx = torch.cat((idx, torch.multinomial(functional.softmax(logits, dim=-1), num_samples=1)), dim=1)
        return idx


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(1337)
    data = torch.randint(0, 64, (400,))
    config = GPTConfig()

    def get_batch(size: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - config.block_size - 1, (size,)).tolist()
        return (
            torch.stack([data[i : i + config.block_size] for i in starts]),
            torch.stack([data[i + 1 : i + 1 + config.block_size] for i in starts]),
        )

    x, y = get_batch(8)
    model: Any = prepare(GPT(config).double(), {"idx": x, "targets": y})
    optimizer = model.configure_optimizers(1e-1, 1e-3, "cpu")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = torch.zeros(2)
        for k in range(2):
            losses[k] = model(*get_batch(4))[1].item()
        model.train()
        return losses.mean().item()

    found: dict[str, Any] = {"params": model.get_num_params(), "losses": []}
    for _ in range(3):
        found["losses"].append(estimate_loss())
        for micro_step in range(2):
            _, loss = model(x, y)
            (loss / 2).backward()
            x, y = get_batch(8)
            found["losses"].append(loss.item() * (micro_step + 1))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    if master:
        torch.save({"model": state, "model_args": vars(config)}, folder / "ckpt.pt")
    found["state"] = {name: value.clone() for name, value in state.items()}
    model.eval()
    found["sample"] = model.generate(torch.zeros((1, 14), dtype=torch.long), 4, temperature=0.8, top_k=20)
    return found
