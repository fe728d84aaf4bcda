"""What a script does with parameters of other pipeline stages works as on one device, or says where they are."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.errors import GradientNormError, StageError
from tests.end_to_end.harness import launch, whole_mesh

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.backbone = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.backbone(self.embed(x))), y)


def train(prepare: Any) -> tuple[Any, list[float]]:
    """A learning rate for each part."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = Net().double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 3
    model = prepare(model, {"x": x, "y": y})
    parts = [(model.embed, 1e-3), (model.backbone, 1e-2), (model.head, 1e-1)]
    optimizer = torch.optim.AdamW([{"params": part.parameters(), "lr": lr} for part, lr in parts], eps=1e-5)
    losses: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x=x, y=y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        losses.append(loss.item())
    return model, losses


def on_stages(model: nn.Module, example: Any) -> Any:
    return autopar.parallelize(model, whole_mesh(), example, profile=False, constraints=("pipeline=2",))


def check_parts(expected: list[float]) -> None:
    """Groups of parameters, and what is known of those of other stages."""
    model, losses = train(on_stages)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    assert "Linear(in_features=16, out_features=3, bias=True)" in str(model)
    assert {name for name, _ in model.head.named_parameters()} <= {"weight", "bias"}  # loops over names get no more
    weight = model.head.weight
    assert (weight.shape, weight.numel(), weight.requires_grad) == ((3, 16), 48, True)
    assert isinstance(weight, nn.Parameter) is isinstance(copy.deepcopy(model).head.weight, nn.Parameter)
    for act in (lambda: weight.norm(), lambda: weight * 2, lambda: nn.init.zeros_(weight), lambda: weight.grad.sum()):
        if not isinstance(weight, nn.Parameter):
            with pytest.raises(
                StageError, match=r"'head\.weight' is on rank 1 only, in the stages that read it.*full_state_dict"
            ):
                act()


def check_norms_of_parts() -> None:
    """A norm of the gradients of a submodule that one rank has nothing of."""
    model, _ = train(on_stages)
    with pytest.raises(GradientNormError, match=r"all of model\.parameters\(\)"):
        clip_grad_norm_(model.head.parameters(), 1.0)


def test_parts_of_a_model() -> None:
    def keep(model: nn.Module, _: object) -> nn.Module:
        return model

    _, expected = train(keep)
    launch(2, partial(check_parts, expected))


def test_norms_of_parts_are_refused_at_once() -> None:
    launch(2, check_norms_of_parts)
