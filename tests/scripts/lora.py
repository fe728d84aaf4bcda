"""LoRA by hand: linear modules replaced, the base frozen, only adapters in the optimizer and in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PLANS = {2: (("data=2", "zero=3"),)}


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        for p in base.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T * self.scaling


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.o_proj(y)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    def __init__(self, vocab: int = 32, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(*(Block(dim, 2) for _ in range(2)))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.embed(ids)))
        if labels is None:
            return {"logits": logits}
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def add_lora(model: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child))
    return model


def lora_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if "lora_" in name}


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (18, 10))
    labels = ids.masked_fill(torch.rand(18, 10) < 0.3, -100)
    model = add_lora(LM(), ("q_proj", "v_proj", "up")).double()
    model = prepare(model, {"ids": ids[:8], "labels": labels[:8]})
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.01, eps=1e-5)
    found: dict[str, Any] = {"losses": [], "tensors": len(trainable)}
    for _ in range(2):
        model.train()
        for i in range(0, 18, 8):
            loss = model(ids=ids[i : i + 8], labels=labels[i : i + 8])["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
    whole = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    found["state"] = {name: value.clone() for name, value in whole.items()}
    adapters = lora_state_dict(found["state"])
    if master:
        torch.save(adapters, folder / "adapters.pt")
    for name, p in model.named_parameters():  # switched off, and on again from the file's content
        if "lora_B" in name:
            nn.init.zeros_(p)
    with torch.no_grad():
        found["losses"].append(model(ids=ids[:5], labels=labels[:5])["loss"].item())
        missing, unexpected = model.load_state_dict(adapters, strict=False)
        assert missing
        assert not unexpected
        model.eval()
        found["losses"].append(model(ids=ids[:5], labels=labels[:5])["loss"].item())
        found["tokens"] = model(ids=ids[:3])["logits"].argmax(-1)
    return found
