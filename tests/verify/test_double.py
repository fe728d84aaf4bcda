"""Rehearsals compute in float64 whatever a model casts, on one device and on ranks alike."""

import math

import pytest
import torch
from torch import Tensor, nn

import autopar


class _Denoiser(nn.Module):
    """A diffusion model as diffusers writes them: sines of times in float32, cast to the dtype of the parameters."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width, self.embed, self.body = width, nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, times: Tensor, target: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32) / half)
        angles = times[:, None].float() * frequencies[None, :]
        waves = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1).to(x.dtype)
        return nn.functional.mse_loss(self.body(x + nn.functional.silu(self.embed(waves))), target)


@pytest.mark.parametrize("constraint", ["data=2", "tensor=2"])
def test_sines_of_integers_are_followed(constraint: str) -> None:
    torch.manual_seed(0)
    model = _Denoiser()
    inputs = {"x": torch.randn(4, 16), "times": torch.randint(1000, (4,)), "target": torch.randn(4, 16)}
    cluster = autopar.Cluster.of("h100", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=[constraint])
    assert autopar.verify(model, plan, inputs).loss_error < 1e-14


class _Quantizer(nn.Module):
    """The nearest code by a product with what is one for it, as vector-quantize-pytorch writes it."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 8)
        self.register_buffer("codes", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        chosen = nn.functional.one_hot((h.detach() @ self.codes.T).argmax(-1), 4)
        return (
            (h - torch.einsum("h n c, h c d -> h n d", chosen.type(h.dtype)[None], self.codes[None])[0]).square().mean()
        )


def test_integers_cast_for_an_einsum_are_followed() -> None:
    torch.manual_seed(0)
    model, x = _Quantizer(), torch.randn(4, 16)
    plan = autopar.plan(model, autopar.Cluster.of("h100", devices_per_node=2), x, constraints="data=2")
    assert autopar.verify(model, plan, x).loss_error < 1e-14
