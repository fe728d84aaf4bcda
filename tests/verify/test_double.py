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
