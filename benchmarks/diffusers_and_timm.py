"""Which models of diffusers and timm train as on one device: small, with random weights.

    pip install --no-deps diffusers timm torchvision
    python benchmarks/diffusers_and_timm.py [--only NAME ...] [--plans free tensor=2 ...]

Each network of diffusers has a small configuration here, and a mean square as its loss; of each file of timm's models
the smallest below ``--most-parameters`` is taken, with a cross entropy.  Each is planned for two H100s, and the plan is
verified (`autopar.verify`: float64, two simulated ranks, two optimizer steps).  Parameters that begin at zero get
random values, so that what they multiply counts.

The torchvision of the package registries needs the CUDA build of torch; its ops are declared here, and not used.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, ConstraintError

ROWS, STEPS = 4, 2
TIMES, UNIFORM, MASK = "times", "uniform", "mask"  # inputs that are no normal random numbers
DOWN, UP = "DownEncoderBlock2D", "UpDecoderBlock2D"
UNET = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32, "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
}  # fmt: skip
UNET_UP = {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}
DIT = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
FLUX = {
    "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 32,
}  # fmt: skip

# Class -> configuration, and inputs: a shape of normal random numbers, (kind, *shape), a tensor or another argument.
NETWORKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DConditionModel": (
        {"sample_size": 16, **UNET, **UNET_UP},
        {"sample": (ROWS, 4, 16, 16), "timestep": (TIMES, ROWS), "encoder_hidden_states": (ROWS, 7, 32)},
    ),
    "ControlNetModel": (
        {**UNET, "attention_head_dim": 4, "conditioning_embedding_out_channels": (16, 32)},
        {"sample": (ROWS, 4, 16, 16), "timestep": (TIMES, ROWS), "encoder_hidden_states": (ROWS, 7, 32),
         "controlnet_cond": (ROWS, 3, 32, 32)},
    ),
    "PixArtTransformer2DModel": (
        {**DIT, "in_channels": 4, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 16,
         "use_additional_conditions": False},
        {"hidden_states": (ROWS, 4, 8, 8), "timestep": (TIMES, ROWS), "encoder_hidden_states": (ROWS, 7, 16),
         "encoder_attention_mask": (MASK, ROWS, 7), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SD3Transformer2DModel": (
        {**DIT, "sample_size": 8, "patch_size": 1, "in_channels": 4, "joint_attention_dim": 32, "out_channels": 4,
         "caption_projection_dim": 32, "pooled_projection_dim": 64, "qk_norm": "rms_norm"},
        {"hidden_states": (ROWS, 4, 8, 8), "encoder_hidden_states": (ROWS, 7, 32), "pooled_projections": (ROWS, 64),
         "timestep": (TIMES, ROWS)},
    ),
    "FluxTransformer2DModel": (
        {**FLUX, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8], "guidance_embeds": True},
        {"hidden_states": (ROWS, 16, 4), "encoder_hidden_states": (ROWS, 8, 32), "pooled_projections": (ROWS, 32),
         "timestep": (UNIFORM, ROWS), "img_ids": (16, 3), "txt_ids": (8, 3), "guidance": (UNIFORM, ROWS)},
    ),
    "Flux2Transformer2DModel": (
        {**FLUX, "axes_dims_rope": [4, 4, 4, 4]},
        {"hidden_states": (ROWS, 16, 4), "encoder_hidden_states": (ROWS, 8, 32), "timestep": (UNIFORM, ROWS),
         "img_ids": (16, 4), "txt_ids": (8, 4), "guidance": (UNIFORM, ROWS)},
    ),
    "SanaTransformer2DModel": (
        {**DIT, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8,
         "cross_attention_dim": 32, "caption_channels": 16, "sample_size": 8},
        {"hidden_states": (ROWS, 4, 8, 8), "encoder_hidden_states": (ROWS, 7, 16), "timestep": (TIMES, ROWS),
         "encoder_attention_mask": (MASK, ROWS, 7)},
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
         "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 16,
         "out_channels": 4, "pos_embed_max_size": 64},
        {"hidden_states": (ROWS, 4, 8, 8), "encoder_hidden_states": (ROWS, 7, 16), "timestep": (UNIFORM, ROWS)},
    ),
    "QwenImageTransformer2DModel": (
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)},
        {"hidden_states": (ROWS, 16, 16), "encoder_hidden_states": (ROWS, 7, 16), "timestep": (UNIFORM, ROWS),
         "encoder_hidden_states_mask": torch.ones(ROWS, 7, dtype=torch.bool), "img_shapes": [[(1, 4, 4)]] * ROWS},
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
         "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2),
         "axes_lens": (64, 64, 64), "cap_feat_dim": 16},
        {"hidden_states": (ROWS, 4, 8, 8), "timestep": (UNIFORM, ROWS), "encoder_hidden_states": (ROWS, 7, 16),
         "encoder_attention_mask": (MASK, ROWS, 7)},
    ),
    "HunyuanVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "text_embed_dim": 16,
         "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
        {"hidden_states": (ROWS, 4, 2, 6, 6), "timestep": (TIMES, ROWS), "encoder_hidden_states": (ROWS, 7, 16),
         "encoder_attention_mask": (MASK, ROWS, 7), "pooled_projections": (ROWS, 8), "guidance": (UNIFORM, ROWS)},
    ),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
         "freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32},
        {"hidden_states": (ROWS, 4, 2, 8, 8), "timestep": (TIMES, ROWS), "encoder_hidden_states": (ROWS, 7, 16)},
    ),
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "text_embed_dim": 16,
         "num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 7,
         "time_embed_dim": 8},
        {"hidden_states": (ROWS, 2, 4, 8, 8), "encoder_hidden_states": (ROWS, 7, 16), "timestep": (TIMES, ROWS)},
    ),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
         "cross_attention_dim": 16, "num_layers": 2, "caption_channels": 16},
        {"hidden_states": (ROWS, 32, 4), "encoder_hidden_states": (ROWS, 7, 16), "timestep": (TIMES, ROWS),
         "encoder_attention_mask": (MASK, ROWS, 7), "num_frames": 2, "height": 4, "width": 4},
    ),
    "CosmosTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2,
         "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (4, 16, 16), "concat_padding_mask": False},
        {"hidden_states": (ROWS, 4, 2, 8, 8), "timestep": (UNIFORM, ROWS), "encoder_hidden_states": (ROWS, 7, 16),
         "attention_mask": torch.ones(ROWS, 7), "fps": 30},
    ),
    "MochiTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "pooled_projection_dim": 16,
         "in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 16},
        {"hidden_states": (ROWS, 4, 2, 8, 8), "encoder_hidden_states": (ROWS, 7, 16), "timestep": (TIMES, ROWS),
         "encoder_attention_mask": (MASK, ROWS, 7)},
    ),
    "HiDreamImageTransformer2DModel": (
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
         "attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": [32, 16], "text_emb_dim": 64,
         "axes_dims_rope": (4, 2, 2), "max_resolution": (32, 32), "llama_layers": (0, 1)},
        {"hidden_states": (ROWS, 4, 32, 32), "timesteps": (TIMES, ROWS), "encoder_hidden_states_t5": (ROWS, 8, 32),
         "encoder_hidden_states_llama3": (2, ROWS, 8, 16), "pooled_embeds": (ROWS, 64)},
    ),
    "PriorTransformer": (
        {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 2, "embedding_dim": 8, "num_embeddings": 7,
         "additional_embeddings": 4},
        {"hidden_states": (ROWS, 8), "timestep": (TIMES, ROWS), "proj_embedding": (ROWS, 8),
         "encoder_hidden_states": (ROWS, 7, 8)},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (16, 32), "down_block_types": (DOWN,) * 2, "up_block_types": (UP,) * 2,
         "norm_num_groups": 8},
        {"sample": (ROWS, 3, 16, 16)},
    ),
    "VQModel": (
        {"block_out_channels": (16, 32), "down_block_types": (DOWN,) * 2, "up_block_types": (UP,) * 2,
         "norm_num_groups": 8, "num_vq_embeddings": 16},
        {"sample": (ROWS, 3, 16, 16)},
    ),
    "AutoencoderKLWan": (
        {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        {"sample": (ROWS, 3, 5, 16, 16)},
    ),
}  # fmt: skip


TORCHVISION = torch.library.Library("torchvision", "DEF")  # as long as the process lives
for _op in ("nms", "qnms"):
    TORCHVISION.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Squared(nn.Module):
    """The mean square of everything that a network of diffusers returns."""

    def __init__(self, network: nn.Module) -> None:
        """Around `network`."""
        super().__init__()
        self.network = network

    def forward(self, **inputs: Any) -> Tensor:
        """[] of what is the network's."""

        def tensors(x: Any) -> Iterator[Tensor]:
            if isinstance(x, Tensor):
                yield x
            elif isinstance(x, list | tuple):
                for part in x:
                    yield from tensors(part)

        squares = [x.square().mean() for x in tensors(self.network(**inputs, return_dict=False))]
        return torch.stack(squares).sum()


class Classified(nn.Module):
    """The cross entropy of a classifier."""

    def __init__(self, network: nn.Module) -> None:
        """Around `network`."""
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """[] of images [rows, 3, height, width] and labels [rows]."""
        return nn.functional.cross_entropy(self.network(images), labels)


def made_up(spec: Any) -> Any:
    """An input by its entry in `NETWORKS`."""
    if not isinstance(spec, tuple):
        return spec
    kind, shape = (spec[0], spec[1:]) if isinstance(spec[0], str) else ("", spec)
    if kind == TIMES:
        return torch.randint(1000, shape)
    if kind == MASK:
        mask = torch.ones(shape, dtype=torch.bool)
        mask[0, -2:] = False
        return mask
    return torch.rand(shape) if kind == UNIFORM else torch.randn(shape)


def of_diffusers() -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Name, model and inputs of each network of diffusers."""
    diffusers = importlib.import_module("diffusers")  # optional
    for name, (config, inputs) in NETWORKS.items():
        network = getattr(diffusers, name)(**config)
        yield name, Squared(network), {key: made_up(spec) for key, spec in inputs.items()}


def of_timm(most_parameters: float) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Name, model and inputs of the smallest network of each file of timm."""
    timm = importlib.import_module("timm")
    for file in timm.list_modules():
        sizes: dict[str, int] = {}
        for name in timm.list_models(module=file):
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
        name = min(sizes, key=sizes.__getitem__)
        if sizes[name] > most_parameters:
            continue
        network = timm.create_model(name, num_classes=16)
        settings = network.default_cfg
        pixels = settings["input_size"][1] if settings.get("fixed_input_size") else 128
        inputs = {"images": torch.randn(ROWS, 3, pixels, pixels), "labels": torch.randint(16, (ROWS,))}
        yield f"timm {name}", Classified(network), inputs


def outcome(model: nn.Module, inputs: dict[str, Any], constraints: list[str]) -> str:
    """``equal``, or the kind of error and its first line."""
    try:
        cluster = autopar.Cluster.of("h100", devices_per_node=2)
        plan = autopar.plan(model, cluster, inputs, constraints=constraints)
        autopar.verify(model, plan, inputs, steps=STEPS)
    except ConstraintError as error:
        return f"not exact with these constraints: {error}"
    except AutoparError as error:
        kind = "random" if "draws random numbers" in str(error) else type(error).__name__
        return f"{kind}: {error}"
    except Exception as error:  # noqa: BLE001  (a traceback of ours is what is looked for)
        return f"TRACEBACK {type(error).__name__}: {error}"
    return "equal"


def main() -> None:
    """Print a line for each model and plan, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument(
        "--plans", nargs="*", default=["free", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2"]
    )
    parser.add_argument("--most-parameters", type=float, default=12e6)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "diffusers", "timm")}
    print(f"# {' '.join(sys.argv)}: {versions}, {platform.machine()}")
    counts: Counter[str] = Counter()
    torch.manual_seed(0)
    for models in (of_diffusers(), of_timm(chosen.most_parameters)):
        for name, model, inputs in models:
            if chosen.only and not any(part in name for part in chosen.only):
                continue
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.numel() and parameter.abs().max() < 1e-3:
                        parameter.add_(0.05 * torch.randn_like(parameter))
            for plan in chosen.plans:
                began = time.perf_counter()
                text = outcome(model, inputs, [] if plan == "free" else plan.split())
                counts[text.split(":")[0]] += 1
                print(f"{name}, {plan}: {text[:300]} ({time.perf_counter() - began:.0f} s)", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
