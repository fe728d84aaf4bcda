"""What groups of unlike size are predicted to gain where lengths differ much: of video clips, and of text with images.

    python benchmarks/unlike_groups.py [--cases clips captions] [--json]

Estimated prices of 8 H100s, bf16.  Each case is planned for a distribution of lengths; printed are the expected step
with one plan for all devices in every step, with the plans that are found, and the CPU seconds of planning.

clips: a diffusion transformer of 12 blocks and 1,152 features, whose clips share rows; 8 rows of 32,768 tokens.
captions: a LLaVA of 8 layers of 2,048 features and 12 layers of 1,024 in its encoder, on 8 rows of 32,768 tokens with
    160 images of 576 places each; lengths are lognormal.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import autopar
from autopar.balance import Clip, Lengths

ROWS, TOKENS = 8, 32768
WIDTH, HEADS, BLOCKS, PIXELS = 1152, 16, 12, 96
# Clips of 256, 1,024, 4,096, 16,384 and 32,768 tokens.
MIX = {
    Clip(1, 256, 256): 40, Clip(1, 512, 512): 20, Clip(4, 512, 512): 6, Clip(16, 512, 512): 3, Clip(32, 512, 512): 1,
}  # fmt: skip
CAPTIONS = Lengths.lognormal(mean=4200, sigma=1.2, least=600, most=TOKENS)
IMAGES, IMAGE_ID = 160, 31999


class Block(nn.Module):
    """Attention within clips, and a feed-forward, both shifted, scaled and gated by the noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, level: Tensor, mask: Tensor) -> Tensor:
        """``[rows, tokens, width]`` twice, and who sees whom -> ``[rows, tokens, width]``."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(level).chunk(6, dim=-1)
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in self.qkv(y).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + gate * self.out(attended.transpose(1, 2).flatten(2))
        return x + gate2 * self.down(functional.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))


class ClipTransformer(nn.Module):
    """The mean squared error over tokens that count, of clips that share rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.level, self.head = nn.Linear(PIXELS, WIDTH), nn.Linear(1, WIDTH), nn.Linear(WIDTH, PIXELS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, clip: Tensor, noise: Tensor, level: Tensor, counts: Tensor, position_ids: Tensor) -> Tensor:
        """``[rows, tokens, ...]`` of each -> the loss."""
        number = (position_ids == 0).cumsum(1)
        mask = (number[:, :, None] == number[:, None, :])[:, None]
        x, condition = self.patches(torch.lerp(clip, noise, level)), functional.silu(self.level(level))
        for block in self.blocks:
            x = block(x, condition, mask)
        error = (self.head(x) - (noise - clip)).square().mean(-1)
        return (error * counts).sum() / counts.sum()


def clips() -> tuple[nn.Module, dict[str, Tensor], Any]:
    """The model, a batch, and lengths."""
    sizes = {"clip": (PIXELS,), "noise": (PIXELS,), "level": (1,), "counts": ()}
    example = {name: torch.zeros(ROWS, TOKENS, *size, dtype=torch.bfloat16) for name, size in sizes.items()}
    return ClipTransformer(), example | {"position_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64)}, MIX


def captions() -> tuple[nn.Module, dict[str, Tensor], Any]:
    """The model, a batch, and lengths."""
    text = LlamaConfig(hidden_size=2048, intermediate_size=5504, num_hidden_layers=8, num_attention_heads=16,
                       vocab_size=32000, max_position_embeddings=TOKENS, use_cache=False)  # fmt: skip
    vision = CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16,
                              image_size=336, patch_size=14)  # fmt: skip
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_ID))
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    pixels = torch.zeros(IMAGES, 3, 336, 336, dtype=torch.bfloat16)
    return model, {"input_ids": ids, "labels": ids, "position_ids": ids, "pixel_values": pixels}, CAPTIONS


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor], Any]]] = {"clips": clips, "captions": captions}


def measure(name: str) -> dict[str, float | str]:
    """What is predicted for a case."""
    with torch.device("meta"):
        model, example, lengths = CASES[name]()
    started_s = time.process_time()
    plan = autopar.plan(
        model.to(torch.bfloat16), autopar.Cluster.of("h100", devices_per_node=8), example, lengths=lengths,
        compile=False,
    )  # fmt: skip
    found = plan.prediction.lengths
    return {
        "sequences of a step": found.sequences, "ms with one plan": 1e3 * found.static_s,
        "ms with all that are found": 1e3 * found.step_time_s, "gain": found.static_s / found.step_time_s,
        "its standard error": found.standard_error_s / found.step_time_s, "steps with groups": found.group_share,
        "groups": ", ".join(f"{row.tokens} on {row.degree}" for row in found.groups),
        "CPU s of planning": time.process_time() - started_s,
    }  # fmt: skip


def main() -> None:
    """Print each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results = {name: measure(name) for name in given.cases}
    if given.json:
        print(json.dumps(results, indent=1))
        return
    for name, found in results.items():
        print(name)
        for what, number in found.items():
            print(f"  {what:30} {number if isinstance(number, str) else format(number, '10.3f')}")


if __name__ == "__main__":
    main()
