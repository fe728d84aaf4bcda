"""Images as patches in one dim, for models that read the sizes of images in Python (`EncoderRows.grids`).

Such a model is planned for each list of sizes.  So that there are few, and each data rank has as many patches as the
others, each gets equally many images of each size, in order of size, with images of zeros behind.  Images of one size
are in the order of the text, as the model expects them; of several sizes their features are not, and the batch says
where they are (`autopar.trace.torch_functions.feature_order`).
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from autopar.data.encoder_rows import LEADING_BITS, EncoderRows, EncoderShare, Image, in_even_parts
from autopar.errors import LoaderError
from autopar.host.default_device import as_host_tensor
from autopar.trace import FEATURE_ORDER

__all__ = ["GridSharing"]

_LOGGER = logging.getLogger("autopar")

Grid = tuple[int, ...]
"""Of an image: its frames, height and width in patches."""

# A batch of several sizes is planned for its number of images of each, so numbers are rounded more the more sizes there
# are: to two leading bits for up to `_FEW_SIZES`, else to powers of two, of which none is less than half of the mean
# number.  That makes rare sizes computed more often, by 2 to 12 % of all images, and plans of 8 sizes 207 -> 56.
# `benchmarks/image_sizes.py` counts plans, and images of zeros.
_FEW_SIZES = 3
_FEW_BITS, _MANY_BITS = 2, 1
_MUCH = 2  # patches computed over patches given, of which the user should hear: rounding alone gives less


@dataclass(frozen=True)
class GridSharing:
    """Assigns the images of batches to ranks, and collates those of one rank.

    Args:
        encoder: what a user says.
        forms: shape and dtype of the example's input of each entry, ``[patches, ...]``.
        rank: data-parallel rank.
        ranks: how many there are.
        parts: as in `EncoderSharing`.
        usual: the size of images in a batch that has none, if forward requires some.
        positions: the entry without which a sample with images would be placed as text alone; "": there is none.
        merged: how many patches become one feature; 0: that is not known, so batches have images of one size.
    """

    encoder: EncoderRows
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    rank: int
    ranks: int
    parts: int
    usual: Grid
    positions: str = ""
    merged: int = 0

    def assign(self, lengths: Sequence[Sequence[Grid]], order: Sequence[int]) -> EncoderShare:
        """Distribute a batch whose samples have images of these sizes; `order`: of samples, by rows of the text.

        Raises:
            LoaderError: the images have several sizes, and nothing says which features are whose.
        """
        sizes = sorted({grid for own in lengths for grid in own}) or [self.usual]
        images = [(sample, image) for sample in order for image in range(len(lengths[sample]))]
        parts = self.parts if len(sizes) == 1 else self.ranks
        of_size = [[image for image in images if lengths[image[0]][image[1]] == grid] for grid in sizes]
        bits, least = _leading_bits(len(sizes)), _least_of_each([math.ceil(len(own) / parts) for own in of_size])
        by_size = [in_even_parts(own, parts, bits, least) for own in of_size]
        each = [len(rows) // self.ranks for rows in by_size]
        rows_of = [
            [tuple(row) for rows, n in zip(by_size, each, strict=True) for row in rows[rank * n : (rank + 1) * n]]
            for rank in range(self.ranks)
        ]
        grids = tuple(grid for grid, n in zip(sizes, each, strict=True) for _ in range(n))
        starts = self._starts(rows_of, grids) if len(sizes) > 1 else {}
        computed, given = (
            self.ranks * sum(map(math.prod, grids)),
            sum(math.prod(grid) for own in lengths for grid in own),
        )
        if starts and computed > _MUCH * given:
            _warn_of_zeros(len(sizes), self.ranks)
        digest = zlib.crc32(repr((each, order, lengths)).encode())
        return EncoderShare(tuple(rows_of[self.rank]), starts, lengths, digest, grids)

    def _starts(self, rows_of: Sequence[Sequence[tuple[Image, ...]]], grids: Sequence[Grid]) -> dict[Image, int]:
        """The number of each image's first feature among those of all ranks' images.

        Raises:
            LoaderError: it is not known.
        """
        if not self.merged:
            raise LoaderError(
                f"the images of a batch have the sizes {sorted(set(grids))} (frames, height, width in patches), but "
                "the program of this model doesn't say how many patches become one feature that masked_scatter puts "
                "in the text, or its forward takes no **kwargs, in which the order of features is passed on. Make "
                "batches of images of one size, with autopar.data.BucketSampler or by scaling them; or leave "
                "autopar.balanced and inputs='local' out, and pass whole batches of any images, each list of which is "
                "planned when it first comes"
            )
        starts: dict[Image, int] = {}
        place = 0
        for rows in rows_of:
            for row, grid in zip(rows, grids, strict=True):
                starts.update(dict.fromkeys(row, place))
                place += self._features(grid)
        return starts

    def _features(self, grid: Grid) -> int:
        patches = math.prod(grid)
        if patches % self.merged:
            raise LoaderError(
                f"an image of {grid} (frames, height, width in patches) has {patches} patches, of which the model "
                f"makes one feature of {self.merged} each: scale images to a multiple of that"
            )
        return patches // self.merged

    # --- samples

    def images_of(self, sample: Mapping[str, Any]) -> list[tuple[Grid, dict[str, Tensor]]]:
        """The images of a sample: the size of each, and its patches.

        Raises:
            LoaderError: a sample has other patches than its sizes say.
        """
        given = sample.get(self.encoder.grids)
        if given is None or not len(given):
            return []
        grids = as_host_tensor(given)
        entries = {name: as_host_tensor(sample.get(name, ())) for name in self.encoder.names}
        patches = [math.prod(grid) for grid in _grids_of(grids)]
        for name, x in entries.items():
            shape = self.forms[name][0]
            if grids.dim() != 2 or x.shape != (sum(patches), *shape[1:]):
                raise LoaderError(
                    f"a sample has images of the sizes {_grids_of(grids)} by its entry {self.encoder.grids!r}, "
                    f"[images, 3], which are {sum(patches)} patches, but {name!r} is {list(x.shape)}, where the model "
                    f"takes [patches, {', '.join(map(str, shape[1:]))}] by its example inputs"
                )
        pieces = {name: torch.split_with_sizes(x, patches) for name, x in entries.items()}
        images = zip(*pieces.values(), strict=True)
        return [(grid, dict(zip(pieces, own, strict=True))) for grid, own in zip(_grids_of(grids), images, strict=True)]

    def lengths_of(self, sample: Mapping[str, Any]) -> list[Grid]:
        """The sizes of the images of a sample."""
        return [grid for grid, _ in self.images_of(sample)]

    def known_lengths(self, samples: int) -> list[list[Grid]]:
        """`EncoderRows.lengths` of each of so many samples.

        Raises:
            LoaderError: there are none, or not one for each sample.
        """
        return [_grids_of(as_host_tensor(own)) for own in self.encoder.lengths_for(samples)]

    # --- the batch

    def text_of(self, share: EncoderShare, number: int, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Sample `number` of a batch without its images.

        Raises:
            LoaderError: it has other images than were announced, or no positions.
        """
        if share.lengths[number] and self.positions not in ("", *sample):
            raise LoaderError(
                f"a sample has images but no {self.positions!r}, so the places of its images are not known: let the "
                f"dataset add them for each sample, as get_rope_index of such models does: "
                "model.get_rope_index(input_ids[None], mm_token_type_ids[None], image_grid_thw)[0][:, 0]"
            )
        if self.encoder.lengths is not None:
            self.encoder.check_announced(share.lengths[number], self.lengths_of(sample))
        return {name: x for name, x in sample.items() if name not in (*self.encoder.names, self.encoder.grids)}

    def collate(self, share: EncoderShare, samples: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
        """The patches of this rank, and the sizes of the images of all; `samples` are at least those that it has."""
        images = {number: self.images_of(samples[number]) for number in share.samples}
        patches: dict[str, list[Tensor]] = {name: [] for name in self.forms}
        for row, grid in zip(share.rows, share.grids, strict=True):
            for name, (shape, dtype) in self.forms.items():
                own = [images[sample][image][1][name].to(dtype) for sample, image in row]
                patches[name] += own or [torch.zeros(math.prod(grid), *shape[1:], dtype=dtype, device="cpu")]
        joined = {name: torch.cat(own) for name, own in patches.items()}
        return joined | {self.encoder.grids: torch.tensor(share.grids * self.ranks, device="cpu")}

    def order_of(self, share: EncoderShare, rows: Sequence[Sequence[int]], tokens: int) -> dict[str, Tensor]:
        """Where the features of each of these rows of samples are among those of all images, ``[rows, tokens]``; empty
        where they are in the order of the text.

        Raises:
            LoaderError: the images of a row have more features than it has places.
        """
        if not share.starts:
            return {}
        beyond = self.ranks * sum(map(self._features, share.grids))  # of a place without a feature: a lookup fails
        order = torch.full((len(rows), tokens), beyond, device="cpu")
        for own, row in zip(order, rows, strict=True):
            images = [(sample, image) for sample in row for image in range(len(share.lengths[sample]))]
            features = [
                share.starts[image] + torch.arange(self._features(share.lengths[image[0]][image[1]]), device="cpu")
                for image in images
            ]
            count = sum(map(len, features))
            if count > tokens:
                raise LoaderError(
                    f"the images of samples {list(row)} of a batch have {count} features, more than the {tokens} "
                    "places of their row: let each sample's text have a place for each feature"
                )
            own[:count] = torch.cat([*features, own[:0]])
        return {FEATURE_ORDER: order}


def _leading_bits(num_sizes: int) -> int:
    """What numbers of images of each size are rounded to."""
    if num_sizes == 1:
        return LEADING_BITS
    return _FEW_BITS if num_sizes <= _FEW_SIZES else _MANY_BITS


def _least_of_each(counts: Sequence[int]) -> int:
    """The images of each size that a part has at least, where it has so many of each."""
    mean = sum(counts) / len(counts)
    return 1 << math.floor(math.log2(mean)) if len(counts) > _FEW_SIZES else 1


@cache
def _warn_of_zeros(num_sizes: int, ranks: int) -> None:
    """Once for each of them, as every batch may be so."""
    _LOGGER.warning(
        "images of %d sizes on %d data ranks: each rank computes as many of each size, so more than half of the "
        "patches of a batch are zeros. Scale images to fewer sizes, or make larger batches", num_sizes, ranks,
    )  # fmt: skip


def _grids_of(grids: Tensor) -> list[Grid]:
    return [tuple(grid) for grid in cast("Any", grids).tolist()]
