"""Kernels that exchange halos, between processes; on simulated ranks `tests/ops/test_every_rule.py` runs them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.lower.communication.collectives import Collective
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.shards import Shards
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.kernels import KERNELS
from autopar.placement import Axis
from tests.ranks import run_ranks

AXES = (Axis(2, 1),)


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(1, 2, 8, 6, dtype=torch.float64), torch.randn(3, 2, 5, 3, dtype=torch.float64)


def on_gloo() -> Any:
    communicator = ProcessGroupCommunicator()
    shards = Shards(communicator, AXES)
    image, weight = operands()
    leaves = [image.chunk(2, 2)[shards.index].requires_grad_(), weight.requires_grad_()]
    with communicator.recording() as sent:
        out = KERNELS["halo_convolution2"](shards, *leaves, None, [1, 1], [2, 1])
        normed = KERNELS["space_group_norm"](shards, out, 3)
        found = torch.autograd.grad(normed.square().sum() + out.sin().sum(), leaves)
    return out.detach(), normed.detach(), *found, sent


@pytest.mark.slow
def test_processes() -> None:
    image, weight = (x.requires_grad_() for x in operands())
    out = functional.conv2d(image, weight, None, 1, (2, 1))
    normed = functional.group_norm(out, 3)
    gradients = torch.autograd.grad(normed.square().sum() + out.sin().sum(), (image, weight))
    *found, sent = zip(*run_ranks(on_gloo, 2), strict=True)
    joined = [*(torch.cat(parts, 2) for parts in found[:3]), torch.stack(found[3]).sum(0)]
    for one, other in zip(joined, (out, normed, *gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    halo, sums = image[:, :, :2].nbytes, 3 * 8
    sends = [Collective("send", AXES[0], halo)] * 2
    sum_of = [Collective("all_reduce", AXES[0], size) for size in (sums, sums, 2 * sums)]
    assert all(each == [*sends, *sum_of, *sends] for each in sent)


def test_a_halo_comes_from_neighbors_alone() -> None:
    image, weight = operands()
    with pytest.raises(ValueError, match="slices of 1 rows can't run a kernel of 5 rows"):
        simulate(
            2, lambda c: KERNELS["halo_convolution2"](Shards(c, AXES), image[:, :, :1], weight, None, [1, 1], [2, 1])
        )


@pytest.mark.parametrize("shift", [2, -1])
def test_neighbors_on_several_axes(shift: int) -> None:
    """Slices of 2 x 3 x 2 devices are rolled, as all of them are next to each other in a ring."""
    axes = (Axis(2, 6), Axis(3, 2), Axis(2, 1))
    x = torch.randn(2, 24, 3, dtype=torch.float64)
    slices = simulate(
        12, lambda c: KERNELS["halo_roll1"](Shards(c, axes), x.chunk(12, 1)[Shards(c, axes).index], shift, 1)
    )
    torch.testing.assert_close(torch.cat(slices, 1), x.roll(shift, 1), rtol=0, atol=0)
