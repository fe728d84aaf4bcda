"""Loaders of torchdata that stop and go on, also on another number of ranks."""

from typing import Any

import pytest
import torch

import autopar
from tests.data.sharded import Squares, Stream, assert_same_batches, on_ranks

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is optional")


@pytest.mark.parametrize("worlds", [(2, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("kind", ["map", "shuffled", "iterable"])
def test_stateful_loaders_resume_on_any_number_of_ranks(worlds: tuple[int, int], kind: str) -> None:
    before, after = worlds

    def make() -> Any:
        dataset: Any = Stream() if kind == "iterable" else Squares()
        generator = torch.Generator().manual_seed(3)
        shuffle = {"shuffle": True, "generator": generator} if kind == "shuffled" else {}
        return stateful.StatefulDataLoader(dataset, batch_size=5, **shuffle)

    def begin(model: Any, _: int) -> tuple[list[Any], Any]:
        loader = autopar.shard_dataloader(make(), model)
        iterator = iter(loader)
        return [next(iterator) for _ in range(2)], loader.state_dict()

    begun = on_ranks(before, begin)

    def resume(model: Any, rank: int) -> list[Any]:
        loader = autopar.shard_dataloader(make(), model)
        loader.load_state_dict(begun[rank % before][1])
        return list(loader)

    expected = list(make())
    assert_same_batches([batches for batches, _ in begun], expected[:2])
    assert_same_batches(on_ranks(after, resume), expected[2:])
