"""Makes a user's loader of samples of different lengths load one rank's share of each batch, balanced between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from autopar.balance import Assignment, BatchPlanner
from autopar.balance.costs import check_lengths
from autopar.data.batch_rows import own_rows
from autopar.data.buckets import EvenSteps
from autopar.data.loaders import WithEpochs, remade, unsharded_parts
from autopar.data.packed_rows import RowPacking
from autopar.data.sampling import Draws, sampled
from autopar.data.sequence_separation import check_separation
from autopar.errors import LengthError, LoaderError
from autopar.lower import ParallelModule
from autopar.lower.observe.balance import Dealt
from autopar.lower.run.call_inputs import CallInputs

__all__ = ["balanced"]

L = TypeVar("L", bound=DataLoader[Any])

_END = -1  # what a rank says in place of a digest when its loader has ended
# What a loss leaves out by default, and an id that every vocabulary has.
_PADDING: Mapping[str, float] = {"input_ids": 0, "labels": -100}


def balanced(
    loader: L,
    model: ParallelModule,
    *,
    length: Callable[[Any], int] | None = None,
    length_index: Sequence[int] | np.ndarray | None = None,
    packs: bool = True,
    shifts: str | Sequence[str] | None = None,
    padding: Mapping[str, float] | None = None,
    across_steps: int = 1,
) -> L:
    """The loader that gives this rank its share of the batches of `loader`, in rows of one length; every rank calls it.

    For a model of ``autopar.parallelize(..., inputs="local")`` with example inputs ``[rows, tokens]``.  A batch is the
    samples of a batch of `loader`, as on one device: a step has no others, but for `across_steps`.  `BatchPlanner` says
    which rank gets which, in as few rows as hold them; steps with more samples or longer ones have more rows.

    Packed, a row has several sequences, and ``position_ids`` that begin at 0 in each: the model must take these, and
    let no place attend to another sequence (as causal language models of transformers do).  Padded, a row has one
    sequence, and an ``attention_mask``.  Either way loss and gradients are those of one device on each sequence
    alone, if the loss is a mean over labels that counts none with the value of padding.

    Args:
        loader: a ``DataLoader`` or torchdata's ``StatefulDataLoader`` as on one device, whose samples are mappings
            from names to tensors ``[length, ...]``.  Its ``collate_fn`` is not used.  It is left as it is.
        model: says which share is this rank's.
        length: sample -> its number of tokens.  Every rank then reads all samples of a batch.
        length_index: ``[samples]`` tokens of each sample of a map-style dataset.  A rank then reads its own only.
        packs: whether sequences share rows.
        shifts: packed: entries that the model moves by a place to predict the next token: ``"labels"`` for causal
            language models of transformers; ``()`` if there are none.
        padding: name of an entry -> what it has in places without a token; by default 0 for ``input_ids`` and -100
            for ``labels``.
        across_steps: with `length_index`: the samples of so many batches are dealt out anew to as many steps, for like
            work in each.  Training then differs from that on one device by which samples a step has.

    Returns:
        A loader of the same class, with ``set_epoch``, which passes the epoch on to sampler and dataset.

    Raises:
        LoaderError: the loader is sharded already, `model` takes the whole batch on every rank, arguments are missing,
            or the model does not keep packed sequences apart.  While it runs, on every rank: ranks have other lengths,
            or some loaders end before others.
        LengthError: a sequence is longer than a row, or has no token.

    Example:
        >>> loader = DataLoader(documents, batch_size=64, shuffle=True)
        >>> loader = autopar.balanced(loader, model, length_index=documents.lengths, shifts="labels")
    """
    inputs, sampler = unsharded_parts(loader, model)
    given: Any = loader
    is_stream = isinstance(given.dataset, IterableDataset)
    _check_arguments(given, length, length_index, shifts if packs else (), is_stream=is_stream)
    if across_steps < 1 or (across_steps > 1 and length_index is None):
        raise LoaderError(
            f"across_steps={across_steps} deals out samples before they are read: pass 1 or more, and length_index="
        )
    if packs:
        check_separation(model.program.source)
    planner = BatchPlanner(model.plan, packs=packs)
    shifted = (shifts,) if isinstance(shifts, str) else tuple(shifts or ())
    packing = RowPacking(
        {**_PADDING, **(padding or {})}, "position_ids" if packs else "", "" if packs else "attention_mask",
        shifted if packs else (),
    )  # fmt: skip
    share = _Share(planner, model.data_rank, model.data_parallel_size, inputs.rank)
    made = remade(loader, f"Balanced{type(loader).__name__}", _Balanced)
    attributes: Any = made.__dict__
    attributes["call_inputs"] = inputs
    take = None
    if length_index is None:
        assert length is not None
        made.collate_fn = _CollateShare(share, packing, length)
    else:
        known = check_lengths(length_index, planner.longest, "a row of the plan", "sample {} of length_index")
        attributes["dataset"] = _RowsOfSamples(given.dataset)
        made.collate_fn = _CollateRows(packing, given.dataset)
        take = _TakeShare(share, known)
        if across_steps > 1:
            attributes["batch_sampler"] = EvenSteps(attributes["batch_sampler"], known, planner, across_steps)
    if not is_stream:
        attributes["batch_sampler"] = sampled(attributes["batch_sampler"], Draws(inputs, sampler), take)
    return made


def _check_arguments(loader: Any, length: Any, index: Any, shifts: Any, *, is_stream: bool) -> None:
    if (length is None) == (index is None):
        raise LoaderError(
            "say how long samples are, in one way: balanced(..., length=lambda sample: len(sample['input_ids'])), or "
            "length_index= with the length of every sample of the dataset"
        )
    if shifts is None:
        raise LoaderError(
            "in a packed row the last place of a sequence must not predict the first token of the next: pass "
            "shifts='labels' if the model moves labels by a place itself, as causal language models of transformers "
            "do; shifts=() if labels belong to the places that they are at"
        )
    if is_stream and index is not None:
        raise LoaderError("an iterable dataset has no sample numbers, which length_index= goes by: pass length=")
    if index is not None and len(index) != len(loader.dataset):
        raise LoaderError(
            f"length_index has {len(index)} lengths, but the dataset has {len(loader.dataset)} samples: pass one each"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise LoaderError("the loader gives single samples (batch_size=None): balancing needs the samples of a batch")


@dataclass(frozen=True)
class _Share:
    """What one data-parallel rank passes of a batch."""

    planner: BatchPlanner
    rank: int
    ranks: int
    device: int  # this rank among all

    def of(self, lengths: np.ndarray) -> tuple[Dealt, int, list[tuple[int, list[int]]]]:
        """What is predicted of the whole assignment and a digest of it, the tokens that a row would have if this rank
        has none, and its rows: of each its tokens, and the numbers of its sequences.
        """
        assignment = self.planner.assign(lengths)
        digest = zlib.crc32(assignment.degrees.tobytes(), assignment.row_cost.tokens)
        digest = zlib.crc32(np.stack([assignment.lengths, assignment.group, assignment.row]).tobytes(), digest)
        digest = zlib.crc32(repr(assignment.starts).encode(), digest)
        row = assignment.row_cost
        alike_s = row.token_s * assignment.rows * row.tokens  # of rows, whatever is in them
        mean_s = alike_s + assignment.mean_s
        imbalance = (alike_s + assignment.largest_s) / mean_s if mean_s else 1.0
        dealt = Dealt(digest, assignment.step_time_s, imbalance, assignment.runs_as)
        if assignment.unlike:
            own = assignment.groups_of(self.device % self.planner.devices_of_stage)
            found = [(assignment.unlike[g].tokens, row) for g in own for row in assignment.rows_of(g) if row]
            return dealt, assignment.unlike[own[0] if own else 0].tokens, found
        return dealt, row.tokens, [(row.tokens, own) for own in rank_rows(assignment, self.rank, self.ranks)]


def rank_rows(assignment: Assignment, rank: int, ranks: int) -> list[list[int]]:
    """The rows that part `rank` of `ranks` of the batch has, each the numbers of its sequences.

    Ranks that compute rows are the groups of `assignment`, perhaps more or fewer than those that pass them.  A batch
    of several microbatches is cut into these before groups share each of them out: the row that group g computes as
    number j of microbatch m is the batch's row ``(m * groups + g) * at_once + j``.
    """
    groups = len(assignment.degrees)
    at_once = assignment.at_once or assignment.rows
    rows_of = [assignment.rows_of(group) for group in range(groups)]
    found: list[list[int]] = []
    own = own_rows(groups * assignment.rows, rank, ranks)
    for place in range(own.start, own.stop):
        microbatch, inside = divmod(place, groups * at_once)
        group, number = divmod(inside, at_once)
        found.append(rows_of[group][microbatch * at_once + number])
    return found


class _Row(NamedTuple):
    """What stands for an index where a dataset is asked for a row of samples."""

    dealt: Dealt
    tokens: int
    indices: list[int] | None  # None: this rank has no rows


@dataclass(frozen=True)
class _TakeShare:
    """The indices of a batch -> this rank's rows of them."""

    share: _Share
    lengths: np.ndarray

    def __call__(self, indices: Sequence[int]) -> list[_Row]:
        dealt, tokens, rows = self.share.of(self.lengths[np.asarray(indices, dtype=np.int64)])
        dealt = dealt._replace(digest=zlib.crc32(np.asarray(indices, dtype=np.int64).tobytes(), dealt.digest))
        own = [_Row(dealt, length, [indices[number] for number in row]) for length, row in rows]
        return own or [_Row(dealt, tokens, None)]


class _RowsOfSamples:
    """A dataset whose entries are rows of samples of `base`."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, row: _Row) -> tuple[_Row, list[Any]]:
        return row, [self.base[index] for index in row.indices or ()]

    def __getattr__(self, name: str) -> Any:
        if name in ("base", "__getitems__", "__setstate__"):  # before unpickling; whole batches of single samples
            raise AttributeError(name)
        return getattr(self.base, name)


@dataclass(frozen=True)
class _CollateRows:
    """Rows of samples that were read -> their digest and the batch."""

    packing: RowPacking
    dataset: Any

    def __call__(self, items: Sequence[tuple[_Row, list[Any]]]) -> tuple[Dealt, dict[str, Tensor]]:
        dealt = items[0][0].dealt
        rows = [samples for row, samples in items if row.indices is not None]
        like = next((sample for row in rows for sample in row), None)
        tokens = [row.tokens for row, _ in items]
        return dealt, self.packing.jagged(rows, tokens, self.dataset[0] if like is None else like)


@dataclass(frozen=True)
class _CollateShare:
    """All samples of a batch -> the digest and this rank's share of them."""

    share: _Share
    packing: RowPacking
    length: Callable[[Any], int]

    def __call__(self, samples: Sequence[Any]) -> tuple[Dealt, dict[str, Tensor]]:
        dealt, tokens, rows = self.share.of(np.array([self.length(sample) for sample in samples]))
        own = [[samples[number] for number in row] for _, row in rows]
        return dealt, self.packing.jagged(own, [length for length, _ in rows] or [tokens], samples[0])


class _Balanced(WithEpochs):
    """What the class of a balanced loader has in addition."""

    call_inputs: CallInputs

    def __iter__(self) -> Iterator[Any]:
        base: Any = super()
        return _Compared(base.__iter__(), self.call_inputs)


class _Compared:
    """Batches of a loader, of which all ranks are to have their shares."""

    def __init__(self, base: Iterator[tuple[Dealt, Any]], inputs: CallInputs) -> None:
        self._base = base
        self._inputs = inputs
        self._number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        failed: Exception | None = None
        dealt, batch = Dealt(_END), None
        try:
            dealt, batch = next(self._base)
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001  (raised below, where other ranks hear of it)
            failed = error

        def find() -> tuple[int]:
            if failed is not None:
                raise failed
            return (dealt.digest,)

        known = [digest for (digest,) in self._inputs.numbers_of_ranks("batch {} of a balanced loader", find)]
        self._number += 1
        _check_alike(known, self._number)
        if dealt.digest == _END:
            raise StopIteration
        self._inputs.dealt = dealt
        return batch


def _check_alike(digests: Sequence[int], number: int) -> None:
    """Raise on every rank unless all ranks share out the same batch."""
    if len(set(digests)) == 1:
        return
    ended = [rank for rank, digest in enumerate(digests) if digest == _END]
    if ended:
        going = [rank for rank in range(len(digests)) if rank not in ended]
        raise LoaderError(
            f"the loader of ranks {ended} ended before batch {number}, which ranks {going} have: give every rank the "
            "same dataset, sampler and batch size, and no share of its own"
        )
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    raise LengthError(
        f"in batch {number} rank {other} has other samples or lengths than rank 0, so they would be shared out in "
        "another way: give every rank the same dataset, lengths and shuffle"
    )
