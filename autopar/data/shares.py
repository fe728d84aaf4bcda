"""One rank's share of the batches that a balanced loader reads: which samples it has, and how they become rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from autopar.balance import Assignment, BatchPlanner
from autopar.data.batch_rows import own_rows
from autopar.data.encoder_rows import EncoderShare, EncoderSharing
from autopar.data.image_grids import GridSharing
from autopar.data.packed_rows import RowPacking
from autopar.lower.observe.balance import Dealt

__all__ = ["CollateBatch", "CollateShare", "RowMaker", "SamplesOfShare", "Share", "Sharing", "TakeShare", "rank_rows"]


class Share(NamedTuple):
    """What one rank has of a batch.

    Args:
        dealt: the assignment of the whole batch, for reports and for ranks to compare.
        tokens: of a row, if this rank has none.
        rows: of each row of this rank its tokens, and the numbers of its sequences in the batch.
        encoder: its images; None: the model has no encoder with rows of its own.
    """

    dealt: Dealt
    tokens: int
    rows: list[tuple[int, list[int]]]
    encoder: EncoderShare | None = None

    @property
    def samples(self) -> list[int]:
        """The samples that this rank reads."""
        own = {number for _, row in self.rows for number in row}
        return sorted(own | (self.encoder.samples if self.encoder else set()))


@dataclass(frozen=True)
class Sharing:
    """Distributes batches over data-parallel ranks, of which this is one.

    Args:
        planner: of the text, or of whatever has lengths.
        rank: data-parallel rank.
        ranks: how many there are.
        device: this rank among all.
        encoder: distributes images; None: there are none.
    """

    planner: BatchPlanner
    rank: int
    ranks: int
    device: int
    encoder: EncoderSharing | GridSharing | None = None

    def of(self, lengths: np.ndarray, images: Sequence[Sequence[Any]] = ()) -> Share:
        """This rank's share of a batch with sequences of these `lengths`, and `images` of these lengths."""
        assignment = self.planner.assign(lengths)
        digest = zlib.crc32(assignment.degrees.tobytes(), assignment.row_cost.tokens)
        digest = zlib.crc32(np.stack([assignment.lengths, assignment.group, assignment.row]).tobytes(), digest)
        digest = zlib.crc32(repr(assignment.starts).encode(), digest)
        encoder = None
        if self.encoder is not None and not assignment.unlike:
            in_order = (row for rank in range(self.ranks) for row in rank_rows(assignment, rank, self.ranks))
            encoder = self.encoder.assign(images, [number for row in in_order for number in row])
            digest = zlib.crc32(digest.to_bytes(4, "little"), encoder.digest)
        row = assignment.row_cost
        rows_s = row.place_s * assignment.rows * row.tokens  # whatever is in them
        mean_s = rows_s + assignment.mean_s
        imbalance = (rows_s + assignment.largest_s) / mean_s if mean_s else 1.0
        dealt = Dealt(digest, assignment.step_time_s, imbalance, assignment.runs_as)
        if assignment.unlike:
            own = assignment.groups_of(self.device % self.planner.devices_of_stage)
            grouped = [(assignment.unlike[g].tokens, row) for g in own for row in assignment.rows_of(g) if row]
            tokens = assignment.unlike[own[0] if own else 0].tokens
            if not isinstance(self.encoder, EncoderSharing):
                return Share(dealt, tokens, grouped)
            kept = self.encoder.keep(images, [each for each, _ in grouped] or [tokens])
            digest = zlib.crc32(digest.to_bytes(4, "little"), kept.digest)
            return Share(dealt._replace(digest=digest), tokens, grouped, kept)
        rows = [(row.tokens, own) for own in rank_rows(assignment, self.rank, self.ranks)]
        return Share(dealt, row.tokens, rows, encoder)


def rank_rows(assignment: Assignment, rank: int, ranks: int) -> list[list[int]]:
    """The rows that part `rank` of `ranks` of the batch has, each the numbers of its sequences.

    Ranks that compute rows are the groups of `assignment`, perhaps more or fewer than those that pass them.  A batch
    of several microbatches is cut into these before groups share each of them out: the row that group g computes as
    number j of microbatch m is the batch's row ``(m * groups + g) * at_once + j``.
    """
    groups = len(assignment.degrees)
    at_once = assignment.at_once or assignment.rows
    rows_of = [assignment.rows_of(group) for group in range(groups)]
    rows: list[list[int]] = []
    own = own_rows(groups * assignment.rows, rank, ranks)
    for place in range(own.start, own.stop):
        microbatch, inside = divmod(place, groups * at_once)
        group, number = divmod(inside, at_once)
        rows.append(rows_of[group][microbatch * at_once + number])
    return rows


@dataclass(frozen=True)
class RowMaker:
    """A share, and its samples by number -> what ranks compare, and this rank's batch.

    Args:
        packing: makes the rows.
        encoder: makes those of an encoder; None: there is none.
        keeps_empty: whether rows without a sequence, which ranks get so that all have as many, stay in the batch.
        is_encoder_optional: whether a batch without any image has no inputs of the encoder, as on one device.
    """

    packing: RowPacking
    encoder: EncoderSharing | GridSharing | None
    keeps_empty: bool = True
    is_encoder_optional: bool = False

    def make(self, share: Share, samples: Mapping[int, Any], like: Any) -> tuple[Dealt, dict[str, Tensor]]:
        """`like` is a sample that shows the form of rows, of which this rank may have none."""
        if not self.keeps_empty:
            share = share._replace(rows=[(length, row) for length, row in share.rows if row])
        tokens = [length for length, _ in share.rows] or [share.tokens]
        if self.encoder is None or share.encoder is None:
            rows = [[samples[number] for number in row] for _, row in share.rows]
            return share.dealt, self.packing.jagged(rows, tokens, like)
        encoder, images = self.encoder, share.encoder
        read = {number: self.packing.as_mapping(sample) for number, sample in samples.items()}
        texts = [[encoder.text_of(images, number, read[number]) for number in row] for _, row in share.rows]
        left_out = (*encoder.encoder.names, encoder.encoder.grids)
        form = {name: x for name, x in self.packing.as_mapping(like).items() if name not in left_out}
        batch = self.packing.jagged(texts, tokens, form)
        if self.is_encoder_optional and not any(images.lengths):  # of the whole batch, so on all ranks
            return share.dealt, batch
        if isinstance(encoder, EncoderSharing) and images.room:
            return share.dealt, batch | encoder.collate_kept(images, [row for _, row in share.rows], read)
        batch |= encoder.collate(images, read)
        if isinstance(encoder, GridSharing):
            batch |= encoder.order_of(images, [row for _, row in share.rows], share.tokens)
        return share.dealt, batch


# --- a dataset whose lengths are known: a rank reads its own samples


class _Request(NamedTuple):
    """What stands for an index where a dataset is asked for the samples of a share: their indices by number."""

    share: Share
    indices: dict[int, int]


@dataclass(frozen=True)
class TakeShare:
    """The indices of a batch -> what `SamplesOfShare` is asked for.

    Args:
        sharing: of batches.
        lengths: ``[samples]`` of the dataset.
        images: of each sample the lengths of its images; empty: there are none.
    """

    sharing: Sharing
    lengths: np.ndarray
    images: Sequence[Sequence[Any]] = ()

    def __call__(self, indices: Sequence[int]) -> list[_Request]:
        """One request, for this rank's share of these samples."""
        chosen = np.asarray(indices, dtype=np.int64)
        images = [self.images[index] for index in indices] if self.images else ()
        share = self.sharing.of(self.lengths[chosen], images)
        dealt = share.dealt._replace(digest=zlib.crc32(chosen.tobytes(), share.dealt.digest))
        # A rank without samples reads one, which shows the entries that samples of this batch have.
        return [_Request(share._replace(dealt=dealt), {number: indices[number] for number in share.samples or [0]})]


class SamplesOfShare:
    """A dataset whose entries are the samples of a rank's share of a batch of `base`, each of which is read once."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, request: _Request) -> tuple[Share, dict[int, Any]]:
        return request.share, {number: self.base[index] for number, index in request.indices.items()}

    def __getattr__(self, name: str) -> Any:
        if name in ("base", "__getitems__", "__setstate__"):  # before unpickling; whole batches of single samples
            raise AttributeError(name)
        return getattr(self.base, name)


@dataclass(frozen=True)
class CollateShare:
    """A share and its samples -> what ranks compare, and the batch."""

    maker: RowMaker

    def __call__(self, items: Sequence[tuple[Share, dict[int, Any]]]) -> tuple[Dealt, dict[str, Tensor]]:
        """The batch of the only one of `items`."""
        share, samples = items[0]
        return self.maker.make(share, samples, next(iter(samples.values())))


# --- any dataset: a rank reads all samples of a batch


@dataclass(frozen=True)
class CollateBatch:
    """All samples of a batch -> what ranks compare, and this rank's share of them."""

    sharing: Sharing
    maker: RowMaker
    length: Callable[[Any], int]

    def __call__(self, samples: Sequence[Any]) -> tuple[Dealt, dict[str, Tensor]]:
        """The batch of this rank's share of `samples`."""
        encoder = self.maker.encoder
        lengths = np.array([self.length(sample) for sample in samples])
        images = [encoder.lengths_of(self.maker.packing.as_mapping(sample)) for sample in samples] if encoder else ()
        share = self.sharing.of(lengths, images)
        return self.maker.make(share, dict(enumerate(samples)), samples[0])
