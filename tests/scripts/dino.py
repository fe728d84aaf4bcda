"""In the style of DINO: two networks, crops of two sizes, a teacher that follows the student, a moving center."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

PLANS = {2: (("tensor=2",),)}
OUT = 12


class VisionTransformer(nn.Module):
    def __init__(self, size: int = 8, patch: int = 2, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.grid = size // patch
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, self.grid**2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def interpolate_pos_encoding(self, n: int) -> Tensor:
        if n == self.grid**2:
            return self.pos_embed
        side = int(math.sqrt(n))
        patch_pos = self.pos_embed[:, 1:].reshape(1, self.grid, self.grid, -1).permute(0, 3, 1, 2)
        patch_pos = functional.interpolate(patch_pos, size=(side, side), mode="bilinear", align_corners=False)
        return torch.cat((self.pos_embed[:, :1], patch_pos.permute(0, 2, 3, 1).flatten(1, 2)), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.interpolate_pos_encoding(x.shape[1])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class DINOHead(nn.Module):
    def __init__(self, width: int = 16, bottleneck: int = 8) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, bottleneck))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck, OUT, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(functional.normalize(self.mlp(x), dim=-1, p=2))


class MultiCropWrapper(nn.Module):
    """Crops of one size go through the backbone together, and all through the head."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: list[Tensor]) -> Tensor:
        sizes = torch.tensor([inp.shape[-1] for inp in x])
        idx_crops = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start_idx, output = 0, []
        for end_idx in idx_crops.tolist():
            output.append(self.backbone(torch.cat(x[start_idx:end_idx])))
            start_idx = end_idx
        return self.head(torch.cat(output))


class DINOLoss(nn.Module):
    def __init__(self, ncrops: int, student_temp: float = 0.1, center_momentum: float = 0.9) -> None:
        super().__init__()
        self.student_temp, self.center_momentum, self.ncrops = student_temp, center_momentum, ncrops
        self.register_buffer("center", torch.zeros(1, OUT))

    def forward(self, student_output: Tensor, teacher_output: Tensor, teacher_temp: float) -> Tensor:
        student_out = (student_output / self.student_temp).chunk(self.ncrops)
        teacher_out = functional.softmax((teacher_output - self.center) / teacher_temp, dim=-1).detach().chunk(2)
        total_loss, n_loss_terms = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v != iq:
                    loss = torch.sum(-q * functional.log_softmax(student_out[v], dim=-1), dim=-1)
                    total_loss += loss.mean()
                    n_loss_terms += 1
        self.update_center(teacher_output)
        return total_loss / n_loss_terms

    @torch.no_grad()
    def update_center(self, teacher_output: Tensor) -> None:
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


def cancel_gradients_last_layer(epoch: int, model: Any, freeze_last_layer: int) -> None:
    if epoch >= freeze_last_layer:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def clip_gradients(model: Any, clip: float) -> list[float]:
    norms = []
    for _, p in model.named_parameters():
        if p.grad is not None:
            param_norm = p.grad.data.norm(2)
            norms.append(param_norm.item())
            clip_coef = clip / (param_norm + 1e-6)
            if clip_coef < 1:
                p.grad.data.mul_(clip_coef)
    return norms


def get_params_groups(model: Any) -> list[dict[str, Any]]:
    regularized, not_regularized = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            (not_regularized if name.endswith(".bias") or len(param.shape) == 1 else regularized).append(param)
    return [{"params": regularized}, {"params": not_regularized, "weight_decay": 0.0}]


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    student = MultiCropWrapper(VisionTransformer(), DINOHead()).double()
    teacher = copy.deepcopy(student)
    loader = [
        [*torch.randn(2, n, 3, 8, 8, dtype=torch.float64), *torch.randn(2, n, 3, 4, 4, dtype=torch.float64)]
        for n in (4, 4, 4)
    ]
    student, teacher = prepare(student, (loader[0],)), prepare(teacher, (loader[0][:2],))
    for p in teacher.parameters():
        p.requires_grad = False
    dino_loss = DINOLoss(4).double()
    optimizer = torch.optim.AdamW(get_params_groups(student), lr=5e-3, eps=1e-5)
    wd_schedule = np.linspace(0.04, 0.4, 9)
    momentum_schedule = np.linspace(0.9, 1.0, 9)
    found: dict[str, Any] = {"losses": []}
    it = 0
    for epoch in range(3):
        for images in loader:
            for i, param_group in enumerate(optimizer.param_groups):
                if i == 0:
                    param_group["weight_decay"] = wd_schedule[it]
            teacher_output = teacher(images[:2])
            student_output = student(images)
            loss = dino_loss(student_output, teacher_output, 0.07)
            optimizer.zero_grad()
            loss.backward()
            found["losses"] += [loss.item(), *clip_gradients(student, 0.3)]
            cancel_gradients_last_layer(epoch, student, 1)
            optimizer.step()
            with torch.no_grad():
                m = momentum_schedule[it]
                for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
                    param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
            it += 1
    teacher.eval()
    with torch.no_grad():
        features = teacher.backbone(torch.randn(3, 3, 8, 8, dtype=torch.float64))
        found["losses"] += [float(x) for x in features.flatten()[:4]]
    found["state"] = {}
    for name, model in (("student", student), ("teacher", teacher)):
        state = model.full_state_dict() if hasattr(model, "plan") else model.state_dict()
        found["state"] |= {f"{name}.{key}": x for key, x in state.items()}
    return found
