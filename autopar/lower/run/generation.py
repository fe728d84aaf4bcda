"""``generate()`` of language models that have one, such as Hugging Face's: the same tokens on every rank.

A cache of keys and values would have to be carried from call to call in slices, so every new token runs the whole text.
So that not every length is a program of its own, texts are padded to the next of few lengths: on the left, where a
mask and positions say so; behind an encoder on the right, where no token sees what comes after it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import ModelError
from autopar.lower.kernels.random import follow_first_rank

__all__ = ["generation_methods"]

_LOGGER = logging.getLogger("autopar")

# Lengths are multiples of it: a program for each, which takes a second or so to plan, and at most so many more tokens.
_LENGTH_STEP = 64


def generation_methods(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods of a parallel module's class, or of a submodule, that make ``generate()`` of `original` work; none if
    it has none.
    """
    kind: Any = original
    if not (hasattr(kind, "generate") and hasattr(kind, "prepare_inputs_for_generation")):
        return {}

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The original's ``generate``; every rank must call it, and gets the same tokens."""
        root = self.__dict__.get("_parallel_root", lambda: self)()
        is_behind_encoder = getattr(self.config, "is_encoder_decoder", False)
        needs_cache = () if is_behind_encoder else ("inputs_embeds",)
        asked = [name for name in (*needs_cache, "past_key_values", "assistant_model") if kwargs.get(name) is not None]
        if asked:
            raise ModelError(
                f"generate({asked[0]}=...) needs a cache of keys and values, which a parallelized model has not: pass "
                "input_ids alone, or load full_state_dict() into the original model, and call its generate()"
            )
        if kwargs.get("use_cache", True) and not getattr(root, "_said_no_cache", False):
            root._said_no_cache = True
            _LOGGER.warning(
                "generate() of a parallelized %s runs without a cache: each token costs a pass over the whole text. To "
                "sample much, load full_state_dict() into the original model", kind.__name__,
            )  # fmt: skip
        follow_first_rank(root._communicator)
        with root.global_inputs():
            return kind.generate(self, *args, **kwargs | {"use_cache": False})

    def prepare(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the original makes of a text for `forward`, padded."""
        made = kind.prepare_inputs_for_generation(self, input_ids, *args, **kwargs)
        self.__dict__["_text_length"] = 0
        if "decoder_input_ids" in made:
            self.__dict__["_text_length"] = made["decoder_input_ids"].shape[1]
            return _pad_right(made, _longest(self.config, "max_target_positions", "max_position_embeddings"))
        longest = _longest(self.config, "max_position_embeddings")
        return _pad_left(made, longest, inspect.signature(kind.forward).parameters)

    def update(self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The original's, which sees what forward gives before any other: that of padding on the right is cut off."""
        if self.__dict__["_text_length"]:
            outputs.logits = outputs.logits[:, : self.__dict__["_text_length"]]
        return kind._update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs)

    # generate() looks there for what the model can begin with.
    prepare.__signature__ = inspect.signature(kind.prepare_inputs_for_generation)  # pyright: ignore
    return {
        "generate": generate,
        "prepare_inputs_for_generation": prepare,
        "_update_model_kwargs_for_generation": update,
    }


def _longest(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _padded_length(length: int, longest: int | None) -> int:
    padded = -(-length // _LENGTH_STEP) * _LENGTH_STEP
    return padded if longest is None else max(length, min(padded, longest))


def _pad_left(inputs: dict[str, Any], longest: int | None, names: Mapping[str, Any]) -> dict[str, Any]:
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    others = [x for x in inputs.values() if isinstance(x, Tensor) and x.shape != getattr(ids, "shape", None)]
    knows_places = "position_ids" in inputs or "position_ids" not in names
    if ids is None or others or "attention_mask" not in names or not knows_places:
        return inputs  # the model would not know which tokens are none
    missing = _padded_length(ids.shape[1], longest) - ids.shape[1]
    inputs = inputs | {"attention_mask": ids.new_ones(ids.shape) if mask is None else mask}
    return {name: functional.pad(x, (missing, 0)) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _pad_right(inputs: dict[str, Any], longest: int | None) -> dict[str, Any]:
    length = inputs["decoder_input_ids"].shape[1]
    missing = _padded_length(length, longest) - length
    of_text = {
        name: functional.pad(x, (0, missing))
        for name, x in inputs.items()
        if name.startswith("decoder_") and isinstance(x, Tensor) and x.shape[-1] == length
    }
    return inputs | of_text
