"""A speech recognizer with CTC: convolutions and a GRU over padded spectrograms, OneCycleLR, greedy decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PLANS = {2: (("data=2",),)}

N_FEATS, N_CLASS = 8, 6


class ResidualCNN(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N_FEATS // 2)
        self.cnn = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.norm(x.transpose(2, 3).contiguous()).transpose(2, 3))
        return x + self.cnn(h)


class SpeechRecognitionModel(nn.Module):
    def __init__(self, channels: int = 4, rnn_dim: int = 8) -> None:
        super().__init__()
        self.cnn = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.rescnn_layers = nn.Sequential(*(ResidualCNN(channels) for _ in range(2)))
        self.fully_connected = nn.Linear(channels * N_FEATS // 2, rnn_dim)
        self.birnn = nn.GRU(rnn_dim, rnn_dim, num_layers=1, batch_first=True, bidirectional=True)
        self.classifier = nn.Sequential(nn.Linear(2 * rnn_dim, rnn_dim), nn.GELU(), nn.Linear(rnn_dim, N_CLASS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.rescnn_layers(self.cnn(x))
        batch, channels, features, time = x.size()
        x = self.fully_connected(x.view(batch, channels * features, time).transpose(1, 2))
        return self.classifier(self.birnn(x)[0])


def data_processing(data: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, list[int], list[int]]:
    spectrograms = [spec for spec, _ in data]
    padded = pad_sequence(spectrograms, batch_first=True).unsqueeze(1).transpose(2, 3)
    labels = pad_sequence([label for _, label in data], batch_first=True)
    return padded, labels, [len(spec) // 2 for spec in spectrograms], [len(label) for _, label in data]


def greedy_decoder(output: Tensor, blank_label: int = 0) -> list[list[int]]:
    decodes = []
    for args in torch.argmax(output, dim=2).tolist():
        kept = [x for j, x in enumerate(args) if x != blank_label and (j == 0 or x != args[j - 1])]
        decodes.append(kept)
    return decodes


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(7)
    lengths = [16, 20, 14, 18, 16, 12, 20, 16, 14, 18]
    data: Any = [(torch.randn(n, N_FEATS, dtype=torch.float64), torch.randint(1, N_CLASS, (n // 5,))) for n in lengths]
    train_loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=data_processing)
    test_loader = DataLoader(data, batch_size=5, collate_fn=data_processing)
    model = prepare(SpeechRecognitionModel().double(), (data_processing(data[:4])[0],))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, eps=1e-5)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps_per_epoch=len(train_loader), epochs=2)
    found: dict[str, Any] = {"losses": [], "decoded": []}
    for _ in range(2):
        model.train()
        for spectrograms, labels, input_lengths, label_lengths in train_loader:
            optimizer.zero_grad()
            output = functional.log_softmax(model(spectrograms), dim=2).transpose(0, 1)
            loss = criterion(output, labels, input_lengths, label_lengths)
            loss.backward()
            optimizer.step()
            scheduler.step()
            found["losses"] += [loss.item(), scheduler.get_last_lr()[0]]
    model.eval()
    with torch.no_grad():
        for spectrograms, labels, input_lengths, label_lengths in test_loader:
            output = functional.log_softmax(model(spectrograms), dim=2)
            loss = criterion(output.transpose(0, 1), labels, input_lengths, label_lengths)
            found["losses"].append(loss.item())
            found["decoded"] += [len(text) for text in greedy_decoder(output)]
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    if master:
        torch.save(state, folder / "ctc.pt")
    return found | {"state": {name: value.clone() for name, value in state.items()}}
