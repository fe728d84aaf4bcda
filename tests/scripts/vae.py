"""A variational autoencoder, as in PyTorch's examples: reparameterization, a test set, samples of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

PLANS = {2: (("tensor=2",),)}


class VAE(nn.Module):
    def __init__(self, features: int = 48, hidden: int = 32, latent: int = 8) -> None:
        super().__init__()
        self.latent = latent
        self.fc1 = nn.Linear(features, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, features)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = functional.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor, eps: Tensor) -> Tensor:
        return mu + eps * torch.exp(0.5 * logvar)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z))))

    def forward(self, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 48))
        z = self.reparameterize(mu, logvar, eps)
        return self.decode(z), mu, logvar


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = functional.binary_cross_entropy(recon_x, x.view(-1, 48), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(1)
    images = torch.rand(26, 1, 6, 8, dtype=torch.float64)
    train_loader = DataLoader(TensorDataset(images), batch_size=8, shuffle=True)
    test_loader = DataLoader(TensorDataset(images.flip(3)), batch_size=12)
    model = prepare(VAE().double(), (images[:8], torch.randn(8, 8, dtype=torch.float64)))
    optimizer = optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    found: dict[str, Any] = {"losses": []}
    for epoch in range(2):
        model.train()
        train_loss = 0.0
        for (data,) in train_loader:
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data, torch.randn(len(data), 8, dtype=torch.float64))
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
        found["losses"].append(train_loss / 26)
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for (data,) in test_loader:
                recon_batch, mu, logvar = model(data, torch.randn(len(data), 8, dtype=torch.float64))
                test_loss += loss_function(recon_batch, data, mu, logvar).item()
            found["losses"].append(test_loss / 26)
            sample = model.decode(torch.randn(5, model.latent, dtype=torch.float64))
            found["losses"] += sample.flatten().tolist()
            if master:
                torch.save(sample.view(5, 1, 6, 8), folder / f"sample_{epoch}.pt")
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    found["state"] = {name: value.clone() for name, value in state.items()}
    return found
