"""A word language model, as in PyTorch's examples: an LSTM, truncated backpropagation, hidden state carried along."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PLANS = {2: (("data=2",),)}

NTOKEN, BPTT, CLIP = 20, 5, 0.25
Hidden = tuple[Tensor, Tensor]


class RNNModel(nn.Module):
    def __init__(self, ntoken: int, ninp: int, nhid: int, nlayers: int) -> None:
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.encoder(input), hidden)
        decoded = self.decoder(output).view(-1, self.ntoken)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz: int) -> Hidden:
        weight = next(self.parameters())
        return (
            weight.new_zeros(self.nlayers, bsz, self.nhid),
            weight.new_zeros(self.nlayers, bsz, self.nhid),
        )


def batchify(data: Tensor, bsz: int) -> Tensor:
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def repackage_hidden(h: Any) -> Any:
    return h.detach() if isinstance(h, Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source: Tensor, i: int) -> tuple[Tensor, Tensor]:
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(1111)
    corpus = torch.randint(NTOKEN, (4 * 14,))
    train_data, val_data = batchify(corpus, 4), batchify(corpus.flip(0), 2)
    model = RNNModel(NTOKEN, 8, 8, 2).double()
    model = prepare(model, (get_batch(train_data, 0)[0], model.init_hidden(4)))
    criterion = nn.NLLLoss()
    lr = 5.0
    best_val_loss = None
    found: dict[str, Any] = {"losses": []}

    def evaluate(data_source: Tensor) -> float:
        model.eval()
        total_loss = 0.0
        hidden = model.init_hidden(2)
        with torch.no_grad():
            for i in range(0, data_source.size(0) - 1, BPTT):
                data, targets = get_batch(data_source, i)
                output, hidden = model(data, hidden)
                hidden = repackage_hidden(hidden)
                total_loss += len(data) * criterion(output, targets).item()
        return total_loss / (len(data_source) - 1)

    for _ in range(2):
        model.train()
        hidden = model.init_hidden(4)
        for i in range(0, train_data.size(0) - 1, BPTT):
            data, targets = get_batch(train_data, i)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            found["losses"].append(loss.item())
        val_loss = evaluate(val_data)
        found["losses"] += [val_loss, math.exp(val_loss)]
        if best_val_loss is None or val_loss < best_val_loss:
            state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
            if master:
                torch.save(state, folder / "model.pt")
            best_val_loss = val_loss
        else:
            lr /= 4.0
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    found["state"] = {name: value.clone() for name, value in state.items()}

    model.eval()
    hidden, input, words = model.init_hidden(1), torch.tensor([[3]]), []
    with torch.no_grad():
        for _ in range(4):
            output, hidden = model(input, hidden)
            word_idx = torch.multinomial(output.squeeze().div(1.0).exp(), 1)[0]
            input.fill_(word_idx)
            words.append(word_idx.item())
    found["words"] = words
    return found
