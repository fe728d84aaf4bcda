"""Sharded loaders: the ranks' rows together are the batches that one device loads, in its order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

import autopar
from autopar.data.batch_rows import cut_rows, own_rows
from autopar.errors import LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from tests.data.sharded import FakeModel, Squares, Stream, assert_same_batches, on_ranks


def sharded_epochs(make: Callable[[], DataLoader[Any]], world: int, epochs: int = 1, **kwargs: Any) -> list[list[Any]]:
    loaders = [make() for _ in range(world)]  # before threads share the default generator

    def act(model: Any, rank: int) -> list[Any]:
        loader: Any = autopar.shard_dataloader(loaders[rank], model, **kwargs)
        assert len(loader) == len(loaders[rank])
        assert isinstance(loader, type(loaders[rank]))
        found = []
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            found += list(loader)
        return found

    return on_ranks(world, act)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", [Squares, Stream])
@pytest.mark.parametrize("collate", ["rows", "batch"])
def test_rows_of_all_ranks_are_the_batches_of_one_device(world: int, kind: Any, collate: str) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(kind(), batch_size=5)

    # 23 = 4 * 5 + 3: the last batch leaves one of four ranks without a row
    assert_same_batches(sharded_epochs(make, world, collate=collate), list(make()))


def test_drop_last_drops_what_one_device_drops() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Squares(), batch_size=6, drop_last=True)

    parts = sharded_epochs(make, 2)
    assert [len(batch["x"]) for batch in parts[0]] == [3, 3, 3]
    assert_same_batches(parts, list(make()))


def test_shuffles_are_those_of_one_device() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Squares(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7))

    single = make()
    expected = [*single, *single]
    assert_same_batches(sharded_epochs(make, 2, epochs=2), expected)
    assert any(not torch.equal(a["x"], b["x"]) for a, b in zip(expected[:6], expected[6:], strict=True))


def test_generators_that_differ_take_one_seed() -> None:
    seeds = iter(range(10))

    def make() -> DataLoader[Any]:
        return DataLoader(Squares(8), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(next(seeds)))

    parts = sharded_epochs(make, 2)
    assert sorted(int(y) for batches in parts for batch in batches for y in batch["y"]) == [i**2 for i in range(8)]


def test_workers_load_the_same() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Squares(11), batch_size=4, num_workers=1)

    def act(model: Any, rank: int) -> list[Any]:
        return list(autopar.shard_dataloader(make(), model))

    # one after the other: processes are forked
    assert_same_batches(
        [simulate(1, lambda talk, r=rank: act(_as_rank(talk, r, 2), r))[0] for rank in range(2)], list(make())
    )


def _as_rank(talk: Communicator, rank: int, size: int) -> Any:
    model = FakeModel(talk)
    model.data_rank, model.data_parallel_size = rank, size
    return model


def test_datasets_of_whole_batches_are_cut() -> None:
    class Batches(Dataset[Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Tensor:
            return torch.arange(7) + 10 * index

    for batches in zip(*sharded_epochs(lambda: DataLoader(Batches(), batch_size=None), 2), strict=True):
        assert [len(batch) for batch in batches] == [4, 3]
        assert int(batches[1][0]) == int(batches[0][-1]) + 1


def test_padding_collators_see_the_whole_batch_if_told_so() -> None:
    def pad(items: list[dict[str, Any]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.ones(int(item["y"])) for item in items], batch_first=True)

    parts = sharded_epochs(lambda: DataLoader(Squares(4), batch_size=4, collate_fn=pad), 2, collate="batch")
    assert [part[0].shape for part in parts] == [(2, 9), (2, 9)]
    assert [part[0].sum().item() for part in parts] == [1, 4 + 9]


def test_set_epoch_reaches_sampler_and_dataset() -> None:
    class Epochs(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    dataset = Squares()
    (model,) = simulate(1, FakeModel)
    for epoch, arguments in enumerate(({}, {"collate": "batch"})):
        first, second = Epochs(dataset), Epochs(dataset)
        loaders = [
            DataLoader(dataset, batch_size=2, sampler=first),
            DataLoader(dataset, batch_sampler=BatchSampler(second, 2, drop_last=False)),
        ]
        for loader in loaders:
            made: Any = autopar.shard_dataloader(loader, model, **arguments)
            made.set_epoch(epoch)
            assert made.dataset is dataset
        assert (first.epoch, second.epoch, dataset.epoch) == (epoch,) * 3


def test_the_users_loader_stays_as_it_was() -> None:
    loader = DataLoader(Squares(4), batch_size=4)
    (model,) = simulate(1, FakeModel)
    model.data_parallel_size = 2
    assert len(next(iter(autopar.shard_dataloader(loader, model)))["x"]) == 2
    assert len(next(iter(loader))["x"]) == 4
    assert type(loader) is DataLoader


def test_what_is_sharded_already_is_refused() -> None:
    (model,) = simulate(1, FakeModel)
    dataset = Squares()
    sampler = DistributedSampler(dataset, 2, 0)
    for loader in (
        DataLoader(dataset, sampler=sampler),
        DataLoader(dataset, batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
    ):
        with pytest.raises(LoaderError, match="sharded already: pass the loader of one device, or make that sampler"):
            autopar.shard_dataloader(loader, model)


def test_a_model_that_takes_whole_batches_is_refused() -> None:
    (model,) = simulate(1, lambda talk: FakeModel(talk, is_local=False))
    with pytest.raises(LoaderError, match=r"call autopar.parallelize\(..., inputs='local'\)"):
        autopar.shard_dataloader(DataLoader(Squares()), model)


def test_batches_without_rows_are_refused() -> None:
    (model,) = simulate(1, FakeModel)
    loader = DataLoader(Squares(), batch_size=2, collate_fn=str)
    with pytest.raises(LoaderError, match="batches of type str without a tensor that has rows"):
        next(iter(autopar.shard_dataloader(loader, model, collate="batch")))


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class Record:
    x: Tensor
    pair: Pair
    scale: float = 1.0


def test_rows_are_cut_out_of_containers() -> None:
    x = torch.arange(4)
    cut = cut_rows({"r": Record(x, Pair(x + 1, list("abcd"))), "size": (4, torch.tensor(4))}, slice(1, 3), 4)
    assert cut["r"].x.tolist() == [1, 2]
    assert cut["r"].pair.x.tolist() == [2, 3]
    assert cut["r"].pair.names == ["b", "c"]
    assert (cut["r"].scale, cut["size"]) == (1.0, (4, torch.tensor(4)))


@pytest.mark.parametrize(("count", "size"), [(8, 4), (7, 2), (3, 4), (0, 2)])
def test_shares_are_as_equal_as_can_be(count: int, size: int) -> None:
    shares = [range(count)[own_rows(count, rank, size)] for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
