"""Train a generator against a discriminator: two models, two optimizers, two plans.

    torchrun --standalone --nproc-per-node 2 examples/train_gan.py
    python examples/train_gan.py        # one process, without autopar: the same losses

The generator learns to draw points on a circle.  The loss that is printed is the discriminator's.
"""

import torch
import torch.distributed as dist
from devices import make_mesh
from torch import nn
from train_text import read_arguments

import autopar

NOISE = 8


def make_batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on the circle ``[rows, 2]``, and noise ``[rows, NOISE]``."""
    random = torch.Generator().manual_seed(step)
    angles = torch.rand(rows, 1, generator=random) * 2 * torch.pi
    return torch.cat([angles.cos(), angles.sin()], 1), torch.randn(rows, NOISE, generator=random)


def make_model(inputs: int, outputs: int) -> nn.Module:
    """``[rows, inputs]`` -> ``[rows, outputs]``."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


arguments = read_arguments(__doc__, batch_size=64)
torch.manual_seed(0)
generator, discriminator = make_model(NOISE, 2), make_model(2, 1)
is_first = True
if dist.is_torchelastic_launched():
    mesh = make_mesh()
    points, noise = make_batch(0, arguments.batch_size)
    generator = autopar.parallelize(generator, mesh, (noise,), constraints=arguments.constraints)  # the changed lines
    discriminator = autopar.parallelize(discriminator, mesh, (points,), constraints=arguments.constraints)
    is_first = dist.get_rank() == 0

judges = torch.optim.SGD(discriminator.parameters(), lr=0.3)
draws = torch.optim.SGD(generator.parameters(), lr=0.1)
says = nn.BCEWithLogitsLoss()
for step in range(arguments.steps):
    points, noise = make_batch(step, arguments.batch_size)
    fake = generator(noise)
    real, drawn = torch.ones(len(fake), 1, device=fake.device), torch.zeros(len(fake), 1, device=fake.device)
    loss = says(discriminator(points), real) + says(discriminator(fake.detach()), drawn)
    loss.backward()
    judges.step()
    judges.zero_grad()
    says(discriminator(fake), real).backward()
    draws.step()
    draws.zero_grad()
    judges.zero_grad()  # the generator's loss reached the discriminator too
    if is_first:
        print(f"step {step:3}  loss {loss.item():.6f}", flush=True)

if dist.is_initialized():
    dist.destroy_process_group()
