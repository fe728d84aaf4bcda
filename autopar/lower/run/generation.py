"""``generate()`` of language models that have one, such as Hugging Face's: the same tokens on every rank.

A cache of keys and values would have to be carried from call to call in slices, so every new token runs the whole text.
So that not every length is a program of its own, texts are padded on the left to the next of few lengths.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from functools import partialmethod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import ModelError
from autopar.lower.kernels.random import follow_first_rank

__all__ = ["generation_methods"]

_LOGGER = logging.getLogger("autopar")

# Lengths are multiples of it: a program for each, which takes a second or so to plan, and at most so many more tokens.
_LENGTH_STEP = 64


def generation_methods(original: type[nn.Module]) -> dict[str, Any]:
    """The methods of a parallel module's class that make ``generate()`` of `original` work; none if it has none."""
    if not (hasattr(original, "generate") and hasattr(original, "prepare_inputs_for_generation")):
        return {}
    return {
        "generate": partialmethod(_generate, original),
        "prepare_inputs_for_generation": partialmethod(_prepare_inputs, original),
    }


def _generate(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The original's ``generate``; every rank must call it, and gets the same tokens."""
    if getattr(self.config, "is_encoder_decoder", False):
        raise ModelError(
            f"generate() of {original.__name__} runs its encoder alone, which a parallelized model can't: load "
            "full_state_dict() into the original model, and call its generate()"
        )
    if kwargs.get("use_cache", True) and not getattr(self, "_said_no_cache", False):
        self._said_no_cache = True
        _LOGGER.warning(
            "generate() of a parallelized %s runs without a cache: each token costs a pass over the whole text. To "
            "sample much, load full_state_dict() into the original model",
            original.__name__,
        )
    follow_first_rank(self._communicator)
    with self.global_inputs():
        return original.generate(self, *args, **kwargs | {"use_cache": False})


def _prepare_inputs(self: Any, original: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What the original makes of a text for `forward`, padded on the left."""
    made = original.prepare_inputs_for_generation(self, input_ids, *args, **kwargs)
    longest = getattr(self.config, "max_position_embeddings", None)
    return _pad(made, longest, inspect.signature(original.forward).parameters)


def _pad(inputs: dict[str, Any], longest: int | None, names: Mapping[str, Any]) -> dict[str, Any]:
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    others = [x for x in inputs.values() if isinstance(x, Tensor) and x.shape != getattr(ids, "shape", None)]
    knows_places = "position_ids" in inputs or "position_ids" not in names
    if ids is None or others or "attention_mask" not in names or not knows_places:
        return inputs  # the model would not know which tokens are none
    length = ids.shape[1]
    padded = -(-length // _LENGTH_STEP) * _LENGTH_STEP
    padded = padded if longest is None else max(length, min(padded, longest))
    inputs = inputs | {"attention_mask": ids.new_ones(ids.shape) if mask is None else mask}
    return {name: functional.pad(x, (padded - length, 0)) if isinstance(x, Tensor) else x for name, x in inputs.items()}
