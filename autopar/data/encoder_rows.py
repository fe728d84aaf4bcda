"""Images beside text: the rows of an encoder, which are distributed over ranks by their own lengths.

Whatever rank has a sample's text, its images go where the encoder has least to do, and the model's program takes their
features to the text.  `EncoderRows` is what a user says, `EncoderSharing` assigns and collates.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from autopar.balance.costs import check_lengths
from autopar.balance.rows import assign_rows
from autopar.data.packed_rows import RowPacking
from autopar.errors import LoaderError
from autopar.host.default_device import as_host_tensor
from autopar.plan.prediction import RowCost
from autopar.search.microbatches.row_sums import RowPieces

__all__ = ["LEADING_BITS", "EncoderRows", "EncoderShare", "EncoderSharing", "Image", "in_even_parts"]

Image = tuple[int, int]
"""The number of a sample in its batch, and the number of one of its images."""

# Numbers of images of a part are rounded up to this many leading bits: each number is planned for when it first occurs,
# and up to an eighth of the encoder's work is spent on images of zeros.
LEADING_BITS = 4


@dataclass(frozen=True)
class EncoderRows:
    """What of a sample an encoder reads, in rows that are balanced apart from those of the text.

    A sample has any number of images: an entry is one image, a list of images, or images stacked along dim 0.

    Images of one shape need `entries` alone.  The model's input is ``[images, ...]``, the images in the order of the
    text, for models that put their features in the text in that order (``masked_scatter``, as LLaVA does); at the end
    there may be images of zeros, whose features are not used.

    Images of many sizes are packed into rows ``[rows, patches, ...]``, as long as those of the example inputs.  The
    model then looks a place of the text up among the places of all rows,
    ``functional.embedding(seen, features.flatten(0, 1))``.

    With `grids` the model takes the patches of all images in one dim, ``[patches, ...]``, next to the size of each
    image, which it reads in Python.  Every rank gets as many images of each size, in order of size, and the model's
    program takes their features to the text.

    Args:
        entries: the names of the entries, which are inputs of the model.
        lookup: the entry of the text, ``[length]``, that says for each place which patch it is, counted over all
            images of the sample; any number, such as 0, where it is none.  The batch has the numbers among all rows.
        positions: the model's input that counts patches from 0 in each image, which it keeps apart by that.
        mask: in place of `positions`, for a row for each image: the model's input that is 1 at patches.
        lengths: with ``length_index=``: of each sample of the dataset the patches of its images, such as
            ``[[12, 3], [], [7]]``; of images of one shape their number, ``[2, 0, 1]``; with `grids` their sizes,
            ``[[(1, 16, 16), (1, 16, 16)], [], [(1, 16, 16)]]``.
        grids: the entry of a sample, and input of the model, that has frames, height and width of each image in
            patches, ``[images, 3]``, such as ``"image_grid_thw"``.

    Example:
        >>> loader = autopar.balanced(loader, model, length=size, shifts="labels", encoder="pixel_values")
    """

    entries: str | Sequence[str]
    lookup: str = ""
    positions: str = ""
    mask: str = ""
    lengths: Sequence[Any] | None = None
    grids: str = ""

    def __post_init__(self) -> None:
        """Check that it says one of both."""
        if not self.names or not all(self.names):
            raise LoaderError("an encoder has entries: pass EncoderRows(entries='pixel_values') with their names")
        if bool(self.positions) + bool(self.mask) != bool(self.lookup) or (self.lookup and self.grids):
            raise LoaderError(
                f"EncoderRows(lookup={self.lookup!r}, positions={self.positions!r}, mask={self.mask!r}, "
                f"grids={self.grids!r}): images of many sizes need lookup=, and one of positions= (several images "
                "share a row) and mask= (a row for each); images of one shape, and those of grids=, need none of them"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the entries."""
        return (self.entries,) if isinstance(self.entries, str) else tuple(self.entries)

    @property
    def made(self) -> tuple[str, ...]:
        """The inputs of the model that are rows of the encoder."""
        return (*self.names, *(name for name in (self.positions, self.mask) if name))

    def lengths_for(self, samples: int) -> Sequence[Any]:
        """`lengths` of so many samples.

        Raises:
            LoaderError: there are none, or not one for each sample.
        """
        if self.lengths is None or len(self.lengths) != samples:
            counted = "none" if self.lengths is None else f"those of {len(self.lengths)}"
            raise LoaderError(
                f"with length_index= a rank reads its own samples only, so lengths of images are needed too, of "
                f"{samples} samples, but EncoderRows has {counted}: pass EncoderRows(..., lengths=), or length= in "
                "place of length_index="
            )
        return self.lengths

    def check_announced(self, announced: Sequence[Any], found: Sequence[Any]) -> None:
        """Raise LoaderError if the images of a sample are others than `lengths` says."""
        if list(announced) != list(found):
            raise LoaderError(
                f"EncoderRows(lengths=) says that a sample has images of {list(announced)} places, but they are "
                f"{list(found)}: let it say what the dataset gives"
            )


@dataclass(frozen=True)
class EncoderShare:
    """The images of a batch.

    Args:
        rows: of this rank, as many as each rank has; some may be empty.
        starts: the number of each image's first place among those of the rows of all ranks.
        lengths: of each sample the places that its images take, or their sizes.
        digest: of where images are, for ranks to compare.
        grids: with sizes, those of this rank's rows; of no image too.
        room: where images stay with their text: how many each row of this rank's text has room for (one number if it
            has none); `rows` and `starts` are empty then.
    """

    rows: tuple[tuple[Image, ...], ...]
    starts: Mapping[Image, int]
    lengths: Sequence[Sequence[Any]]
    digest: int
    grids: tuple[tuple[int, ...], ...] = ()
    room: tuple[int, ...] = ()

    @property
    def samples(self) -> set[int]:
        """The samples whose images this rank has."""
        return {sample for row in self.rows for sample, _ in row}


@dataclass(frozen=True)
class EncoderSharing:
    """Assigns the images of batches to ranks, and collates those of one rank.

    Args:
        encoder: what a user says.
        forms: shape and dtype of the example's input of each entry, whose dim 0 are rows.
        rank: data-parallel rank.
        ranks: how many there are.
        parts: a multiple of `ranks`: into so many parts rows can be split, each with as many rows, as layers of the
            encoder may be split over more devices than those of the text.
        pieces: how many places of its text an image takes, where a row can be computed with its own images alone.
    """

    encoder: EncoderRows
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    rank: int
    ranks: int
    parts: int
    pieces: RowPieces | None = None

    @property
    def tokens(self) -> int:
        """Of a row; 0: a row is an image, all of one shape."""
        return self.forms[self.encoder.names[0]][0][1] if self.encoder.lookup else 0

    def assign(self, lengths: Sequence[Sequence[int]], order: Sequence[int]) -> EncoderShare:
        """Distribute a batch whose samples have images of these `lengths`; `order`: of samples, by rows of the text.

        Raises:
            LengthError: an image is longer than a row.
        """
        rows = self._packed(lengths) if self.tokens else self._in_order(lengths, order)
        each = len(rows) // self.ranks
        starts: dict[Image, int] = {}
        for number, row in enumerate(rows):
            place = number * max(1, self.tokens)
            for sample, image in row:
                starts[sample, image] = place
                place += lengths[sample][image]
        own = tuple(tuple(row) for row in rows[self.rank * each : (self.rank + 1) * each])
        return EncoderShare(own, starts, lengths, zlib.crc32(repr((each, starts)).encode()))

    def keep(self, lengths: Sequence[Sequence[int]], tokens: Sequence[int]) -> EncoderShare:
        """The images of a batch where they stay with their text, on a rank whose rows have so many `tokens`."""
        assert self.pieces is not None
        digest = zlib.crc32(repr([len(own) for own in lengths]).encode())
        return EncoderShare((), {}, lengths, digest, room=tuple(map(self.pieces.most, tokens)))

    def _packed(self, lengths: Sequence[Sequence[int]]) -> list[list[Image]]:
        images = [(sample, image) for sample, own in enumerate(lengths) for image in range(len(own))]
        places = np.array([lengths[sample][image] for sample, image in images], dtype=np.int64)
        tokens = check_lengths(places, self.tokens, "a row of the encoder", "image {} of the batch")
        # Rows are computed whole, so that only attention, in squares of lengths, tells ranks apart, at any price.
        row = RowCost(self.parts, 1, self.tokens, 1.0, 1.0)
        assignment = assign_rows(row, tokens, self.parts, math.inf, packs=bool(self.encoder.positions))
        return [[images[n] for n in own] for part in range(self.parts) for own in assignment.rows_of(part)]

    def _in_order(self, lengths: Sequence[Sequence[int]], order: Sequence[int]) -> list[list[Image]]:
        return in_even_parts([(sample, image) for sample in order for image in range(len(lengths[sample]))], self.parts)

    # --- samples

    def images_of(self, sample: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """The images of a sample.

        Raises:
            LoaderError: entries have unlike numbers of images, or images of a shape that the model doesn't take.
        """
        parts = {name: self._parts(name, sample.get(name)) for name in self.encoder.names}
        if len({len(part) for part in parts.values()}) > 1:
            raise LoaderError(
                f"a sample has { ({name: len(part) for name, part in parts.items()}) } images: give every entry of the "
                "encoder as many"
            )
        images = [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]
        return [image for image in images if len(next(iter(image.values())))]

    def _parts(self, name: str, entry: Any) -> list[Tensor]:
        """The images of one entry of a sample."""
        shape = self.forms[name][0][1:]
        given: list[Any] = list(cast("Sequence[Any]", entry)) if isinstance(entry, list | tuple) else [entry]
        images: list[Tensor] = []
        for x in (as_host_tensor(each) for each in given if each is not None):
            images += x.unbind() if x.dim() == len(shape) + 1 else [x]
        for x in images:
            fits = x.shape[1:] == shape[1:] if self.tokens else x.shape == shape
            if x.dim() != len(shape) or not fits:
                wanted = ", ".join(["patches", *map(str, shape[1:])] if self.tokens else map(str, shape))
                raise LoaderError(
                    f"an image of entry {name!r} is {list(x.shape)}, but the model takes [{wanted}], by its example "
                    "inputs: give every sample images of this shape, or plan with others"
                )
        return images

    def lengths_of(self, sample: Mapping[str, Any]) -> list[int]:
        """The places that each image of a sample takes in a row."""
        return [self._length(image) for image in self.images_of(sample)]

    def _length(self, image: Mapping[str, Tensor]) -> int:
        return len(next(iter(image.values()))) if self.tokens else 1

    def known_lengths(self, samples: int) -> list[list[int]]:
        """`EncoderRows.lengths` of each of so many samples.

        Raises:
            LoaderError: there are none, or not one for each sample.
        """
        given = self.encoder.lengths_for(samples)
        if self.tokens:
            return [[int(n) for n in cast("Sequence[int]", own)] for own in given]
        return [[1] * int(own) for own in given]

    # --- the batch

    def text_of(self, share: EncoderShare, number: int, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Sample `number` of a batch without its images, and with what it looks up among those of all ranks.

        Raises:
            LoaderError: it has other images than were announced, or looks up a patch that it doesn't have.
        """
        lengths = list(share.lengths[number])
        if self.encoder.lengths is not None:
            self.encoder.check_announced(lengths, self.lengths_of(sample))
        text = {name: x for name, x in sample.items() if name not in self.encoder.names}
        if not self.encoder.lookup:
            return text
        seen = as_host_tensor(text.get(self.encoder.lookup, ()))
        places = [torch.arange(n, device="cpu") + share.starts[number, image] for image, n in enumerate(lengths)]
        known = torch.cat(places) if places else torch.zeros(1, dtype=torch.int64, device="cpu")
        if not seen.numel() or seen.is_floating_point() or int(seen.min()) < 0 or int(seen.max()) >= len(known):
            raise LoaderError(
                f"entry {self.encoder.lookup!r} of a sample says for each place of its text which of its "
                f"{sum(lengths)} patches it is, from 0 on (0 where it is none), but here {seen}"
            )
        return {**text, self.encoder.lookup: known[seen]}

    def collate(self, share: EncoderShare, samples: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
        """The rows of this rank; `samples` by number are at least those whose images it has."""
        images = {number: self.images_of(samples[number]) for number in share.samples}
        rows = [[images[sample][image] for sample, image in row] for row in share.rows]
        if self.tokens:
            encoder, like = self.encoder, self._blank(tokens=1)
            packing = RowPacking(dict.fromkeys(encoder.names, 0), encoder.positions, encoder.mask)
            return packing.rows(rows, self.tokens, like)
        blank = self._blank()
        return {name: torch.stack([(row or [blank])[0][name].to(blank[name].dtype) for row in rows]) for name in blank}

    def collate_kept(
        self, share: EncoderShare, rows: Sequence[Sequence[int]], samples: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """The images of each row of text, of which `rows` has the numbers of its samples: ``[rows, images, ...]``,
        jagged where rows have room for unlike numbers.  Behind a row's own images there are images of zeros.

        Raises:
            LoaderError: a row has more images than places for them.
        """
        assert self.pieces is not None
        blank = self._blank()
        parts: list[dict[str, Tensor]] = []
        for row, room in zip(rows, share.room, strict=False):
            images = [image for number in row for image in self.images_of(samples[number])]
            if len(images) > room:
                raise LoaderError(
                    f"samples with {len(images)} images share a row that has places for {room}, as an image takes "
                    f"{self.pieces.places} places of its text: give each image of a sample its places"
                )
            images += [blank] * (room - len(images))
            parts.append({n: torch.stack([each[n].to(x.dtype) for each in images]) for n, x in blank.items()})
        if len({*share.room}) == 1:
            form = {name: (0, share.room[0], *x.shape) for name, x in blank.items()}
            return {
                name: torch.stack([part[name] for part in parts]) if parts else x.new_zeros(form[name])
                for name, x in blank.items()
            }
        offsets = torch.tensor([0, *share.room], device="cpu").cumsum(0)
        return {
            name: torch.nested.nested_tensor_from_jagged(torch.cat([part[name] for part in parts]), offsets)
            for name in blank
        }

    def _blank(self, tokens: int = 0) -> dict[str, Tensor]:
        """An image of zeros."""
        forms = self.forms.items()
        return {
            name: torch.zeros(tokens or shape[1], *shape[2:], dtype=dtype, device="cpu")
            for name, (shape, dtype) in forms
        }


def in_even_parts(
    images: Sequence[Image], parts: int, leading_bits: int = LEADING_BITS, least: int = 1
) -> list[list[Image]]:
    """A row for each image, and empty ones behind them, for so many parts of equally many, and at least `least`."""
    each = max(least, math.ceil(len(images) / parts))
    step = 1 << max(0, each.bit_length() - leading_bits)
    empty: list[list[Image]] = [[] for _ in range(math.ceil(each / step) * step * parts - len(images))]
    return [[image] for image in images] + empty
