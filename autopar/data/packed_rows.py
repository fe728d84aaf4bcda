"""Collates samples of different lengths into rows, ``[rows, tokens, ...]``, by packing or padding.

Rows of several lengths are jagged: `torch.nested` tensors of layout ``torch.jagged``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from autopar.errors import LoaderError
from autopar.host.default_device import as_host_tensor

__all__ = ["RowPacking"]


@dataclass(frozen=True)
class RowPacking:
    """How rows are made of samples, which are mappings from names to tensors ``[length, ...]``.

    Args:
        padding: name -> what places without a token have.
        positions: name of an entry that counts places from 0 in each sequence; ``""``: none.
        kinds: how many other kinds of positions a place has, such as frame, height and width of a place in an image.
            The batch has ``[1 + kinds, rows, tokens]`` of them then, and a sample ``[kinds, length]``; without them, as
            text alone, all count its places.
        mask: name of an entry that is 1 at tokens and 0 elsewhere; ``""``: none.
        whole: names of entries that a sequence has once, such as its class: a batch has ``[rows, ...]`` of them.
        shifts: names whose first place in each sequence gets what padding has, since the model moves them to the place
            before, which is in another sequence.
    """

    padding: Mapping[str, float]
    positions: str = ""
    mask: str = ""
    shifts: tuple[str, ...] = ()
    kinds: int = 0
    whole: frozenset[str] = frozenset()

    def jagged(self, rows: Sequence[Sequence[Any]], tokens: Sequence[int], like: Any) -> dict[str, Tensor]:
        """The batch of these rows of samples; `tokens` of each row, or one number if there are none.

        Where all rows have one length, it is ``[rows, tokens, ...]``.  What a sequence has once is not jagged.  `like`
        and errors are as for `rows`.
        """
        if len(set(tokens)) == 1:
            return self.rows(rows, tokens[0], like)
        each = [self.rows([row], length, like) for row, length in zip(rows, tokens, strict=True)]
        offsets = torch.tensor([0, *tokens], device="cpu").cumsum(0)
        return {
            name: torch.cat([part[name] for part in each])
            if name in self.whole
            else torch.nested.nested_tensor_from_jagged(torch.cat([part[name][0] for part in each]), offsets)
            for name in each[0]
        }

    def rows(self, rows: Sequence[Sequence[Any]], tokens: int, like: Any) -> dict[str, Tensor]:
        """The batch of these rows of samples, of which there may be none; `like` is a sample that shows the form.

        Rows have so many `tokens`.

        Raises:
            LoaderError: a sample is no mapping of tensors of equal length, or nothing says how to pad an entry.
        """
        form = self._read(like)
        sizes = {name: x.shape if name in self.whole else (tokens, *x.shape[1:]) for name, x in form.items()}
        batch = {
            name: torch.full((len(rows), *sizes[name]), self.padding.get(name, 0), dtype=x.dtype, device="cpu")
            for name, x in form.items()
        }
        places = torch.zeros(len(rows), tokens, dtype=torch.int64, device="cpu")
        # A row without a sequence attends to itself, as if it had one: a softmax over nothing is not a number.
        filled = torch.tensor([not row for row in rows], dtype=torch.int64, device="cpu")[:, None].repeat(1, tokens)
        for number, row in enumerate(rows):
            start = 0
            for sample in map(self._read, row):
                begin, start = start, start + self._length(sample)
                self._place(batch, number, slice(begin, start), sample, tokens)
                places[number, begin:start] = torch.arange(start - begin, device="cpu")
            filled[number, :start] = 1
        if self.kinds:
            places = torch.cat([places[None], batch.pop(self.positions).movedim(-1, 0)])
        made = {self.positions: places, self.mask: filled}
        return batch | {name: x for name, x in made.items() if name}

    def length_of(self, sample: Any) -> int:
        """How many tokens a sample has."""
        return self._length(self._read(sample))

    def _length(self, sample: Mapping[str, Tensor]) -> int:
        return next(len(x) for name, x in sample.items() if name not in self.whole)

    def _place(
        self, batch: dict[str, Tensor], row: int, places: slice, sample: Mapping[str, Tensor], tokens: int
    ) -> None:
        if set(sample) != set(batch) or places.stop > tokens:
            raise LoaderError(
                f"a sample with the entries {sorted(sample)} and {self._length(sample)} tokens doesn't fit: other "
                f"samples have {sorted(batch)}, and the row has {tokens - places.start} places left. Give every sample "
                "the same entries, and let length= or length_index= say how many tokens it really has"
            )
        for name, x in sample.items():
            if name in self.whole and x.shape != batch[name].shape[1:]:
                raise LoaderError(
                    f"entry {name!r} of a sample is {list(x.shape)}, but that of another one "
                    f"{list(batch[name].shape[1:])}. By the example inputs a sequence has it once, not for each token: "
                    "give all samples one shape"
                )
            batch[name][row if name in self.whole else (row, places)] = x
            if name in self.shifts:
                batch[name][row, places.start] = self.padding[name]

    def as_mapping(self, sample: Any) -> Mapping[str, Any]:
        """The entries of a sample, without the mask of a tokenizer.

        Raises:
            LoaderError: it is no mapping, or padded.
        """
        if not isinstance(sample, Mapping):
            raise LoaderError(
                f"a balanced loader makes rows of samples that are mappings, such as {{'input_ids': ..., 'labels': "
                f"...}}, but the data set gives a {type(sample).__name__}"
            )
        return _without_mask(cast("Mapping[str, Any]", sample), self.padding)

    def _read(self, sample: Any) -> dict[str, Tensor]:
        given = self.as_mapping(sample)
        if self.kinds and given:
            given = {**given, self.positions: self._positions_of(given)}
        known = {*self.padding, self.positions} if self.kinds else set(self.padding)
        unknown = sorted(set(given) - known)
        if unknown or not given:
            raise LoaderError(
                f"samples have the entries {sorted(given)}, but nothing says what {unknown} have in places without a "
                f"token: leave them out of the samples, or pass balanced(..., padding={{{unknown[0]!r}: 0, ...}}). For "
                f"images beside text pass balanced(..., encoder={unknown[0]!r}) if an encoder reads it"
                if unknown
                else "a sample has no entries"
            )
        tensors = {name: as_host_tensor(x) for name, x in given.items()}
        sizes = {name: len(x) if x.dim() else 0 for name, x in tensors.items() if name not in self.whole}
        if len(set(sizes.values())) > 1 or 0 in sizes.values():
            raise LoaderError(
                f"the entries of a sample have one length, which is its number of tokens, but here {sizes} "
                "(0: no dim, or an empty one). For what a sequence has once, such as its class, pass "
                "balanced(..., packs=False) and example inputs [rows, ...] of it; for images beside text "
                "balanced(..., encoder=) with the entries that an encoder reads"
            )
        return tensors

    def _positions_of(self, sample: Mapping[str, Any]) -> Tensor:
        """``[length, kinds]`` of a sample."""
        given = sample.get(self.positions)
        if given is None:
            places = torch.arange(len(next(iter(sample.values()))), device="cpu")
            return places[:, None].expand(-1, self.kinds)
        positions = as_host_tensor(given)
        if positions.dim() != 2 or len(positions) != self.kinds:
            raise LoaderError(
                f"a sample has {self.positions} {list(positions.shape)}, but the model takes [{1 + self.kinds}, rows, "
                f"tokens], by its example inputs, the first of which count the places of each sequence: let samples "
                f"have [{self.kinds}, length], as get_rope_index of such models gives for one sample"
            )
        return positions.T


def _without_mask(sample: Mapping[str, Any], padding: Mapping[str, float]) -> Mapping[str, Any]:
    """The sample without the mask that tokenizers add, which says of each token that it counts.

    Raises:
        LoaderError: the mask says that some places hold no token.
    """
    name = "attention_mask"
    if name not in sample or name in padding:
        return sample
    if not bool(as_host_tensor(sample[name]).all()):
        raise LoaderError(
            "a sample is padded already: its attention_mask has zeros. Leave padding to the balanced loader: tokenize "
            "without it, so that samples have their own lengths"
        )
    return {key: x for key, x in sample.items() if key != name}
