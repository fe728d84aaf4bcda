"""In the style of diffusers' train_unconditional.py: noise of random strength, an EMA, images sampled from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch.utils.data import DataLoader

REQUIRES = ("diffusers",)
PLANS = {2: (("data=2",),)}


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    import diffusers
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8,
    ).double()  # fmt: skip
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=20, beta_schedule="linear")
    images = torch.rand(10, 3, 8, 8, dtype=torch.float64) * 2 - 1
    train_loader: Any = DataLoader(images, batch_size=4, shuffle=True)  # type: ignore
    example = {"sample": images[:4], "timestep": torch.randint(0, 20, (4,))}
    model = prepare(model, example)
    ema_model = EMAModel(
        model.parameters(), decay=0.99, use_ema_warmup=True, model_cls=diffusers.UNet2DModel, model_config=model.config
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6)
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=6)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        for clean_images in train_loader:
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(0, 20, (clean_images.shape[0],))
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            model_output = model(noisy_images, timesteps).sample
            loss = functional.mse_loss(model_output, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ema_model.step(model.parameters())
            found["losses"].append(loss.detach().item())
        ema_model.store(model.parameters())
        ema_model.copy_to(model.parameters())
        model.eval()
        pipeline = diffusers.DDPMPipeline(unet=model, scheduler=noise_scheduler)
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        made = pipeline(generator=generator, batch_size=3, num_inference_steps=3, output_type="np").images
        found["losses"].append(float(made.sum()))
        ema_model.restore(model.parameters())
    model.save_pretrained(folder / "unet")
    again = diffusers.UNet2DModel.from_pretrained(folder / "unet", torch_dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
