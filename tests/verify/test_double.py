"""Rehearsals compute in float64 whatever a model casts, on one device and on ranks alike."""

import math
from collections.abc import Callable
from typing import Any

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


class _GraphConvolution(nn.Module):
    """Means over neighbors, with the adjacency matrix made of a list of edges."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.first, self.second, self.dtype = nn.Linear(8, 16), nn.Linear(16, 4), dtype

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        size = len(x)
        adjacent = torch.zeros(size, size, dtype=x.dtype if self.dtype is None else self.dtype)
        adjacent[edges[0], edges[1]] = 1
        adjacent = adjacent + torch.eye(size, dtype=x.dtype)
        scale = adjacent.sum(-1).pow(-0.5)
        adjacent = scale[:, None] * adjacent * scale
        return nn.functional.cross_entropy(adjacent @ self.second((adjacent @ self.first(x)).relu()), labels)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_matrices_of_indices_are_followed(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = _GraphConvolution(dtype)
    inputs = {"x": torch.randn(12, 8), "edges": torch.randint(12, (2, 30)), "labels": torch.randint(4, (12,))}
    assert _verified(model, inputs, "tensor=2") < 1e-14


class _Messages(_GraphConvolution):
    """Sums over neighbors, scaled by the roots of degrees, which are sums of ones."""

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        ones = torch.ones(edges.shape[1], dtype=x.dtype)
        degrees = torch.zeros(len(x), dtype=x.dtype).index_add_(0, edges[1], ones).clamp(min=1)
        weights = (degrees[edges[0]] * degrees[edges[1]]).pow(-0.5)
        h = self.first(x)
        h = torch.zeros(len(x), 16, dtype=x.dtype).index_add_(0, edges[1], h[edges[0]] * weights[:, None])
        return nn.functional.cross_entropy(self.second(h.relu()), labels)


def test_degrees_are_those_of_the_models_dtype() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(12, 8), "edges": torch.randint(12, (2, 30)), "labels": torch.randint(4, (12,))}
    assert _verified(_Messages(None), inputs, "tensor=2") < 1e-14


def _written_rows(h: Tensor, x: Tensor) -> Tensor:
    rows = torch.zeros(len(x), 10)
    rows[:, 1:9] = h / 3
    return rows


def _written_view(h: Tensor, x: Tensor) -> Tensor:
    sums = torch.zeros(len(x), 8)
    part = sums[:, :4]
    part += h[:, 4:] / 3
    return sums * 2


def _written_columns(h: Tensor, x: Tensor) -> Tensor:
    columns = torch.empty(len(x), 8)
    for place in range(8):
        columns[:, place] = h[:, place] / (place + 3)
    return columns


_CREATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arange": lambda h, x: h * (torch.arange(8, dtype=x.dtype) / 7).sin(),
    "cast": lambda h, x: h * (torch.arange(8).to(x.dtype) / 7).sin(),
    "cast_like": lambda h, x: h * (torch.arange(8).to(x) / 7).sin() + (torch.arange(8).type_as(x) / 9).cos(),
    "number": lambda h, x: h * torch.tensor(0.1, dtype=x.dtype),
    "result_type": lambda h, x: h * torch.ones(8, dtype=torch.result_type(x, 1.0)).cumsum(0).div(7),
    "new_full": lambda h, x: h * x.new_full((8,), 0.1).sin() + x.new_full((3, 8), 0.1).sum(0),
    "new_tensor": lambda h, x: (h - x.new_tensor([0.485] * 8)) / x.new_tensor([0.229] * 8),
    "limits": lambda h, x: h / (h.abs() + torch.finfo(x.dtype).eps),
    "branch": lambda h, x: h * 2 if x.dtype == torch.float32 else h * 3,
    "rows": _written_rows,
    "view": _written_view,
    "columns": _written_columns,
}


class _Creating(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        return _CREATED[self.how](self.body(x), x).square().mean()


@pytest.mark.parametrize("how", _CREATED)
def test_what_is_created_is_that_of_the_models_dtype(how: str) -> None:
    torch.manual_seed(0)
    assert _verified(_Creating(how), torch.randn(8, 8), "data=2") < 1e-14


def _verified(model: nn.Module, inputs: Any, constraint: str) -> float:
    plan = autopar.plan(model, autopar.Cluster.of("h100", devices_per_node=2), inputs, constraints=constraint)
    return autopar.verify(model, plan, inputs).loss_error
