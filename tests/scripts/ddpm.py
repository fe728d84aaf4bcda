"""Denoising diffusion with a small U-Net: time embedding, EMA of weights, ancestral sampling from the average."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PLANS = {2: (("tensor=2",),)}

STEPS = 6


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        half_dim = self.dim // 2
        emb = math.log(10000) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, device=x.device, dtype=torch.float64) * -emb)
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, dim: int, dim_out: int, time_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out * 2))
        self.proj1, self.proj2 = nn.Conv2d(dim, dim_out, 3, padding=1), nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, dim_out), nn.GroupNorm(2, dim_out)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, time_emb: Tensor) -> Tensor:
        scale, shift = self.mlp(time_emb)[:, :, None, None].chunk(2, dim=1)
        h = functional.silu(self.norm1(self.proj1(x)) * (scale + 1) + shift)
        h = functional.silu(self.norm2(self.proj2(h)))
        return h + self.res_conv(x)


class Unet(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )
        self.init_conv = nn.Conv2d(1, dim, 3, padding=1)
        self.down1, self.down2 = ResnetBlock(dim, dim, dim), ResnetBlock(dim, 2 * dim, dim)
        self.downsample = nn.Conv2d(dim, dim, 4, 2, 1)
        self.mid = ResnetBlock(2 * dim, 2 * dim, dim)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.up = ResnetBlock(3 * dim, dim, dim)
        self.final_conv = nn.Conv2d(dim, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        t = self.time_mlp(time)
        h = self.down1(self.init_conv(x), t)
        x = self.mid(self.down2(self.downsample(h), t), t)
        return self.final_conv(self.up(torch.cat((self.upsample(x), h), dim=1), t))


class GaussianDiffusion(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        betas = torch.linspace(1e-2, 0.3, STEPS, dtype=torch.float64)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_cumprod", alphas_cumprod)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1.0 - alphas_cumprod).sqrt())

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        def extract(a: Tensor) -> Tensor:
            return a.gather(-1, t).reshape(-1, 1, 1, 1)

        return extract(self.sqrt_alphas_cumprod) * x_start + extract(self.sqrt_one_minus_alphas_cumprod) * noise

    @torch.no_grad()
    def sample(self, shape: tuple[int, ...]) -> Tensor:
        img = torch.randn(shape, dtype=torch.float64)
        for i in reversed(range(STEPS)):
            t = torch.full((shape[0],), i, dtype=torch.long)
            pred_noise = self.model(img, t)
            beta, alpha_bar = self.betas[i], self.alphas_cumprod[i]
            img = (img - beta / (1 - alpha_bar).sqrt() * pred_noise) / (1 - beta).sqrt()
            if i > 0:
                img = img + beta.sqrt() * torch.randn_like(img)
        return img

    def forward(self, img: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        return functional.mse_loss(self.model(self.q_sample(img, t, noise), t), noise)


class EMA:
    def __init__(self, model: nn.Module, beta: float = 0.9) -> None:
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.beta = beta

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for ema_p, p in zip(self.ema_model.parameters(), model.parameters(), strict=True):
            ema_p.data.mul_(self.beta).add_(p.data, alpha=1 - self.beta)


def whole(model: Any) -> dict[str, Tensor]:
    return model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    data = torch.randn(18, 1, 8, 8, dtype=torch.float64)
    model = prepare(GaussianDiffusion(Unet().double()), (data[:8], torch.zeros(8, dtype=torch.long), data[:8]))
    ema = EMA(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        for batch in data.split(8):
            t = torch.randint(0, STEPS, (batch.shape[0],)).long()
            loss = model(batch, t, torch.randn_like(batch))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ema.update(model)
            found["losses"].append(loss.item())
        model.eval()
        found["losses"] += ema.ema_model.sample((3, 1, 8, 8))[:, 0, 3, 3].tolist()
    state = {f"{i}.{name}": x.clone() for i, m in enumerate((model, ema.ema_model)) for name, x in whole(m).items()}
    if master:
        torch.save(state, folder / "model.pt")
    return found | {"state": state}
