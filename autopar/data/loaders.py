"""A user's loader, as it was on one device, made to load the rows of one rank.

Every rank goes through the same batches in the same order, those of one device, and loads its own rows of each.  So
the state of a loader says where all ranks are, and fits any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from autopar.data.batch_rows import count_rows, cut_rows, own_rows
from autopar.errors import LoaderError
from autopar.lower import ParallelModule
from autopar.lower.kernels.random import random_scope
from autopar.lower.run.call_inputs import CallInputs

__all__ = ["shard_dataloader"]

L = TypeVar("L", bound=DataLoader[Any])


def shard_dataloader(loader: L, model: ParallelModule, *, collate: Literal["rows", "batch"] = "rows") -> L:
    """The loader that gives this rank its rows of the batches of `loader`; every rank calls it.

    For a model of ``autopar.parallelize(..., inputs="local")``.  ``batch_size`` stays that of the whole batch, of which
    each rank gets ``batch_size / model.data_parallel_size`` rows: where that does not divide, as in a smaller last
    batch, the first data ranks get one more, and some may get none.  Batches and their order are those of one device,
    also when shuffled: ranks whose generators differ take the seed of rank 0.

    Args:
        loader: a ``DataLoader`` or torchdata's ``StatefulDataLoader`` as on one device, that is, without a
            ``DistributedSampler``.  It is left as it is.  Of a map-style dataset a rank loads its own rows only; an
            iterable dataset, which must give the same samples on every rank, is read whole, and collated in parts.
        model: says which rows are this rank's.
        collate: ``"rows"``: ``collate_fn`` gets this rank's rows.  ``"batch"``: it gets the whole batch, of which rows
            are taken then: for one that pads to the longest of the batch, as all ranks need the same lengths.

    Returns:
        A loader of the same class, with ``set_epoch``, which passes the epoch on to sampler and dataset.

    Raises:
        LoaderError: the loader is sharded already, or `model` takes the whole batch on every rank.

    Example:
        >>> loader = autopar.shard_dataloader(DataLoader(dataset, batch_size=64, shuffle=True), model)
    """
    given: Any = loader  # torch's annotations are incomplete
    inputs = model.call_inputs
    if inputs is None or not inputs.is_local:
        raise LoaderError(
            "the model was made to be called with the whole batch on every rank, which the loader gives as it is. "
            "For ranks with rows of their own call autopar.parallelize(..., inputs='local')"
        )
    batch_sampler = given.batch_sampler
    sampler = getattr(batch_sampler, "sampler", batch_sampler) or given.sampler
    if isinstance(sampler, DistributedSampler):
        raise LoaderError(
            "the loader has a DistributedSampler, so it is sharded already: pass the loader of one device, or make "
            "that sampler with num_replicas=model.data_parallel_size and rank=model.data_rank, and leave the loader"
        )
    share = _Share(model.data_rank, model.data_parallel_size)
    kind: Any = type(loader)
    made: Any = object.__new__(type(f"Sharded{type(loader).__name__}", (_Sharded, kind), {}))
    attributes: Any = made.__dict__
    attributes.update(vars(loader), _iterator=None)
    if isinstance(given.dataset, IterableDataset):
        is_batch = given.batch_size is None or collate == "batch"
        made.collate_fn = (_CutBatch if is_batch else _CollateSome)(given.collate_fn, share)
        return made
    draws = _Draws(inputs, sampler)
    if batch_sampler is None or collate == "batch":
        made.collate_fn = _CutBatch(given.collate_fn, share)
        share = _Share(0, 1)
    else:
        made.collate_fn = _CollateOwn(given.collate_fn, given.dataset)
    name = "sampler" if batch_sampler is None else "batch_sampler"
    base = attributes[name]
    rows = _StatefulRows if hasattr(base, "state_dict") else _Rows
    attributes[name] = rows(base, draws, None if batch_sampler is None else share)
    return made


class _Sharded:
    """What the class of a sharded loader has in addition."""

    def set_epoch(self, epoch: int) -> None:
        """As that of a ``DistributedSampler``: call it before each epoch; passed on to what has such a method."""
        own: list[Any] = [getattr(self, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        part: Any
        inner: list[Any] = [getattr(part, "base", None) for part in own]
        for part in (*own, *inner, *(getattr(part, "sampler", None) for part in inner)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


@dataclass(frozen=True)
class _Share:
    rank: int
    size: int

    def of(self, count: int) -> slice:
        return own_rows(count, self.rank, self.size)


# --- collating


@dataclass(frozen=True)
class _CollateOwn:
    """Collates the rows of this rank, of which there may be none."""

    base: Callable[[Any], Any]
    dataset: Any

    def __call__(self, items: Any) -> Any:
        if items:
            return self.base(items)
        one = self.base([self.dataset[0]])  # for the other dims
        return cut_rows(one, slice(0, 0), 1)


@dataclass(frozen=True)
class _CollateSome:
    """Collates those of the samples of a batch that are this rank's."""

    base: Callable[[Any], Any]
    share: _Share

    def __call__(self, items: Any) -> Any:
        own = items[self.share.of(len(items))]
        return self.base(own) if own else cut_rows(self.base(items[:1]), slice(0, 0), 1)


@dataclass(frozen=True)
class _CutBatch:
    """Collates the whole batch, and takes this rank's rows of it."""

    base: Callable[[Any], Any]
    share: _Share

    def __call__(self, items: Any) -> Any:
        batch = self.base(items)
        count = count_rows(batch)
        if count is None:
            raise LoaderError(
                f"the loader gives batches of type {type(batch).__name__} without a tensor that has rows: return "
                "tensors, or containers of them, from collate_fn"
            )
        return cut_rows(batch, self.share.of(count), count)


# --- sampling


@dataclass(frozen=True)
class _Draws:
    """Makes what a sampler draws the same on all ranks."""

    inputs: CallInputs
    sampler: Any

    def __post_init__(self) -> None:
        generator: Any = getattr(self.sampler, "generator", None)
        if generator is not None and (seed := self.inputs.shared_seed(generator.get_state())) is not None:
            generator.manual_seed(seed)

    def begin(self, iterator: Iterator[Any]) -> Any:
        """The first of `iterator`, None at its end: samplers draw for a whole epoch when they begin."""
        draws = not isinstance(self.sampler, SequentialSampler) and getattr(self.sampler, "generator", None) is None
        seed = self.inputs.shared_seed(torch.get_rng_state()) if draws else None
        if seed is None:
            return next(iterator, None)
        torch.rand(())  # the next epoch is to find another state
        with random_scope(seed):
            return next(iterator, None)


class _Rows:
    """A sampler of this rank's rows of the batches of `base`; without a `share`, of all there is."""

    def __init__(self, base: Any, draws: _Draws, share: _Share | None) -> None:
        self.base = base
        self._draws = draws
        self._share = share

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.base)
        kind = _StatefulRowsIterator if hasattr(iterator, "state_dict") else _RowsIterator
        return kind(iterator, self._draws, self._share)


class _RowsIterator:
    def __init__(self, base: Any, draws: _Draws, share: _Share | None) -> None:
        self.base = base
        self._draws: _Draws | None = draws
        self._share = share

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        draws, self._draws = self._draws, None
        found: Any = next(self.base, None) if draws is None else draws.begin(self.base)
        if found is None:
            raise StopIteration
        return found if self._share is None else found[self._share.of(len(found))]


class _Stateful:
    """Has the state of `base`, which says where all ranks are."""

    base: Any

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


class _StatefulRows(_Rows, _Stateful):
    pass


class _StatefulRowsIterator(_RowsIterator, _Stateful):
    def update_state_dict(self) -> None:
        if hasattr(self.base, "update_state_dict"):
            self.base.update_state_dict()
