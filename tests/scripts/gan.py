"""A DCGAN: two models with two optimizers, real and fake batches through one discriminator before a step, samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

PLANS = {2: (("data=2",),)}

NZ, NGF = 6, 4


def weights_init(m: nn.Module) -> None:
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, NGF * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(NGF * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF * 2, NGF, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, NGF, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NGF, NGF * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NGF * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input).view(-1)


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(999)
    dataset = TensorDataset(torch.rand(20, 1, 16, 16, dtype=torch.float64) * 2 - 1)
    dataloader = DataLoader(dataset, batch_size=8, shuffle=True)
    net_g = Generator().double()
    net_g.apply(weights_init)
    net_d = Discriminator().double()
    net_d.apply(weights_init)
    fixed_noise = torch.randn(4, NZ, 1, 1, dtype=torch.float64)
    net_g = prepare(net_g, (torch.randn(8, NZ, 1, 1, dtype=torch.float64),))
    net_d = prepare(net_d, (dataset[:8][0],))
    criterion = nn.BCELoss()
    optimizer_d = optim.Adam(net_d.parameters(), lr=0.0002, betas=(0.5, 0.999), eps=1e-5)
    optimizer_g = optim.Adam(net_g.parameters(), lr=0.0002, betas=(0.5, 0.999), eps=1e-5)
    found: dict[str, Any] = {"losses": []}
    for epoch in range(2):
        for (real,) in dataloader:
            # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
            net_d.zero_grad()
            label = torch.full((real.size(0),), 1.0, dtype=torch.float64)
            output = net_d(real)
            err_d_real = criterion(output, label)
            err_d_real.backward()
            d_x = output.mean().item()
            noise = torch.randn(real.size(0), NZ, 1, 1, dtype=torch.float64)
            fake = net_g(noise)
            label.fill_(0.0)
            output = net_d(fake.detach())
            err_d_fake = criterion(output, label)
            err_d_fake.backward()
            optimizer_d.step()
            # (2) Update G: maximize log(D(G(z)))
            net_g.zero_grad()
            label.fill_(1.0)
            output = net_d(fake)
            err_g = criterion(output, label)
            err_g.backward()
            optimizer_g.step()
            found["losses"] += [err_d_real.item() + err_d_fake.item(), err_g.item(), d_x]
        with torch.no_grad():
            fake = net_g(fixed_noise).detach().cpu()
        found["losses"] += fake[0, 0, 3:5].flatten().tolist()
        states = [m.full_state_dict() if hasattr(m, "full_state_dict") else m.state_dict() for m in (net_g, net_d)]
        if master:
            torch.save(states[0], folder / f"net_g_epoch_{epoch}.pth")
            torch.save(states[1], folder / f"net_d_epoch_{epoch}.pth")
    found["state"] = {f"{i}.{n}": x.clone() for i, state in enumerate(states) for n, x in state.items()}
    return found
