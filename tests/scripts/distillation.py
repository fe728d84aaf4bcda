"""Knowledge distillation: a frozen teacher beside the model in the loop, a weighted sum of losses, SWA at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

PLANS = {2: (("data=2",),)}


def conv_bn(inp: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inp, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU6(inplace=True))


class Net(nn.Module):
    def __init__(self, width: int, num_classes: int = 5) -> None:
        super().__init__()
        self.features = nn.Sequential(conv_bn(3, width, 1), conv_bn(width, 2 * width, 2), conv_bn(2 * width, 16, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.flatten(self.avgpool(self.features(x)), 1)
        return self.classifier(features), features


def train_teacher(teacher: nn.Module, loader: Any) -> None:
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    for inputs, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(teacher(inputs)[0], labels).backward()
        optimizer.step()


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(42)
    dataset = TensorDataset(torch.randn(22, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (22,)))
    train_loader = DataLoader(dataset, batch_size=8, shuffle=True)
    teacher, student = Net(8).double(), Net(4).double()
    train_teacher(teacher, train_loader)
    student = prepare(student, (dataset[:8][0],))
    temperature, soft_weight, cosine_weight = 2.0, 0.25, 0.1
    ce_loss, cosine_loss = nn.CrossEntropyLoss(label_smoothing=0.1), nn.CosineEmbeddingLoss()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    swa_model, swa_scheduler = AveragedModel(student), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    teacher.eval()
    student.train()
    found: dict[str, Any] = {"losses": []}
    for epoch in range(3):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits, teacher_features = teacher(inputs)
            student_logits, student_features = student(inputs)
            soft_targets = functional.softmax(teacher_logits / temperature, dim=-1)
            soft_prob = functional.log_softmax(student_logits / temperature, dim=-1)
            soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size(0) * temperature**2
            hidden_loss = cosine_loss(student_features, teacher_features, target=torch.ones(inputs.size(0)))
            label_loss = ce_loss(student_logits, labels)
            loss = soft_weight * soft_loss + (1 - soft_weight) * label_loss + cosine_weight * hidden_loss
            loss.backward()
            optimizer.step()
            found["losses"].append(loss.item())
        if epoch >= 1:
            swa_model.update_parameters(student)
            swa_scheduler.step()
    update_bn(train_loader, swa_model)
    for model in (student, swa_model):
        model.eval()
        correct = 0
        with torch.no_grad():
            for inputs, labels in DataLoader(dataset, batch_size=10):
                outputs, _ = model(inputs)
                correct += (outputs.max(1)[1] == labels).sum().item()
        found["losses"].append(100 * correct / 22)
    models = (student, swa_model.module)
    states = [m.full_state_dict() if hasattr(m, "full_state_dict") else m.state_dict() for m in models]
    if master:
        torch.save(states[1], folder / "swa.pt")
    return found | {"state": {f"{i}.{name}": x.clone() for i, state in enumerate(states) for name, x in state.items()}}
