"""In the style of torchtitan: Llama with complex rotary tables, accumulated gradients, warmup, DCP save and resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

PLANS = {4: (("data=2", "tensor=2", "zero=3"),)}

DIM, HEADS, KV_HEADS, VOCAB, SEQ = 16, 4, 2, 32, 12


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float64)[: (dim // 2)] / dim))
    freqs = torch.outer(torch.arange(end, dtype=torch.float64), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    xq_ = torch.view_as_complex(xq.reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis[: xq.shape[1]].view(1, xq.shape[1], 1, -1)
    return torch.view_as_real(xq_ * freqs_cis).flatten(3), torch.view_as_real(xk_ * freqs_cis).flatten(3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.n_rep = DIM // HEADS, HEADS // KV_HEADS
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        bs, seqlen, _ = x.shape
        xq, xk, xv = (w(x).view(bs, seqlen, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        keys = torch.repeat_interleave(xk, dim=2, repeats=self.n_rep)
        values = torch.repeat_interleave(xv, dim=2, repeats=self.n_rep)
        q, k, v = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(output.transpose(1, 2).contiguous().view(bs, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.w3 = nn.Linear(DIM, 2 * DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, n_layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.register_buffer("freqs_cis", precompute_freqs_cis(DIM // HEADS, 2 * SEQ), persistent=False)
        self.layers = nn.ModuleDict({str(i): TransformerBlock() for i in range(n_layers)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


def cross_entropy_loss(pred: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1))


def linear_warmup_linear_decay(warmup_steps: int, decay_steps: int, current_step: int) -> float:
    if current_step < warmup_steps:
        return (current_step + 1) / (warmup_steps + 1)
    return 1 - (current_step - warmup_steps) / decay_steps


class Trainer:
    def __init__(self, prepare: Callable[..., Any], tokens: Tensor) -> None:
        torch.manual_seed(42)
        self.model = prepare(Transformer().double(), (tokens[:4, :-1],))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-5)
        schedule = partial(linear_warmup_linear_decay, 2, 8)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_lambda=schedule)
        self.step = 0
        self.tokens = tokens

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "step": self.step,
        }

    def load(self, folder: Path) -> None:
        state = self.state_dict()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.step = state["step"]

    def train(self, steps: int) -> list[float]:
        log = []
        while self.step < steps:
            self.step += 1
            self.optimizer.zero_grad()
            for micro in range(2):
                rows = self.tokens[(2 * self.step + micro) * 4 % 16 :][:4]
                loss = cross_entropy_loss(self.model(rows[:, :-1]), rows[:, 1:]) / 2
                loss.backward()
                log.append(loss.item())
            grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self.optimizer.step()
            self.lr_scheduler.step()
            log.append(float(grad_norm))
        return log


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    tokens = torch.randint(0, VOCAB, (16, SEQ + 1), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(prepare, tokens)
    losses = trainer.train(2)
    dcp.save(trainer.state_dict(), checkpoint_id=folder / "step-2")
    losses += trainer.train(4)
    resumed = Trainer(prepare, tokens)
    resumed.load(folder / "step-2")
    losses += resumed.train(4)
    model = resumed.model.eval()
    with torch.no_grad():
        losses += model(tokens[:3, :20])[:, -1, 0].tolist()
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {"losses": losses, "state": {name: value.clone() for name, value in state.items()}}
