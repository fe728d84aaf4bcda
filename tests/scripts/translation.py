"""The tutorial of translation with nn.Transformer: padded pairs of varied length, masks, greedy decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Transformer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PLANS = {2: (("data=2",),)}

PAD_IDX, BOS_IDX, EOS_IDX, VOCAB, EMB = 1, 2, 3, 20, 16


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size: int, maxlen: int = 40) -> None:
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding: Tensor) -> Tensor:
        return token_embedding + self.pos_embedding[: token_embedding.size(0), :]


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size: int, emb_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_size)
        self.emb_size = emb_size

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens.long()) * math.sqrt(self.emb_size)


class Seq2SeqTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer(EMB, 2, 1, 1, dim_feedforward=32, dropout=0.0)
        self.generator = nn.Linear(EMB, VOCAB)
        self.src_tok_emb, self.tgt_tok_emb = TokenEmbedding(VOCAB, EMB), TokenEmbedding(VOCAB, EMB)
        self.positional_encoding = PositionalEncoding(EMB)

    def forward(
        self, src: Tensor, trg: Tensor, src_mask: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor,
        tgt_padding_mask: Tensor, memory_key_padding_mask: Tensor,
    ) -> Tensor:  # fmt: skip
        src_emb = self.positional_encoding(self.src_tok_emb(src))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, memory_key_padding_mask
        )
        return self.generator(outs)

    def encode(self, src: Tensor, src_mask: Tensor) -> Tensor:
        return self.transformer.encoder(self.positional_encoding(self.src_tok_emb(src)), src_mask)

    def decode(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor) -> Tensor:
        return self.transformer.decoder(self.positional_encoding(self.tgt_tok_emb(tgt)), memory, tgt_mask)


def generate_square_subsequent_mask(sz: int) -> Tensor:
    return torch.triu(torch.ones((sz, sz), dtype=torch.bool), diagonal=1)


def create_mask(src: Tensor, tgt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    src_mask = torch.zeros((src.shape[0], src.shape[0])).type(torch.bool)
    tgt_mask = generate_square_subsequent_mask(tgt.shape[0])
    return src_mask, tgt_mask, (src == PAD_IDX).transpose(0, 1), (tgt == PAD_IDX).transpose(0, 1)


def collate_fn(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    def pad(texts: list[Tensor]) -> Tensor:
        ends = [torch.cat((torch.tensor([BOS_IDX]), ids, torch.tensor([EOS_IDX]))) for ids in texts]
        return pad_sequence(ends, padding_value=PAD_IDX)

    return pad([src for src, _ in batch]), pad([tgt for _, tgt in batch])


@torch.no_grad()
def greedy_decode(model: Any, src: Tensor, max_len: int) -> Tensor:
    memory = model.encode(src, torch.zeros(src.shape[0], src.shape[0]).type(torch.bool))
    ys = torch.ones(1, 1).fill_(BOS_IDX).type(torch.long)
    for _ in range(max_len - 1):
        out = model.decode(ys, memory, generate_square_subsequent_mask(ys.size(0)))
        prob = model.generator(out.transpose(0, 1)[:, -1])
        next_word = int(torch.max(prob, dim=1)[1].item())
        ys = torch.cat([ys, torch.ones(1, 1).type_as(src.data).fill_(next_word)], dim=0)
        if next_word == EOS_IDX:
            break
    return ys.flatten()


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    sizes = [(5, 4), (3, 6), (6, 5), (4, 4), (5, 3), (2, 4), (6, 6), (3, 3), (5, 5), (4, 6)]
    pairs: Any = [(torch.randint(4, VOCAB, (a,)), torch.randint(4, VOCAB, (b,))) for a, b in sizes]
    dataloader = DataLoader(pairs, batch_size=4, collate_fn=collate_fn)
    model = Seq2SeqTransformer().double()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    src, tgt = next(iter(dataloader))
    src_mask, tgt_mask, src_pad, tgt_pad = create_mask(src, tgt[:-1])
    model = prepare(model, (src, tgt[:-1], src_mask, tgt_mask, src_pad, tgt_pad, src_pad))
    loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD_IDX)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, betas=(0.9, 0.98), eps=1e-5)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        for mode in (True, False):
            model.train(mode)
            for src, tgt in dataloader:
                tgt_input = tgt[:-1, :]
                src_mask, tgt_mask, src_pad, tgt_pad = create_mask(src, tgt_input)
                with torch.set_grad_enabled(mode):
                    logits = model(src, tgt_input, src_mask, tgt_mask, src_pad, tgt_pad, src_pad)
                    loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[1:, :].reshape(-1))
                if mode:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                found["losses"].append(loss.item())
    found["text"] = greedy_decode(model, pairs[0][0].view(-1, 1), 5)
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    if master:
        torch.save(state, folder / "translation.pt")
    return found | {"state": {name: value.clone() for name, value in state.items()}}
