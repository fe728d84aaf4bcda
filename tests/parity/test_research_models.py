"""Small models in the style of research code, by random plans: each is a difficulty of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.random_plans import random_plan
from tests.zoo import assert_parity, trained_alone

Call = Callable[[Any, Tensor, Tensor], Tensor]


class Network(nn.Module):
    """Parts, and what is computed with them."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.up, self.down, self.gate = call, nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 3)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.conv, self.offset = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 2, 3, padding=1)
        self.cell, self.embedding = nn.GRUCell(8, 16), nn.Embedding(12, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("codes", torch.randn(6, 16))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """[4, 6, 8], [4, 6] -> a scalar."""
        return self.call(self, x, ids)


def hidden(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.up(x))


def end(net: Any, y: Tensor) -> Tensor:
    return net.down(y).square().mean()


def straight_through(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = hidden(net, x)
    return end(net, y + (y.sign() - y).detach())


def vector_quantization(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    z = hidden(net, x)
    flat = z.reshape(-1, 16)
    nearest = torch.cdist(flat, net.codes).argmin(1)
    code = net.codes[nearest].view_as(z)
    if net.training:
        with torch.no_grad():
            chosen = functional.one_hot(nearest, 6).to(z)
            net.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            net.codes.mul_(0.9).add_((chosen.t() @ flat) / net.counts[:, None], alpha=0.1)
    return end(net, z + (code - z).detach()) + 0.25 * functional.mse_loss(z, code.detach())


def reads_data(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = hidden(net, x)
    near = -torch.cdist(y.data.reshape(-1, 16), net.codes.data).view(4, 6, 6)
    return end(net, y + (y.sign() - y).data + net.embedding.weight.data.mean() * near.mean())


def writes_data(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = hidden(net, x)
    if net.training:
        net.counts.data.mul_(0.9).add_(functional.one_hot(ids % 6, 6).to(y).sum((0, 1)), alpha=0.1)
        net.codes.data = net.codes.data * 0.9 + 0.1 * y.data.mean((0, 1)) / net.counts.data[:, None]
    return end(net, y - functional.softmax(y @ net.codes.t(), -1) @ net.codes)


def loop_over_experts(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = hidden(net, x)
    shares = net.gate(y).softmax(-1)
    weights, chosen = shares.topk(2, dim=-1)
    out = torch.zeros_like(y)
    for number, expert in enumerate(net.experts):
        out = out + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(y)
    counts = functional.one_hot(chosen, 3).to(y).sum(2).mean((0, 1))
    return end(net, out) + (counts * shares.mean((0, 1))).sum()


def experts_choose(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = hidden(net, x).flatten(0, 1)
    weights, chosen = net.gate(y).softmax(-1).t().topk(4, dim=1)
    out = torch.zeros_like(y)
    for number, expert in enumerate(net.experts):
        out = out.index_add(0, chosen[number], expert(y[chosen[number]]) * weights[number][:, None])
    return end(net, out)


def parametrized(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    return end(net, net.bounded(net.normed(hidden(net, x)).relu()))


def positions_of_mask(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    mask = (ids != 0).long()
    y = net.down(hidden(net, x + net.embedding((mask.cumsum(1) - 1).clamp(min=0))))
    return (y.square() * mask[..., None]).sum() / mask.sum()


def writes_by_index(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y, rows = hidden(net, x), torch.arange(4)[:, None]
    out = torch.zeros(4, 12, 16, dtype=y.dtype)
    out[rows, ids] = y
    return end(net, out.index_put_((rows, ids // 2), y, accumulate=True))


def messages(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y, to = hidden(net, x).flatten(0, 1), (ids.flatten() * 2) % 24
    place = to[:, None].expand(24, 16)
    added = torch.zeros_like(y).scatter_add(0, place, y.flip(0))
    largest = torch.zeros_like(y).scatter_reduce(0, place, y, "amax", include_self=False)
    degree = torch.zeros(24, dtype=y.dtype).index_add(0, to, torch.ones(24, dtype=y.dtype)).clamp(min=1)
    return end(net, added / degree[:, None] + largest)


def shifted_windows(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = torch.roll(hidden(net, x).view(4, 6, 4, 4), (-1, -2), (1, 2))
    windows = y.view(4, 3, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4)
    windows = (windows @ windows.mT).softmax(-1) @ windows
    y = windows.view(4, 3, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(4, 6, 4, 4)
    return end(net, torch.roll(y, (1, 2), (1, 2)).flatten(2))


def deformed(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    image = x[:, None]
    grid = functional.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(4, 2, 3), [4, 1, 6, 8], align_corners=False)
    moved = grid + 0.1 * net.offset(image).permute(0, 2, 3, 1).tanh()
    return end(net, hidden(net, functional.grid_sample(net.conv(image), moved, align_corners=False).mean(1)))


def spectrum(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    f = torch.fft.rfft(hidden(net, x), dim=1)
    turn = torch.polar(torch.ones(4, dtype=x.dtype), torch.arange(4, dtype=x.dtype))[:, None]
    return end(net, torch.fft.irfft(f * turn, n=6, dim=1))


def kept_modes(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    f = torch.fft.rfft2(hidden(net, x).view(4, 6, 4, 4))
    kept = torch.zeros_like(f)
    kept[:, 0] = f[:, 1].conj()
    kept[:, 1:5, :2, -2:] = f[:, 1:5, 1:3, 1:].conj() * torch.complex(net.codes[:4, :2, None], net.codes[:4, 2:4, None])
    kept.diagonal(0, -2, -1).mul_(2)
    return end(net, torch.fft.irfft2(kept, s=(4, 4)).flatten(2))


def modes_of_a_state_space(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    rates = -net.normed.weight[:8].exp() + 1j * net.codes[:1]
    kernel = torch.exp(rates[..., None] * torch.arange(6, dtype=x.dtype)).sum(1).real
    mixed = torch.fft.irfft(torch.fft.rfft(x.mT, n=12) * torch.fft.rfft(kernel, n=12), n=12)[..., :6]
    turned = 2j * hidden(net, mixed.mT) + (1 - 0.5j)
    return end(net, (turned / (1 + 1j) - 1j ** net.codes[0]).abs())


def complex_rotation(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = hidden(net, x).view(4, 6, 2, 4, 2)
    angles = torch.outer(torch.arange(6, dtype=x.dtype), torch.arange(1, 5, dtype=x.dtype))
    turned = torch.view_as_complex(y) * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return end(net, torch.view_as_real(turned).flatten(2))


def steps_in_time(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    state, states = torch.zeros(4, 16, dtype=x.dtype), []
    for step in range(6):
        state = net.cell(x[:, step], state)
        states.append(state)
    return end(net, torch.stack(states, 1))


def checkpointed(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = checkpoint(lambda x: hidden(net, x), x, use_reentrant=False)
    return checkpoint(net.down, y, use_reentrant=True).square().mean()


def hardest_triplets(net: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = net.down(hidden(net, x)).mean(1)
    distances, alike = torch.cdist(y, y), ids[:, 0][:, None] % 2 == ids[:, 0] % 2
    return (1 + (distances * alike).amax(1) - (distances + 1e6 * alike).amin(1)).relu().mean()


CALLS: tuple[Call, ...] = (
    straight_through, vector_quantization, reads_data, writes_data, loop_over_experts, experts_choose, parametrized,
    positions_of_mask, writes_by_index, messages, shifted_windows, deformed, spectrum, complex_rotation, steps_in_time,
    checkpointed, hardest_triplets, kept_modes, modes_of_a_state_space,
)  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_it_trains_as_on_one_device(call: Call) -> None:
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(12)[:6] for _ in range(4)])
    who = trained_alone(Network(call).double(), {"x": torch.randn(4, 6, 8).double(), "ids": ids})
    assert_parity(who, random_plan(who.traced.program, 2, CALLS.index(call)), priced=False)
