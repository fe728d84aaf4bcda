"""Images as patches in one dim, for models that read the sizes of images in Python (`EncoderRows.grids`).

Such a model is planned for each number and size of images, so all images of a batch have one size: then each data rank
has as many patches as the others, and there are few plans.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from autopar.data.encoder_rows import EncoderRows, EncoderShare, in_even_parts
from autopar.errors import LoaderError

__all__ = ["GridSharing"]

Grid = tuple[int, ...]
"""Of an image: its frames, height and width in patches."""


@dataclass(frozen=True)
class GridSharing:
    """Assigns the images of batches to ranks, and collates those of one rank.

    Args:
        encoder: what a user says.
        forms: shape and dtype of the example's input of each entry, ``[patches, ...]``.
        rank: data-parallel rank.
        ranks: how many there are.
        parts: as in `EncoderSharing`.
        usual: the size of images in a batch that has none, where the model still gets some.
        positions: the entry without which a sample with images would be placed as text alone; "": there is none.
    """

    encoder: EncoderRows
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    rank: int
    ranks: int
    parts: int
    usual: Grid
    positions: str = ""

    def assign(self, lengths: Sequence[Sequence[Grid]], order: Sequence[int]) -> EncoderShare:
        """Distribute a batch whose samples have images of these sizes; `order`: of samples, by rows of the text.

        Raises:
            LoaderError: the images have several sizes.
        """
        sizes = sorted({grid for own in lengths for grid in own})
        if len(sizes) > 1:
            raise LoaderError(
                f"the images of a batch have the sizes {sizes} (frames, height, width in patches), which forward reads "
                "in Python: each order of sizes would be planned on its own. Make batches of images of one size, with "
                "autopar.data.BucketSampler or by scaling them; or leave autopar.balanced and inputs='local' out, and "
                "pass whole batches of any images, each set of which is planned when it first comes"
            )
        rows = in_even_parts([(sample, image) for sample in order for image in range(len(lengths[sample]))], self.parts)
        each = len(rows) // self.ranks
        own = tuple(tuple(row) for row in rows[self.rank * each : (self.rank + 1) * each])
        return EncoderShare(own, {}, lengths, zlib.crc32(repr((each, order, lengths)).encode()))

    # --- samples

    def images_of(self, sample: Mapping[str, Any]) -> list[tuple[Grid, dict[str, Tensor]]]:
        """The images of a sample: the size of each, and its patches.

        Raises:
            LoaderError: a sample has other patches than its sizes say.
        """
        given = sample.get(self.encoder.grids)
        if given is None or not len(given):
            return []
        grids = torch.as_tensor(given)
        entries = {name: torch.as_tensor(sample.get(name, ())) for name in self.encoder.names}
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
        return [_grids_of(torch.as_tensor(own)) for own in self.encoder.lengths_for(samples)]

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
        grid = next((grid for own in share.lengths for grid in own), self.usual)
        blank = {
            name: torch.zeros(math.prod(grid), *shape[1:], dtype=dtype) for name, (shape, dtype) in self.forms.items()
        }
        own = [images[row[0][0]][row[0][1]][1] if row else blank for row in share.rows]
        patches = {name: torch.cat([image[name].to(x.dtype) for image in own]) for name, x in blank.items()}
        return patches | {self.encoder.grids: torch.tensor([grid] * (len(share.rows) * self.ranks))}


def _grids_of(grids: Tensor) -> list[Grid]:
    return [tuple(grid) for grid in cast("Any", grids).tolist()]
