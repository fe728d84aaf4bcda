"""In the style of torchtune's recipes: checkpointed layers, logits in chunks, gradients scaled by counted tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

PLANS = {2: (("tensor=2",),)}
IGNORE = -100


class RotaryPositionalEmbeddings(nn.Module):
    def __init__(self, dim: int, max_seq_len: int = 64) -> None:
        super().__init__()
        theta = 1.0 / (10_000 ** (torch.arange(0, dim, 2).double() / dim))
        angles = torch.outer(torch.arange(max_seq_len).double(), theta)
        self.register_buffer("cache", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        cache = self.cache[: x.size(1)] if input_pos is None else self.cache[input_pos]
        shaped = x.reshape(*x.shape[:-1], -1, 2)
        cache = cache.view(-1, shaped.size(1), 1, shaped.size(3), 2)
        out = torch.stack(
            [
                shaped[..., 0] * cache[..., 0] - shaped[..., 1] * cache[..., 1],
                shaped[..., 1] * cache[..., 0] + shaped[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return out.flatten(3).type_as(x)


class SelfAttentionLayer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.output_proj = nn.Linear(width, width, bias=False)
        self.pos_embeddings = RotaryPositionalEmbeddings(self.dim)
        self.sa_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.w1, self.w3 = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def attention(self, x: Tensor, mask: Tensor | None, input_pos: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        per_kv = self.heads // self.kv_heads
        q = self.q_proj(x).view(b, s, self.kv_heads * per_kv, self.dim)
        k = self.k_proj(x).view(b, s, self.kv_heads, self.dim)
        v = self.v_proj(x).view(b, s, self.kv_heads, self.dim)
        q, k = (self.pos_embeddings(y, input_pos).transpose(1, 2) for y in (q, k))
        k = k.view(b, self.kv_heads, 1, s, self.dim).expand(b, self.kv_heads, per_kv, s, self.dim).flatten(1, 2)
        v = v.transpose(1, 2)
        v = v.view(b, self.kv_heads, 1, s, self.dim).expand(b, self.kv_heads, per_kv, s, self.dim).flatten(1, 2)
        if mask is not None:
            mask = mask[:, None, :, :]
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.output_proj(out.transpose(1, 2).reshape(b, s, -1))

    def forward(self, x: Tensor, mask: Tensor | None = None, input_pos: Tensor | None = None) -> Tensor:
        h = self.attention(self.sa_norm(x), mask, input_pos) + x
        y = self.mlp_norm(h)
        return h + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class TransformerDecoder(nn.Module):
    def __init__(
        self, vocab: int = 40, width: int = 16, layers: int = 3, activation_checkpointing: bool = True
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(SelfAttentionLayer(width, 4, 2) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.activation_checkpointing = activation_checkpointing
        self.num_output_chunks = 0

    def set_num_output_chunks(self, num_output_chunks: int) -> None:
        self.num_output_chunks = num_output_chunks

    def forward(self, tokens: Tensor, *, mask: Tensor | None = None, input_pos: Tensor | None = None) -> Any:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                h = checkpoint(layer, h, mask=mask, input_pos=input_pos, use_reentrant=False)
            else:
                h = layer(h, mask=mask, input_pos=input_pos)
        h = self.norm(h)
        weight = self.tok_embeddings.weight  # tied
        if self.num_output_chunks:
            return [functional.linear(chunk, weight).double() for chunk in h.chunk(self.num_output_chunks, dim=1)]
        return functional.linear(h, weight).double()


class CEWithChunkedOutputLoss(nn.Module):
    def __init__(self, num_output_chunks: int = 4, ignore_index: int = IGNORE) -> None:
        super().__init__()
        self.num_output_chunks, self.ignore_index = num_output_chunks, ignore_index

    def forward(self, logits: list[Tensor], labels: Tensor) -> Tensor:
        total_elements = (labels != self.ignore_index).sum()
        chunks = [target.reshape(-1) for target in labels.chunk(self.num_output_chunks, dim=1)]
        total = 0.0
        for chunk, target in zip([x.reshape(-1, x.size(-1)) for x in logits], chunks, strict=True):
            total += functional.cross_entropy(chunk, target, ignore_index=self.ignore_index, reduction="sum")
        return total / total_elements


def padded_collate_packed(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    tokens = pad_sequence([x["tokens"] for x in rows], batch_first=True, padding_value=0)
    labels = pad_sequence([x["labels"] for x in rows], batch_first=True, padding_value=IGNORE)
    pad = -tokens.shape[1] % 8
    return {"tokens": functional.pad(tokens, (0, pad)), "labels": functional.pad(labels, (0, pad), value=IGNORE)}


def scale_grads(model: Any, scaler: Tensor) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= scaler


class FullFinetuneRecipe:
    def __init__(self, model: Any, loader: Any) -> None:
        self._model, self._dataloader = model, loader
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        self._loss_fn = CEWithChunkedOutputLoss()
        self._gradient_accumulation_steps = 2
        self.log: list[float] = []

    def _loss_step(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        ignored = torch.full((labels.shape[0], 1), IGNORE)
        labels = torch.hstack((labels[..., 1:], ignored))
        logits = self._model(**batch)
        loss = self._loss_fn(logits, labels)
        del logits
        return loss

    def train(self) -> None:
        self._optimizer.zero_grad()
        running_loss, num_tokens = torch.zeros(()), torch.tensor(0)
        for idx, batch in enumerate(self._dataloader):
            current_num_tokens = (batch["labels"] != IGNORE).sum()
            num_tokens += current_num_tokens
            current_loss = self._loss_step(batch) * current_num_tokens
            running_loss = running_loss + current_loss.detach()
            current_loss.backward()
            if (idx + 1) % self._gradient_accumulation_steps == 0:
                scale_grads(self._model, 1 / num_tokens)
                grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=1.0)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self.log += [(running_loss / num_tokens).item(), float(grad_norm)]
                running_loss, num_tokens = torch.zeros(()), torch.tensor(0)

    @torch.no_grad()
    def generate(self, prompt: Tensor, max_generated_tokens: int) -> Tensor:
        self._model.eval()
        self._model.set_num_output_chunks(0)
        tokens = prompt
        for _ in range(max_generated_tokens):
            logits = self._model(tokens)
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return tokens


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    dataset = []
    for length in torch.randint(5, 16, (18,)).tolist():
        tokens = torch.randint(1, 40, (length,))
        dataset.append({"tokens": tokens, "labels": torch.where(torch.arange(length) < length // 3, IGNORE, tokens)})
    loader: Any = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=padded_collate_packed)  # type: ignore
    model = TransformerDecoder().double()
    model.set_num_output_chunks(4)
    model = prepare(model, {"tokens": padded_collate_packed(dataset[:4])["tokens"]})
    recipe = FullFinetuneRecipe(model, loader)
    for _ in range(2):
        model.train()
        recipe.train()
    found = {"losses": recipe.log, "tokens": recipe.generate(torch.randint(1, 40, (3, 5)), 5)}
    found["state"] = model.full_state_dict() if hasattr(model, "plan") else model.state_dict()
    return found
