"""What a script does with parameters of other pipeline stages works as on one device."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.errors import ModelError, PipelineError, RankError
from tests.end_to_end.harness import launch, whole_mesh
from tests.lower.test_whole_matrices import Lamb

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
    model, x, y = made(prepare)
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
    """Groups of parameters, and what is read of those of other stages, on every rank."""
    model, losses = train(on_stages)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    assert "Linear(in_features=16, out_features=3, bias=True)" in str(model)
    names, like = [name for name, _ in model.named_parameters()], Net()
    assert names == [name for name, _ in like.named_parameters()]
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in like.parameters())
    whole, copied = model.full_state_dict(), copy.deepcopy(model)
    for each in (model, copied):
        for name, p in each.named_parameters():
            torch.testing.assert_close(p.full_tensor(), whole[name], rtol=0, atol=0)
            torch.testing.assert_close(p.norm().item(), whole[name].norm().item(), rtol=1e-12, atol=0)
    made_of_it = model.head.weight @ model.embed.weight.new_ones(16)
    torch.testing.assert_close(made_of_it, whole["head.weight"].sum(1), rtol=1e-12, atol=0)


def check_across_stages(first: Any, last: Any) -> None:
    """What is computed of parameters of two stages, as momentum encoders are, is computed of whole ones."""
    a, b = first.full_tensor().clone(), last.full_tensor().clone()
    assert torch.equal(first.data * 0.9 + last.data * 0.1, a * 0.9 + b * 0.1)
    first.data = first.data * 0.9 + last.data * 0.1
    assert torch.equal(first.full_tensor(), a * 0.9 + b * 0.1)
    first.copy_(a).mul_(0.9).add_(last, alpha=0.1)
    assert torch.equal(first.full_tensor(), (a * 0.9).add(b, alpha=0.1))
    torch._foreach_lerp_([first.copy_(a), last], [last, last], 0.1)
    assert torch.equal(first.full_tensor(), a.lerp(b, 0.1))
    first.data = last.data
    assert torch.equal(first.full_tensor(), b)
    assert torch.equal(last.full_tensor(), b)


def check_writes() -> None:
    """What a script writes to parameters of any stage, and their gradients."""
    model, _ = train(on_stages)
    with torch.no_grad():
        for p in (model.embed.weight, model.head.weight):
            p[0] = 1.0
            p[1:].mul_(0.5)
            p.view(-1)[-1] = 7.0
            p.data = p.data + 1
            p.add_(torch.arange(float(p.numel()), dtype=p.dtype).view_as(p))
            nn.init.zeros_(p.grad)
        nn.init.normal_(model.head.bias)
        first, last = model.backbone[0].up.weight, model.backbone[3].up.weight
        assert first.grad is not None
        with pytest.raises(ModelError, match="which are in different pipeline stages"):
            first.grad.add_(last)
        check_across_stages(first, last)
    whole = model.full_state_dict()
    for name in ("embed.weight", "head.weight"):
        x = whole[name] - torch.arange(float(whole[name].numel()), dtype=torch.float64).view_as(whole[name])
        assert x[-1, -1] == 8.0
        assert (x[0] == 2.0).all()
        assert model.get_parameter(name).grad.abs().sum().item() == 0
    assert torch.equal(model.head.bias.full_tensor(), whole["head.bias"])
    assert whole["head.bias"].abs().min() > 0


def check_optimizers(expected: list[list[float]]) -> None:
    """Steps that depend on all parameters, also of other stages, and which parameters are trained."""
    for train_model, losses in zip(LOOPS, expected, strict=True):
        torch.testing.assert_close(train_model(on_stages), losses, rtol=1e-9, atol=0)


class Normalized(torch.optim.Optimizer):
    """A step of the same length for all parameters together."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        assert all(p.to_local().numel() for p in trained if isinstance(p, DTensor))  # as some look into these
        norm = torch.stack([p.grad.square().sum() for p in trained]).sum().sqrt()
        for p in trained:
            p.sub_(0.1 * p.grad / norm)


def normalized(prepare: Any) -> list[float]:
    return trained_by(Normalized, prepare)


def trained_by(kind: Any, prepare: Any) -> list[float]:
    model, x, y = made(prepare)
    optimizer, losses = kind(model.parameters()), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x=x, y=y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Stacked(torch.optim.Optimizer):
    """Momentum of all parameters of a group in one tensor, as they have one shape; each step needs all gradients."""

    def __init__(self, parameters: Any) -> None:
        named = list[Any](parameters)
        groups = [{"params": [p for p in named if p.dim() != 2], "is_stacked": False}]
        groups += [
            {"params": [p for p in named if p.shape == shape], "is_stacked": True, "lr": 0.2}
            for shape in sorted({p.shape for p in named if p.dim() == 2})
        ]
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            if not group["is_stacked"]:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(group["lr"] * p.grad)
                continue
            gradients, state = torch.stack([p.grad for p in group["params"]]), self.state[group["params"][0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradients))
            stacked = torch.stack(group["params"]) - group["lr"] * momentum.lerp_(gradients, 0.5)
            torch._foreach_copy_(group["params"], list(stacked.unbind(0)))


def stacked(prepare: Any) -> list[float]:
    return trained_by(Stacked, prepare)


def lamb(prepare: Any) -> list[float]:
    """Each parameter by itself, but whole."""
    return trained_by(Lamb, prepare)


class Flagged(Lamb):
    """Notes in a parameter's state how it is treated, from the second step on."""

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        made = super().direction(p, grad, state)
        state["is_matrix"] = p.dim() == 2
        return made


def flagged(prepare: Any) -> list[float]:
    return trained_by(Flagged, prepare)


def centered(prepare: Any) -> list[float]:
    """Hooks that read whole gradients, which run on every rank in one order."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        hooked = [p for p in parameters if p.dim() > 1]
        for p in hooked:
            p.register_hook(lambda gradient: gradient - gradient.mean(dim=1, keepdim=True))
        return torch.optim.SGD(hooked, lr=0.1)

    return trained_by(make, prepare)


def unfrozen(prepare: Any) -> list[float]:
    """More and more is trained, and less in the end."""

    def freeze(model: Any) -> Any:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        return model

    def frozen(model: Any, example: Any) -> Any:
        return prepare(freeze(model), example)

    model, x, y = made(frozen)
    optimizer, losses = torch.optim.AdamW(model.head.parameters(), 1e-2, eps=1e-5), list[float]()
    for number in range(4):
        if number in (1, 2):
            part = model.backbone[3] if number == 1 else model.embed
            part.requires_grad_(True)
            optimizer.add_param_group({"params": part.parameters()})
        if number == 3:
            model.embed.requires_grad_(False)
        optimizer.zero_grad()
        loss = model(x=x, y=y)
        loss.backward()
        losses += [clip_grad_norm_(model.parameters(), 1.0).item(), loss.item()]
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    return losses


def lbfgs(prepare: Any) -> list[float]:
    model, x, y = made(prepare)
    own = nn.Parameter(torch.zeros(1, dtype=torch.float64))  # a group may begin with one that is not the model's
    optimizer = torch.optim.LBFGS([own, *model.parameters()], lr=0.5, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x=x, y=y)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)]  # pyright: ignore


def made(prepare: Any) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = Net().double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 3
    return prepare(model, {"x": x, "y": y}), x, y


def keep(model: nn.Module, _: object) -> nn.Module:
    return model


def check_one_rank() -> None:
    """What only one rank reads is an error on all; of a step's stage, on a rank that has begun one."""
    model, x, y = made(on_stages)
    model(x=x, y=y).backward()

    def call() -> None:
        if dist.get_rank() == 0:
            model.head.weight.sum().item()
        model(x=x, y=y)

    with pytest.raises((RankError, PipelineError), match="reading a parameter or gradient"):
        call()


LOOPS = (lbfgs, normalized, stacked, lamb, flagged, centered, unfrozen)


def test_parts_of_a_model() -> None:
    _, expected = train(keep)
    of_loops = [train_model(keep) for train_model in LOOPS]
    launch(2, partial(check_parts, expected), check_writes, partial(check_optimizers, of_loops), check_one_rank)
