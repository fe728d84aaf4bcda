"""Scripts in which each rank loads its own data, as authors write them for DDP, against one device."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import autopar
from autopar.errors import MeshError, RankError
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from tests.end_to_end.harness import launch, parallelize, whole_mesh

VOCAB, LENGTH = 32, 8


class Texts(Dataset[dict[str, Tensor]]):
    """Token ids whose labels are masked at other places in every row."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(VOCAB, (length, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"ids": ids, "labels": torch.where(torch.arange(LENGTH) < index % LENGTH, -100, ids)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def example(rows: int = 8) -> dict[str, Tensor]:
    return torch.utils.data.default_collate([Texts(rows)[i] for i in range(rows)])


def train(model: nn.Module, batches: Iterator[dict[str, Tensor]] | Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def local(model: nn.Module, *constraints: str) -> Any:
    return autopar.parallelize(
        model, whole_mesh(), example(), inputs="local", constraints=list(constraints), profile=False
    )


def with_distributed_sampler(*constraints: str) -> None:
    single = Model().double()
    model = local(copy.deepcopy(single), *constraints)
    size, dataset = model.data_parallel_size, Texts(32)
    sampler = DistributedSampler(dataset, size, model.data_rank, shuffle=True, seed=5)
    loader = DataLoader(dataset, batch_size=8 // size, sampler=sampler)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses += train(model, loader)
    expected = []
    for epoch in range(2):
        samplers = [DistributedSampler(dataset, size, rank, shuffle=True, seed=5) for rank in range(size)]
        for each in samplers:
            each.set_epoch(epoch)
        parts = [DataLoader(dataset, batch_size=8 // size, sampler=each) for each in samplers]
        joined = [{k: torch.cat([b[k] for b in batches]) for k in batches[0]} for batches in zip(*parts, strict=True)]
        expected += train(single, joined)
    assert losses == pytest.approx(expected, rel=1e-9)


def with_sharded_loader(*constraints: str) -> None:
    single = Model().double()
    model = local(copy.deepcopy(single), *constraints)
    loader = DataLoader(Texts(21), batch_size=8, shuffle=True)  # the last batch has 5 rows
    torch.manual_seed(1)
    expected = train(single, loader)
    torch.manual_seed(1)
    assert train(model, autopar.shard_dataloader(loader, model)) == pytest.approx(expected, rel=1e-9)
    assert evaluate(model.eval(), autopar.shard_dataloader(DataLoader(Texts(6), batch_size=5), model)) == pytest.approx(
        evaluate(single.eval(), DataLoader(Texts(6), batch_size=5)), rel=1e-9
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any) -> list[float]:
    return [model(**batch).item() for batch in loader]


def with_generators_that_differ() -> None:
    model = local(Model(), "data=2")
    torch.manual_seed(dist.get_rank())  # then all take what rank 0 has
    loader = autopar.shard_dataloader(DataLoader(Texts(16), batch_size=4, shuffle=True), model)
    found = torch.cat([batch["ids"] for batch in loader])
    ranks = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(ranks, found)
    assert sorted(torch.cat(ranks).tolist()) == sorted(Texts(16).ids.tolist())


def with_dtensors() -> None:
    single = Model().double()
    model = parallelize(copy.deepcopy(single), example())
    batch = {name: distribute_tensor(x, whole_mesh(), [Shard(0)]) for name, x in example().items()}
    assert model(**batch).item() == pytest.approx(single(**example()).item(), rel=1e-12)


def other_rows_on_ranks_of_one_data_rank_are_an_error() -> None:
    model = local(Model(), "tensor=2")
    assert model.data_parallel_size == 1
    batch = {name: x + (dist.get_rank() if name == "ids" else 0) for name, x in example().items()}
    batch["ids"] %= VOCAB
    with pytest.raises((MeshError, RankError), match=r"'ids' of rank . differs.*must pass the same rows"):
        model(**batch)


class OnDevices(ProcessGroupCommunicator):
    """As where devices have a backend of their own, which carries no numbers of the host."""

    _is_gloo = False


def numbers_beside_the_devices_backend() -> None:
    talk = OnDevices([1, 0])
    for turn in range(2):
        assert talk.gather_numbers((10 + talk.rank, turn)) == [[10, turn], [11, turn]]


@pytest.mark.slow
def test_ranks_train_on_data_of_their_own() -> None:
    launch(
        2,
        partial(with_distributed_sampler, "data=2"),
        partial(with_sharded_loader, "data=2"),
        partial(with_distributed_sampler, "data=2", "microbatches=2"),
        with_generators_that_differ,
        with_dtensors,
        numbers_beside_the_devices_backend,
        other_rows_on_ranks_of_one_data_rank_are_an_error,
    )
