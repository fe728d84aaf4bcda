"""In the style of minGPT: a Trainer class with callbacks, optimizer groups by type of module, a sampling callback."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import autopar

PLANS = {2: (("pipeline=2",),)}


class SortDataset(Dataset[Any]):
    """Sequences of digits and the same sorted."""

    def __init__(self, length: int = 6, num_digits: int = 4) -> None:
        self.length, self.num_digits = length, num_digits

    def __len__(self) -> int:
        return 21

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        inp = torch.randint(self.num_digits, (self.length,), generator=torch.Generator().manual_seed(idx))
        cat = torch.cat((inp, torch.sort(inp)[0]), dim=0)
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, block_size: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(n_embd, 4 * n_embd), "c_proj": nn.Linear(4 * n_embd, n_embd), "act": nn.GELU()}
        )
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))
        self.n_head = n_head

    def attn(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = functional.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size: int, block_size: int, n_embd: int = 16, n_layer: int = 2, n_head: int = 2) -> None:
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList([Block(n_embd, n_head, block_size) for _ in range(n_layer)]),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def configure_optimizers(self, learning_rate: float) -> torch.optim.Optimizer:
        decay, no_decay = set(), set()
        for mn, m in self.named_modules():
            for pn, _ in m.named_parameters():
                fpn = f"{mn}.{pn}" if mn else pn
                if pn.endswith("bias") or (pn.endswith("weight") and isinstance(m, nn.LayerNorm | nn.Embedding)):
                    no_decay.add(fpn)
                elif pn.endswith("weight") and isinstance(m, nn.Linear):
                    decay.add(fpn)
        param_dict = dict(self.named_parameters())
        assert len(decay & no_decay) == 0
        assert len(param_dict.keys() - (decay | no_decay)) == 0
        groups = [
            {"params": [param_dict[pn] for pn in sorted(decay)], "weight_decay": 0.1},
            {"params": [param_dict[pn] for pn in sorted(no_decay)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-5)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= self.block_size, f"Cannot forward sequence of length {t}, block size is only {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            idx_cond = idx if idx.size(1) <= self.block_size else idx[:, -self.block_size :]
            logits, _ = self(idx_cond)
            _, idx_next = torch.topk(functional.softmax(logits[:, -1, :], dim=-1), k=1, dim=-1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx


class Trainer:
    def __init__(self, model: Any, loader: Any, max_iters: int) -> None:
        self.model, self.loader, self.max_iters = model, loader, max_iters
        self.optimizer = model.configure_optimizers(5e-3)
        self.callbacks: dict[str, list[Callable[[Trainer], None]]] = defaultdict(list)
        self.iter_num, self.loss = 0, torch.zeros(())

    def add_callback(self, onevent: str, callback: Callable[[Trainer], None]) -> None:
        self.callbacks[onevent].append(callback)

    def run(self) -> None:
        self.model.train()
        data_iter = iter(self.loader)
        while self.iter_num < self.max_iters:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(self.loader)
                batch = next(data_iter)
            _, self.loss = self.model(*batch)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line, `shard_dataloader` another."""
    torch.manual_seed(3407)
    dataset = SortDataset()
    loader: Any = DataLoader(dataset, batch_size=6, shuffle=True)
    example = next(iter(DataLoader(dataset, batch_size=6)))
    model = prepare(GPT(dataset.num_digits, 2 * dataset.length - 1).double(), example, inputs="local")
    if hasattr(model, "data_parallel_size"):
        loader = autopar.shard_dataloader(loader, model)
    trainer = Trainer(model, loader, max_iters=6)
    found: dict[str, Any] = {"losses": [], "samples": []}

    def log(trainer: Trainer) -> None:
        found["losses"].append(trainer.loss.item())

    def sample(trainer: Trainer) -> None:
        if trainer.iter_num % 3 == 2:
            trainer.model.eval()
            found["samples"] += trainer.model.generate(torch.tensor([[0, 2, 1, 0, 3, 1]]), 5)[0].tolist()
            trainer.model.train()

    trainer.add_callback("on_batch_end", log)
    trainer.add_callback("on_batch_end", sample)
    trainer.run()
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    if master:
        torch.save(state, folder / "model.pt")
    found["state"] = {name: value.clone() for name, value in state.items()}
    return found
