"""Makes a user's single-device loader load the rows of one rank.

All ranks iterate over the same batches in the same order as a single device, and load their own rows of each.  The
state of a loader is therefore the same on all ranks, and can be restored on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from autopar.data.batch_rows import count_rows, cut_rows, own_rows
from autopar.data.buckets import BucketSampler
from autopar.data.sampling import AgreedDraws, sampled
from autopar.errors import LoaderError
from autopar.lower import ParallelModule
from autopar.lower.run.call_inputs import CallInputs

__all__ = ["WithEpochs", "remade", "shard_dataloader", "unsharded_parts"]

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
    inputs, sampler = unsharded_parts(loader, model)
    share = _RankShare(model.data_rank, model.data_parallel_size)
    made = remade(loader, f"Sharded{type(loader).__name__}", WithEpochs)
    given: Any = loader  # torch's annotations are incomplete
    attributes: Any = made.__dict__
    batch_sampler = given.batch_sampler
    if isinstance(given.dataset, IterableDataset):
        is_batch = given.batch_size is None or collate == "batch"
        made.collate_fn = (_CutBatch if is_batch else _CollateSome)(given.collate_fn, share)
        return made
    draws = AgreedDraws(inputs, sampler)
    if batch_sampler is None or collate == "batch":
        made.collate_fn = _CutBatch(given.collate_fn, share)
        share = _RankShare(0, 1)
    elif isinstance(batch_sampler, BucketSampler):  # a rank without rows has the shape of this batch, not of any
        attributes["dataset"] = _SamplesOrForm(given.dataset)
        made.collate_fn = _CollateSamples(given.collate_fn)
    else:
        made.collate_fn = _CollateOwn(given.collate_fn, given.dataset)
    name = "sampler" if batch_sampler is None else "batch_sampler"
    base = attributes[name]
    take = share.take_or_form if isinstance(batch_sampler, BucketSampler) else share.take
    attributes[name] = sampled(base, draws, None if batch_sampler is None else take)
    return made


def unsharded_parts(loader: Any, model: ParallelModule) -> tuple[CallInputs, Any]:
    """What takes the inputs of `model`, whose ranks pass their own, and the sampler of `loader`, which all ranks share.

    Raises:
        LoaderError: the loader is sharded already, or `model` takes the whole batch on every rank.
    """
    inputs = model.call_inputs
    if inputs is None or not inputs.is_local:
        raise LoaderError(
            "the model was made to be called with the whole batch on every rank, which the loader gives as it is. "
            "For ranks with rows of their own call autopar.parallelize(..., inputs='local')"
        )
    batch_sampler = loader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", batch_sampler) or loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise LoaderError(
            "the loader has a DistributedSampler, so it is sharded already: pass the loader of one device, or make "
            "that sampler with num_replicas=model.data_parallel_size and rank=model.data_rank, and leave the loader"
        )
    return inputs, sampler


def remade(loader: Any, name: str, mixin: type[Any]) -> Any:
    """A loader like `loader`, of a class of that name with `mixin` in addition, that has not begun."""
    kind: Any = loader.__class__
    made: Any = object.__new__(type(name, (mixin, kind), {}))
    made.__dict__.update(vars(loader), _iterator=None)
    return made


class WithEpochs:
    """What the class of a loader of one rank has in addition."""

    def set_epoch(self, epoch: int) -> None:
        """As that of a ``DistributedSampler``: call it before each epoch; passed on to what has such a method."""
        own: list[Any] = [getattr(self, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        part: Any
        inner: list[Any] = [getattr(part, "base", None) for part in own]
        for part in (*own, *inner, *(getattr(part, "sampler", None) for part in inner)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


@dataclass(frozen=True)
class _RankShare:
    rank: int
    size: int

    def of(self, count: int) -> slice:
        return own_rows(count, self.rank, self.size)

    def take(self, items: list[Any]) -> list[Any]:
        return items[self.of(len(items))]

    def take_or_form(self, items: list[Any]) -> list[Any]:
        return self.take(items) or _RowForm(items[:1])


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


class _RowForm(list[Any]):
    """One index, or sample, that shows the form of rows, of which a rank has none."""


@dataclass(frozen=True)
class _SamplesOrForm:
    """A dataset that is asked for the samples of a batch at once."""

    base: Any

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: Any) -> Any:
        return self.base[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        many = getattr(self.base, "__getitems__", None)
        samples = [self.base[index] for index in indices] if many is None else many(indices)
        return _RowForm(samples) if isinstance(indices, _RowForm) else samples


@dataclass(frozen=True)
class _CollateSamples:
    """Collates what `_SamplesOrForm` gives."""

    base: Callable[[Any], Any]

    def __call__(self, items: Any) -> Any:
        batch = self.base(items)
        return cut_rows(batch, slice(0, 0), 1) if isinstance(items, _RowForm) else batch


@dataclass(frozen=True)
class _CollateSome:
    """Collates those of the samples of a batch that are this rank's."""

    base: Callable[[Any], Any]
    share: _RankShare

    def __call__(self, items: Any) -> Any:
        own = self.share.take(items)
        return self.base(own) if own else cut_rows(self.base(items[:1]), slice(0, 0), 1)


@dataclass(frozen=True)
class _CutBatch:
    """Collates the whole batch, and takes this rank's rows of it."""

    base: Callable[[Any], Any]
    share: _RankShare

    def __call__(self, items: Any) -> Any:
        batch = self.base(items)
        count = count_rows(batch)
        if count is None:
            raise LoaderError(
                f"the loader gives batches of type {type(batch).__name__} without a tensor that has rows: return "
                "tensors, or containers of them, from collate_fn"
            )
        return cut_rows(batch, self.share.of(count), count)
