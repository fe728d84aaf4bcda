"""In the style of timm's train.py: EMA, accuracy on outputs of training, a smaller last batch, validation of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PLANS = {2: (("data=2",), ("pipeline=2", "microbatches=1"))}


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        return self.act(x + self.bn2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self, num_classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv_stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(2)))
        self.fc = nn.Linear(width, num_classes)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def get_classifier(self) -> nn.Module:
        return self.fc

    def no_weight_decay(self) -> set[str]:
        return {"fc.bias"}

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.fc(self.blocks(self.conv_stem(x)).mean((2, 3)))
        return self.loss(logits, target), logits


class ModelEmaV3(nn.Module):
    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for a, b in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if a.is_floating_point():
                a.lerp_(b, weight=1 - self.decay)
            else:
                a.copy_(b)


def param_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    skipped = model.no_weight_decay()
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0}, {"params": [], "weight_decay": weight_decay}]
    norms = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d))
    for name, p in model.named_parameters():
        groups[name not in skipped and not name.startswith(norms)]["params"].append(p)
    return groups


@torch.no_grad()
def validate(model: Any, loader: DataLoader[Any]) -> tuple[float, float]:
    model.eval()
    losses, correct, count = 0.0, 0, 0
    for x, target in loader:
        loss, logits = model(x, target)
        losses += loss.item() * len(x)
        correct += int((logits.argmax(dim=-1) == target).sum())
        count += len(x)
    return losses / count, correct / count


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(22, 3, 6, 6, dtype=torch.float64), torch.randint(0, 4, (22,)))
    train_loader: DataLoader[Any] = DataLoader(dataset, batch_size=8, shuffle=True)
    eval_loader: DataLoader[Any] = DataLoader(dataset, batch_size=10)
    model = prepare(ResNet().double(), (dataset[:8][0], dataset[:8][1]))
    assert isinstance(model, ResNet)
    assert isinstance(model.get_classifier(), nn.Linear)
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = torch.optim.SGD(param_groups(model, 1e-2), lr=0.05, momentum=0.9, nesterov=True)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        for x, target in train_loader:
            optimizer.zero_grad()
            loss, logits = model(x, target)
            loss.backward()
            optimizer.step()
            ema.update(model)
            accuracy = (logits.argmax(-1) == target).double().mean()
            found["losses"] += [loss.item(), accuracy.item()]
        found["losses"] += [*validate(model, eval_loader), *validate(ema.module, eval_loader)]
    average: Any = ema.module
    states = [m.full_state_dict() if hasattr(m, "full_state_dict") else m.state_dict() for m in (model, average)]
    if master:
        torch.save({"state_dict": states[0], "state_dict_ema": states[1]}, folder / "last.pth.tar")
    found["state"] = {f"{i}.{name}": value.clone() for i, state in enumerate(states) for name, value in state.items()}
    return found
