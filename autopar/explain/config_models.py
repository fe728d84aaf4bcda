"""Models of configuration files: those of transformers (text, images, both) and of diffusers, without their weights.

No model is known by name: what a class is for says the end of its name (``...ForMaskedLM``), and what it is called with
the arguments of its ``forward`` and the fields of its configuration.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from autopar.errors import QuestionError

__all__ = ["is_config", "model_of_config"]

_FACTORY = "Write a file with a factory that returns (model, example_inputs) and name it as file.py:factory"
# What follows "For" in the names of classes, where the auto class is called otherwise.
_AUTO_NAMES = {"ConditionalGeneration": "Seq2SeqLM"}
_LABEL_PER_TOKEN = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "TokenClassification")
_LABEL_PER_ROW = ("SequenceClassification", "ImageClassification")
# Tensors, not their entries: 61 layers of 384 experts (Kimi K2) have 70,000, and building 100,000 takes 30 s.
_MOST_PARAMETERS = 100_000
_TEXT_TOKENS = 77  # of the prompts that denoisers are conditioned on, where nobody says: CLIP's text encoder has 77


def is_config(data: Any) -> bool:
    """Whether JSON is a configuration of transformers or of a model of diffusers."""
    return isinstance(data, dict) and ("model_type" in data or "_class_name" in data)


def model_of_config(
    path: Path, data: Mapping[str, Any], batch: int | None, sequence: int | None, is_packed: bool | None
) -> tuple[Any, dict[str, Any], str]:
    """The model with one global batch, on the meta device, and the line of a script that makes them.

    `is_packed`: rows pack documents, which their ``position_ids`` tell; None: if the model takes these.

    Raises:
        QuestionError: it can't be built, or the configuration does not say what it is called with.
    """
    library = "transformers" if "model_type" in data else "diffusers"
    try:
        package: Any = importlib.import_module(library)
    except ImportError as error:
        family = "Hugging Face" if library == "transformers" else "diffusers"
        raise QuestionError(f"{str(path)!r} is a {family} config: pip install {library} to read it") from error
    if batch is None:
        raise QuestionError(f"{str(path)!r} says nothing of the batch: add --batch 64 (rows of the global batch)")
    make = _transformer if library == "transformers" else _denoiser
    try:
        with torch.device("meta"), _limited_size(path):
            model, recipe = make(package, data, path)
    except QuestionError:
        raise
    except Exception as error:  # a config is anybody's file, and the library raises what it happens to meet
        code = " without the code that its auto_map names, which is never run" if "auto_map" in data else ""
        kind = f"model_type {data['model_type']!r:.40}" if "model_type" in data else f"{data['_class_name']!r:.40}"
        raise QuestionError(
            f"{str(path)!r} ({kind}) is no model that {library} {package.__version__} builds{code}: "
            f"{type(error).__name__}: {error!s:.200}. {_FACTORY}"
        ) from error
    request = _ConfigRequest(path, model, batch, sequence)
    can_pack = "position_ids" in request.arguments
    if is_packed and not can_pack:
        raise QuestionError(
            f"{str(path)!r}: {type(model).__name__} has no position_ids to tell documents of a row apart"
        )
    request = replace(request, is_packed=can_pack if is_packed is None else is_packed)
    inputs = dict((_transformer_inputs if library == "transformers" else _denoiser_inputs)(request))
    written = ", ".join(f'"{name}": {_literal(value)}' for name, value in inputs.items())
    return model, inputs, f"{recipe}; inputs = {{{written}}}"


@contextmanager
def _limited_size(path: Path) -> Generator[None]:
    """Inside a model is built, which a typing error in a number of layers would have go on for hours.

    Raises:
        QuestionError: it has more parameters than any model.
    """
    count = 0

    def see(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > _MOST_PARAMETERS:
            raise QuestionError(
                f"{str(path)!r} has more than {_MOST_PARAMETERS:,} weights and biases: look for a number in it that is "
                f"too large, such as that of layers or experts. {_FACTORY}"
            )

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(see)
    try:
        yield
    finally:
        handle.remove()


def _literal(value: Any) -> str:
    """Python code for an example input; of a tensor only shape and dtype matter."""
    if not isinstance(value, Tensor):
        return repr(value)
    sizes = ", ".join(map(str, value.shape))
    return (
        f"torch.zeros({sizes}, dtype={value.dtype})"
        if value.dtype != torch.get_default_dtype()
        else f"torch.zeros({sizes})"
    )


def _transformer(transformers: Any, data: Mapping[str, Any], path: Path) -> tuple[Any, str]:
    config = transformers.AutoConfig.for_model(**data)
    config.use_cache = False
    for name in _auto_classes(config):
        if not hasattr(transformers, name):
            continue
        try:
            # Without a word on it, transformers asks whether to run the code that "auto_map" names.
            model = getattr(transformers, name).from_config(config, trust_remote_code=False)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            continue
        return model, f"model = {name}.from_config(AutoConfig.from_pretrained({str(path)!r}))"
    raise TypeError("no auto class knows its kind of configuration")


def _auto_classes(config: Any) -> Iterator[str]:
    """The auto classes to try in turn: of what the configuration names, then of what such a model is trained as."""
    for name in getattr(config, "architectures", None) or ():
        _, is_for, task = str(name).partition("For")
        if is_for:
            yield f"AutoModelFor{_AUTO_NAMES.get(task, task)}"
        elif name.endswith("LMHeadModel"):
            yield "AutoModelForCausalLM"
        else:
            yield "AutoModel"
    if getattr(config, "is_encoder_decoder", False):
        yield "AutoModelForSeq2SeqLM"
    elif not hasattr(config, "vision_config"):
        if not getattr(config, "is_decoder", False):
            yield "AutoModelForMaskedLM"
        yield from ("AutoModelForCausalLM", "AutoModelForImageClassification")
    yield "AutoModel"


def _denoiser(diffusers: Any, data: Mapping[str, Any], path: Path) -> tuple[Any, str]:
    name = data["_class_name"]
    model = getattr(diffusers, name).from_config(dict(data))
    return model, f"model = {name}.from_config({name}.load_config({str(path.parent)!r}))"


@dataclass(frozen=True)
class _ConfigRequest:
    """A model of `path`, and the batch that it is to be called with."""

    path: Path
    model: Any
    rows: int
    sequence: int | None
    is_packed: bool = False

    @property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.model.forward).parameters

    @property
    def config(self) -> Any:
        return self.model.config

    def length(self) -> int:
        """Tokens of a row."""
        length = self.sequence or getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(length, int) or length < 1:
            raise QuestionError(f"{str(self.path)!r} says nothing of the sequence length: add --seq 4096")
        return length

    def ids(self, *shape: int) -> Tensor:
        return torch.empty(self.rows, *shape, dtype=torch.int64, device="meta")

    def floats(self, *shape: int) -> Tensor:
        return torch.empty(self.rows, *shape, dtype=self.model.dtype, device="meta")

    def images(self, channels: str, side: str) -> Tensor:
        """By the fields of the configuration that have channels, and the side or sides in pixels."""
        config = getattr(self.config, "vision_config", self.config)
        number = getattr(config, channels, 3)
        sides: Any = getattr(config, side, None)
        pair = cast("Sequence[Any]", sides) if isinstance(sides, list | tuple) else (sides, sides)
        if len(pair) != 2 or not all(isinstance(each, int) and each > 0 for each in pair):
            raise QuestionError(f"{str(self.path)!r} says nothing of the size of images ({side!r}). {_FACTORY}")
        return self.floats(number, *pair)


def _transformer_inputs(request: _ConfigRequest) -> Iterator[tuple[str, Any]]:
    model, name = request.model, type(request.model).__name__
    has_both = {"input_ids", "pixel_values"} <= set(request.arguments)
    if has_both and "return_loss" in request.arguments:
        yield "input_ids", request.ids(request.length())
        yield "pixel_values", request.images("num_channels", "image_size")
        yield "return_loss", True
        return
    if has_both or model.main_input_name not in ("input_ids", "pixel_values"):
        both = "input_ids and pixel_values" if has_both else model.main_input_name
        raise QuestionError(f"{str(request.path)!r}: a config does not say what {both} of {name} look like. {_FACTORY}")
    if model.main_input_name == "input_ids":
        given = request.ids(request.length())
    elif request.sequence is not None:
        raise QuestionError(f"{str(request.path)!r}: {name} takes images, not tokens: leave --seq out")
    else:
        given = request.images("num_channels", "image_size")
    yield model.main_input_name, given
    if "labels" in request.arguments and name.endswith((*_LABEL_PER_TOKEN, *_LABEL_PER_ROW)):
        yield "labels", request.ids() if name.endswith(_LABEL_PER_ROW) else request.ids(*given.shape[1:])
    if request.is_packed:
        yield "position_ids", given


def _denoiser_inputs(request: _ConfigRequest) -> Iterator[tuple[str, Any]]:
    """What a denoiser of images is called with: arguments that it needs, and those that a field says it has."""
    config = request.config
    known: dict[str, tuple[str, Callable[[], Tensor]]] = {
        "sample": ("sample_size", lambda: request.images("in_channels", "sample_size")),
        "hidden_states": ("sample_size", lambda: request.images("in_channels", "sample_size")),
        "timestep": ("in_channels", request.ids),
        "encoder_hidden_states": (
            "cross_attention_dim", lambda: request.floats(request.sequence or _TEXT_TOKENS, config.cross_attention_dim),
        ),
        "class_labels": ("num_embeds_ada_norm", request.ids),
    }  # fmt: skip
    for name, parameter in request.arguments.items():
        field, make = known.get(name, ("", request.ids))
        if field and isinstance(getattr(config, field, None), int | list | tuple):
            yield name, make()
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise QuestionError(
                f"{str(request.path)!r}: a config does not say what {name!r} of {type(request.model).__name__} looks "
                f"like. {_FACTORY}"
            )
