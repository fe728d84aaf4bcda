"""Train a small diffusion transformer on video clips of many lengths and resolutions, and on images.

    torchrun --standalone --nproc-per-node 2 examples/train_video.py
    python examples/train_video.py      # one process, without autopar, each clip alone: the same losses

A clip is a sequence of patches.  Clips are packed into rows, where each attends to itself only, and shared out so that
all ranks have as much to compute.  The model learns the direction from noise to a clip (rectified flow).
"""

import argparse
import math
import random

import torch
import torch.distributed as dist
from devices import make_mesh
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autopar
from autopar.balance import Clip

PATCH = (2, 4, 4)  # frames, rows and columns of pixels of a token
MIX = {Clip(1, 32, 32, PATCH): 4, Clip(1, 48, 24, PATCH): 4, Clip(8, 32, 32, PATCH): 3, Clip(16, 48, 48, PATCH): 1}
WIDTH, HEADS, BLOCKS, PIXELS = 64, 4, 2, 3 * math.prod(PATCH)


class Block(nn.Module):
    """Attention within clips, and a feed-forward; both shifted, scaled and gated by the noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, level: Tensor, mask: Tensor) -> Tensor:
        """``[rows, tokens, width]``, twice, and who sees whom ``[rows, 1, tokens, tokens]``."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(level).chunk(6, dim=-1)
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in self.qkv(self.norm(x) * (1 + scale) + shift).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + gate * self.out(attended.transpose(1, 2).flatten(2))
        return x + gate2 * self.down(functional.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))


class VideoTransformer(nn.Module):
    """Predicts the direction from noise to clips, of which rows hold several."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places, self.level = nn.Linear(PIXELS, WIDTH), nn.Linear(12, WIDTH), nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, PIXELS)

    def forward(self, clip: Tensor, noise: Tensor, level: Tensor, place: Tensor, counts: Tensor,
                position_ids: Tensor) -> Tensor:  # fmt: skip
        """Patches ``[rows, tokens, pixels]`` -> the mean squared error, over tokens that count."""
        number = (position_ids == 0).cumsum(1)  # of a token's clip
        mask = (number[:, :, None] == number[:, None, :])[:, None]
        angles = (place[..., None] / torch.tensor([1.0, 8.0])).flatten(2)
        x = self.patches(torch.lerp(clip, noise, level)) + self.places(torch.cat([angles.sin(), angles.cos()], -1))
        condition = functional.silu(self.level(torch.cat([level, level.square()], -1)))
        for block in self.blocks:
            x = block(x, condition, mask)
        error = (self.head(x) - (noise - clip)).square().mean(-1)
        return (error * counts).sum() / counts.sum()


def make_clips(count: int) -> list[dict[str, Tensor]]:
    """Noise, in place of videos: what a data set gives for a clip, an entry for each of its tokens."""
    kinds = random.Random(0).choices(list(MIX), list(MIX.values()), k=count)
    found: list[dict[str, Tensor]] = []
    for number, kind in enumerate(kinds):
        generator = torch.Generator().manual_seed(number)
        size = max(kind.frames // PATCH[0], 1), kind.height // PATCH[1], kind.width // PATCH[2]
        clip, noise = torch.randn(2, kind.tokens, PIXELS, generator=generator)
        level = torch.rand(1, generator=generator).expand(kind.tokens, 1)
        place = torch.cartesian_prod(*(torch.arange(float(n)) for n in size))
        found.append({"clip": clip, "noise": noise, "level": level, "place": place, "counts": torch.ones(kind.tokens)})
    return found


def loss_of_each_alone(model: nn.Module, clips: list[dict[str, Tensor]]) -> Tensor:
    """The mean over all tokens."""
    sizes = [len(each["clip"]) for each in clips]
    losses = [
        model(**{name: x[None] for name, x in each.items()}, position_ids=torch.arange(size)[None])
        for size, each in zip(sizes, clips, strict=True)
    ]
    return sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=12, help="clips of a step")
arguments = parser.parse_args()

clips = make_clips(arguments.batch_size * arguments.steps)
lengths = [len(each["clip"]) for each in clips]
torch.manual_seed(0)
model = VideoTransformer()
loader = DataLoader(clips, batch_size=arguments.batch_size, collate_fn=list)
is_first, is_parallel = True, dist.is_torchelastic_launched()
if is_parallel:
    mesh = make_mesh()
    tokens = max(lengths)
    rows = max(mesh.size(), math.ceil(arguments.batch_size * sum(lengths) / len(lengths) / tokens))
    padding = dict.fromkeys(clips[0], 0)
    example = {name: torch.zeros(rows, tokens, *x.shape[1:]) for name, x in clips[0].items()}
    example["position_ids"] = torch.arange(tokens).repeat(rows, 1)
    model = autopar.parallelize(model, mesh, example, inputs="local", lengths=MIX)
    loader = autopar.balanced(loader, model, length_index=lengths, shifts=(), padding=padding)
    is_first = dist.get_rank() == 0
    if is_first:
        print(model.plan)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(loader):
    loss = model(**batch) if is_parallel else loss_of_each_alone(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first:
        shape = f"  {list(batch['clip'].shape)} on this rank" if is_parallel else ""
        print(f"step {step:3}  loss {loss.item():.6f}{shape}", flush=True)

if is_parallel:
    dist.destroy_process_group()
