"""A text that grows by a token a call, padded so that few lengths are programs of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.lower.run.token_cache import TokenCache

__all__ = ["GrowingText", "pad_left", "pad_right"]

# Lengths are multiples of it: a program for each, which takes a second or so to plan, and at most so many more tokens.
_LENGTH_STEP = 64


class GrowingText:
    """A text that grows: its cache, and where its tokens are in it."""

    def __init__(self, max_length: int, name: str) -> None:
        """Empty, with room for so many tokens; `name` is what forward calls the cache."""
        self.cache = TokenCache()
        self._name = name
        self._max_length = max_length
        self._padding = 0  # places on the left that hold no token
        self._filled = 0  # and places that are filled, these included

    is_compileable = False
    is_linear = (False,)  # transformers 5.24 asks whether layers keep states in place of keys and values

    def get_seq_length(self) -> int:
        """The tokens that need not be passed again."""
        return self._filled - self._padding

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row ``beam_idx[i]`` in row i."""
        self.cache.reorder_cache(beam_idx)

    def prepare(self, inputs: dict[str, Any], config: Any, names: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the next call: of those that the model would make, for a forward with arguments `names`."""
        return self._step(inputs) if self._filled else self._begin(inputs, config, names)

    def _begin(self, inputs: dict[str, Any], config: Any, names: Mapping[str, Any]) -> dict[str, Any]:
        length = inputs["input_ids"].shape[1]
        inputs = pad_left(inputs, config, names)
        self._filled = inputs["input_ids"].shape[1]
        self._padding = self._filled - length
        self.cache = TokenCache(_capacity(self._padding + self._max_length))
        return inputs | {self._name: self.cache}

    def _step(self, inputs: dict[str, Any]) -> dict[str, Any]:
        ids, mask, cache = inputs["input_ids"], inputs.get("attention_mask"), self.cache
        assert ids.shape[1] == 1
        length = self.get_seq_length() + 1
        mask = ids.new_ones(len(ids), length) if mask is None else mask
        mask = functional.pad(mask, (self._padding, cache.capacity - self._padding - length))
        cache.position = torch.tensor(self._filled, device=ids.device)
        self._filled += 1
        return inputs | {"attention_mask": mask, self._name: cache}


def _capacity(length: int) -> int:
    """The next of few lengths: four between one power of 2 and the next."""
    step = max(_LENGTH_STEP, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _longest(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _padded_length(length: int, longest: int | None) -> int:
    padded = -(-length // _LENGTH_STEP) * _LENGTH_STEP
    return padded if longest is None else max(length, min(padded, longest))


def pad_left(inputs: dict[str, Any], config: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call, padded on the left if a mask and positions, of `names`, can tell the model so."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    others = [x for x in inputs.values() if isinstance(x, Tensor) and x.shape != getattr(ids, "shape", None)]
    knows_places = "position_ids" in inputs or "position_ids" not in names
    if ids is None or others or "attention_mask" not in names or not knows_places:
        return inputs  # the model would not know which tokens are none
    missing = _padded_length(ids.shape[1], _longest(config, "max_position_embeddings")) - ids.shape[1]
    inputs = inputs | {"attention_mask": ids.new_ones(ids.shape) if mask is None else mask}
    return {name: functional.pad(x, (missing, 0)) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def pad_right(inputs: dict[str, Any], config: Any) -> dict[str, Any]:
    """The inputs of a call with the decoder's padded on the right."""
    length = inputs["decoder_input_ids"].shape[1]
    longest = _longest(config, "max_target_positions", "max_position_embeddings")
    missing = _padded_length(length, longest) - length
    of_text = {
        name: functional.pad(x, (0, missing))
        for name, x in inputs.items()
        if name.startswith("decoder_") and isinstance(x, Tensor) and x.shape[-1] == length
    }
    return inputs | of_text
