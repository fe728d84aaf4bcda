"""Counts plans and images of zeros where batches have images of several sizes (`EncoderRows(grids=)`).

Each of 1,000 batches draws its number of images (Poisson) and their sizes, in proportions that are drawn once.

    python benchmarks/image_sizes.py
"""

from __future__ import annotations

import numpy as np
import torch

from autopar.data import EncoderRows
from autopar.data.image_grids import GridSharing

_STEPS = 1000


def drawn(num_sizes: int, images: int, ranks: int) -> tuple[int, float]:
    """The number of plans, and slots of images over images."""
    random = np.random.default_rng(0)
    chance = random.dirichlet(np.full(num_sizes, 2.0))
    sizes = [(1, 4, 4 * (n + 1)) for n in range(num_sizes)]
    forms = {"pixel_values": ((64, 3), torch.float32)}
    sharing = GridSharing(EncoderRows("pixel_values", grids="sizes"), forms, 0, ranks, ranks, sizes[0], merged=4)
    plans: set[tuple[tuple[int, ...], ...]] = set()
    slots = given = 0
    for _ in range(_STEPS):
        counts = random.multinomial(max(1, random.poisson(images)), chance)
        batch = [[size] for size, count in zip(sizes, counts, strict=True) for _ in range(count)]
        share = sharing.assign(batch, range(len(batch)))
        plans.add(share.grids)
        slots += ranks * len(share.grids)
        given += len(batch)
    return len(plans), slots / given


if __name__ == "__main__":
    print("sizes  images a batch  data ranks  plans in 1,000 steps  images computed over images given")
    for num_sizes in (1, 2, 3, 5, 8):
        for images, ranks in ((32, 4), (128, 8), (512, 16)):
            plans, over = drawn(num_sizes, images, ranks)
            print(f"{num_sizes:5}{images:16}{ranks:12}{plans:22}{over:34.2f}")
