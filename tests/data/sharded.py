"""Datasets, simulated ranks, and what all ranks' batches must be together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run.call_inputs import CallInputs
from autopar.placement import shard
from autopar.program import Program
from autopar.step.layer.data_split import DataSplit


class Squares(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int = 23) -> None:
        self.length = length
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), index), "y": torch.tensor(index**2), "text": f"text {index}"}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset[dict[str, Any]]):
    """Workers take turns."""

    def __init__(self, length: int = 23) -> None:
        self.items = Squares(length)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.items[index] for index in range(start, self.items.length, step))


class FakeModel:
    """What a loader needs of a parallel module."""

    def __init__(self, communicator: Communicator, *, is_local: bool = True) -> None:
        split = DataSplit((communicator.world_size,), (shard(0),))
        example = ((torch.zeros(2),), {})
        self.call_inputs = CallInputs(lambda *_: FakeCall(), communicator, split, example if is_local else None)
        source = Program(values={}, layers=(), inputs=("position_ids",), parameters={}, aliases={}, outputs=())
        self.program = SimpleNamespace(source=source)
        self.data_rank = communicator.rank
        self.data_parallel_size = communicator.world_size

    def forward(self, pixel_values: Tensor | None = None) -> None: ...

    def join_rows(self, rows: Tensor) -> Tensor:
        return rows


class FakeCall:
    named = MappingProxyType({})


def on_ranks(world: int, act: Callable[[Any, int], Any]) -> list[Any]:
    return simulate(world, lambda talk: act(FakeModel(talk), talk.rank))


def assert_same_batches(parts: list[list[Any]], expected: list[Any]) -> None:
    assert all(len(batches) == len(expected) for batches in parts)
    for number, whole in enumerate(expected):
        own = [batches[number] for batches in parts]
        for key in ("x", "y"):
            torch.testing.assert_close(torch.cat([batch[key] for batch in own]), whole[key])
        assert [text for batch in own for text in batch["text"]] == whole["text"]
        counts = [len(batch["x"]) for batch in own]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1
