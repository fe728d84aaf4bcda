"""``generate()`` of language models that have one, such as Hugging Face's: the same tokens on every rank.

With a cache of keys and values a text costs one pass over what it begins with, and one over each new token: two
programs, whose caches have room for one of few numbers of tokens.  Without a cache every new token runs the whole text.
So that not every length is a program of its own, texts are padded to the next of few lengths: on the left, where a
mask and positions say so; behind an encoder on the right, where no token sees what comes after it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import ExampleInputsError, InfeasibleError, ModelError, OutputError, TraceError
from autopar.lower.kernels.random import follow_first_rank
from autopar.lower.run.growing_text import GrowingText, pad_left, pad_right

__all__ = ["generation_methods"]

_LOGGER = logging.getLogger("autopar")
_NO_PLAN = (TraceError, ExampleInputsError, OutputError, InfeasibleError)
_NEED_OTHER_CACHES = ("cache_implementation", "prefill_chunk_size", "guidance_scale", "prompt_lookup_num_tokens")
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}  # others have states that a `TokenCache` has not


def generation_methods(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods of a parallel module's class, or of a submodule, that make ``generate()`` of `original` work; none if
    it has none.
    """
    kind: Any = original
    if not (hasattr(kind, "generate") and hasattr(kind, "prepare_inputs_for_generation")):
        return {}
    made = {"generate": _generate, "prepare_inputs_for_generation": _prepare}
    made["_update_model_kwargs_for_generation"] = _update
    if hasattr(kind, "_prepare_cache_for_generation"):  # else it may hold a model that has it
        made["_prepare_cache_for_generation"] = _prepare_cache
    return {name: _of_kind(function, getattr(kind, name, None), kind) for name, function in made.items()}


def _of_kind(function: Callable[..., Any], original: Any, kind: Any) -> Callable[..., Any]:
    """`function` as a method, which gets the original's class first."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(kind, self, *args, **kwargs)

    if original is not None:  # generate() looks there for what the model can begin with
        method.__signature__ = inspect.signature(original)  # pyright: ignore[reportFunctionMemberAccess]
    method.__doc__ = function.__doc__
    return method


def _generate(kind: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The original's ``generate``; every rank must call it, and gets the same tokens."""
    root = _root(self)
    needs_cache = () if getattr(self.config, "is_encoder_decoder", False) else ("inputs_embeds",)
    unsupported = [
        name for name in (*needs_cache, "past_key_values", "cache", "assistant_model") if kwargs.get(name) is not None
    ]
    if unsupported:
        raise ModelError(
            f"generate({unsupported[0]}=...) needs a cache that a parallelized model does not have: pass input_ids "
            "alone, or load full_state_dict() into the original model, and call its generate()"
        )
    if not hasattr(self, "_prepare_cache_for_generation"):
        kwargs["use_cache"] = False
    follow_first_rank(root._communicator)
    rewind = _rewinds_draws(root._communicator.device)
    with root.global_inputs():
        try:
            return kind.generate(self, *args, **kwargs)
        except _NO_PLAN as error:
            if not root.__dict__.pop("_has_cache", False):
                raise
            root._no_cache = f"its calls with a cache can't be planned ({error})"
        finally:
            root._executors.forget_copies()
        rewind()
        return kind.generate(self, *args, **kwargs)


def _rewinds_draws(device: torch.device) -> Callable[[], None]:
    """What has the host and `device` draw again what they draw from now on."""
    host, module = torch.get_rng_state(), torch.get_device_module(device)
    own = None if device.type == "cpu" else module.get_rng_state(device)

    def rewind() -> None:
        torch.set_rng_state(host)
        if own is not None:
            module.set_rng_state(own, device)

    return rewind


def _prepare_cache(kind: Any, self: Any, generation_config: Any, model_kwargs: dict[str, Any], *_: Any) -> None:
    """Instead of the original's cache one that ranks hold in parts, or none."""
    if generation_config.use_cache is False:
        return
    root = _root(self)
    why_not = _why_no_cache(self, root, generation_config, inspect.signature(kind.forward).parameters)
    root.__dict__["_has_cache"] = not why_not
    if not why_not:
        name = _cache_name(kind)
        model_kwargs[name] = GrowingText(generation_config.max_length, name)
        return
    generation_config.use_cache = False
    if not getattr(root, "_said_no_cache", False):
        root._said_no_cache = True
        _LOGGER.warning(
            "generate() of a parallelized %s runs without a cache: each token costs a pass over the whole text, as %s. "
            "To sample much, load full_state_dict() into the original model", kind.__name__, why_not,
        )  # fmt: skip


def _prepare(kind: Any, self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What the original makes of a text for `forward`, padded."""
    made = kind.prepare_inputs_for_generation(self, *args, **kwargs)
    names = inspect.signature(kind.forward).parameters
    text = made.get(_cache_name(kind))
    if isinstance(text, GrowingText):
        return text.prepare(made, self.config, names)
    self.__dict__["_text_length"] = 0
    if "decoder_input_ids" in made:
        self.__dict__["_text_length"] = made["decoder_input_ids"].shape[1]
        return pad_right(made, self.config)
    return pad_left(made, self.config, names)


def _update(
    kind: Any, self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The original's, which sees what forward gives before any other: that of padding on the right is cut off."""
    name = _cache_name(kind)
    text = model_kwargs.get(name)
    if isinstance(text, GrowingText):
        text.cache, outputs[name] = outputs[name], text
        text.cache.rows = None  # has taken effect
    elif self.__dict__["_text_length"]:
        outputs.logits = outputs.logits[:, : self.__dict__["_text_length"]]
    return kind._update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs)


def _cache_name(kind: Any) -> str:
    """What transformers calls keys and values of a text, as an argument and an output: since 5.24 `cache`."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def _root(module: Any) -> Any:
    return module.__dict__.get("_parallel_root", lambda: module)()


def _why_no_cache(model: Any, root: Any, generation_config: Any, arguments: Mapping[str, Any]) -> str:
    """Why a text can't be continued with a `TokenCache`; ``""`` if it can."""
    config = model.config.get_text_config(decoder=True)
    layers = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    passed = [name for name in _NEED_OTHER_CACHES if getattr(generation_config, name, None) is not None]
    reasons = {
        getattr(root, "_no_cache", ""): bool(getattr(root, "_no_cache", "")),
        "the model is in training mode": root.training,
        "its plan has pipeline stages": root._executor.stages.is_pipeline,
        "the text is behind an encoder": model.config.is_encoder_decoder,
        "its forward takes no attention_mask": "attention_mask" not in arguments,
        f"it has layers of {', '.join(sorted(layers))}": bool(layers),
        "its attention is in chunks": getattr(config, "attention_chunk_size", None) is not None,
        "its class does not say that a cache of fixed size works (_can_compile_fullgraph)": not getattr(
            model, "_can_compile_fullgraph", False
        ),
        f"{', '.join(passed)} was passed": bool(passed),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
