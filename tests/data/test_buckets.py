"""Batches of clips of one shape, and batches of like work: every sample once an epoch, the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar.balance import BatchPlanner, Clip
from autopar.data import BucketSampler, nearest_bucket
from autopar.data.buckets import EvenSteps
from autopar.errors import LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from tests.balance.assignments import plan_of
from tests.data.sharded import FakeModel
from tests.data.test_balanced import LENGTHS, ROW, Documents, batches_of

IMAGE, CLIP, WIDE = Clip(1, 16, 16), Clip(5, 16, 16), Clip(5, 16, 32)
KINDS = [(IMAGE, CLIP, WIDE, IMAGE)[number % 4] for number in range(22)]
SIZES = {IMAGE: 5, CLIP: 3, WIDE: 2}


class Clips(Dataset[Tensor]):
    """Clip n has n in its pixels, ``[channels, frames, height, width]``."""

    def __len__(self) -> int:
        return len(KINDS)

    def __getitem__(self, index: int) -> Tensor:
        kind = KINDS[index]
        return torch.full((3, kind.frames, kind.height, kind.width), index)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_batch_has_one_bucket_and_each_sample_comes_once(seed: int | None) -> None:
    sampler = BucketSampler(KINDS, SIZES, seed=seed)
    epochs: list[list[list[int]]] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) == 3 + 2 + 3
        assert sorted(index for batch in batches for index in batch) == list(range(22))
        assert all(len({KINDS[index] for index in batch}) == 1 for batch in batches)
        assert all(len(batch) <= SIZES[KINDS[batch[0]]] for batch in batches)
        epochs.append(batches)
    assert (epochs[0] == epochs[1]) == (seed is None)
    full = BucketSampler(KINDS, SIZES.__getitem__, seed=seed, drop_last=True)
    assert [len(batch) == SIZES[KINDS[batch[0]]] for batch in full] == [True] * len(full)
    with pytest.raises(LoaderError, match=r"batch_size says 0 for Clip\(frames=5"):
        BucketSampler(KINDS, {IMAGE: 1})


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_have_rows_of_each_batch_of_a_bucket(world: int) -> None:
    def act(talk: Communicator) -> list[Tensor]:
        loader = DataLoader(Clips(), batch_sampler=BucketSampler(KINDS, SIZES))
        model: Any = FakeModel(talk)
        return list(autopar.shard_dataloader(loader, model))

    ranks = simulate(world, act)
    for shares, indices in zip(zip(*ranks, strict=True), BucketSampler(KINDS, SIZES), strict=True):
        assert len({share.shape[1:] for share in shares}) == 1
        assert torch.cat(shares)[:, 0, 0, 0, 0].tolist() == indices
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_clip_goes_to_the_most_frames_that_it_fills_and_the_nearest_shape() -> None:
    buckets = [Clip(1, 256, 256), Clip(17, 256, 256), Clip(17, 512, 512), Clip(17, 384, 640)]
    assert nearest_bucket(Clip(40, 1080, 1080), buckets) == Clip(17, 512, 512)
    assert nearest_bucket(Clip(40, 200, 210), buckets) == Clip(17, 256, 256)
    assert nearest_bucket(Clip(17, 720, 1280), buckets) == Clip(17, 384, 640)
    assert nearest_bucket(Clip(16, 720, 1280), buckets) == Clip(1, 256, 256)
    with pytest.raises(LoaderError, match="16 frames or fewer"):
        nearest_bucket(Clip(16, 64, 64), buckets[1:])


def test_steps_that_share_samples_have_like_work_and_lose_none() -> None:
    lengths = np.array(LENGTHS)
    base = [list(range(start, min(start + 4, 23))) for start in range(0, 23, 4)]
    planner = BatchPlanner(plan_of(ROW))
    even = EvenSteps(base, lengths, planner, 2)
    steps = list(even)
    assert len(steps) == len(even) == 6
    assert sorted(index for step in steps for index in step) == list(range(23))
    for number in range(0, 6, 2):
        assert sorted(steps[number] + steps[number + 1]) == sorted(base[number] + base[number + 1])

    def waits(batches: list[list[int]]) -> float:
        return sum(planner.assign(lengths[batch]).step_time_s for batch in batches)

    assert waits(steps) <= waits(base)
    assert list(EvenSteps([[0], [1]], np.array([16, 1]), BatchPlanner(plan_of(ROW)), 3)) == [[0], [1]]


@pytest.mark.parametrize("world", [1, 2])
def test_balanced_across_steps_has_every_sample_once(world: int) -> None:
    parts = batches_of(
        world, lambda _: DataLoader(Documents(LENGTHS), batch_size=6), length_index=LENGTHS, across_steps=2
    )
    found = torch.cat([batch["input_ids"].flatten() for part in parts for batch in part])
    assert torch.bincount(found, minlength=24)[1:].tolist() == LENGTHS
    assert len(parts[0]) == 4
    with pytest.raises(LoaderError, match="across_steps=2 deals out samples before they are read"):
        batches_of(1, lambda _: DataLoader(Documents([2])), length=lambda _: 1, across_steps=2)
