"""Targets of a question: a factory in a module or file, a Hugging Face config, or a saved plan."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn

from autopar.errors import QuestionError
from autopar.explain.config_models import is_config, model_of_config
from autopar.plan import Plan
from autopar.user_text.json_reading import read_json

__all__ = ["ModelTarget", "load_target"]


@dataclass(frozen=True)
class ModelTarget:
    """A model with one global batch; parameters and inputs may be on the meta device.

    `recipe` is the line of a script that makes both.
    """

    model: nn.Module
    example_inputs: Any
    recipe: str


def load_target(
    text: str, batch: int | None = None, sequence: int | None = None, is_packed: bool | None = False
) -> ModelTarget | Plan:
    """What `text` names.

    Args:
        text: ``"package.module:factory"``, ``"file.py:factory"``, the path of a ``config.json`` of transformers or
            diffusers (see `autopar.explain.config_models`), or the path of a saved plan.
        batch: rows of the batch; a factory gets it as ``batch=`` if it has such a parameter.
        sequence: tokens of a row; a factory gets it as ``seq=`` or ``sequence=``.
        is_packed: rows of a ``config.json`` pack documents, which their ``position_ids`` tell; None: if it takes these.

    Raises:
        QuestionError: it names nothing of the kind; the message says what was looked for.
    """
    if text.endswith(".json"):
        return _load_json(Path(text), batch, sequence, is_packed)
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise QuestionError(
            f"{text!r} names no model: write package.module:factory, file.py:factory{_example(text)}, the path of a "
            "Hugging Face config.json, or the path of a saved plan (*.json)"
        )
    module = _import(place)
    if not hasattr(module, name):
        known = ", ".join(_functions(Path(str(module.__file__)))) if module.__file__ else ""
        raise QuestionError(f"{text!r}: there is no function of that name; {place} has {known or 'none'}")
    return _call_factory(text, getattr(module, name), batch, sequence)


def _example(text: str) -> str:
    """The first function of a file that was named without one."""
    result = _functions(Path(text)) if text.endswith(".py") and Path(text).is_file() else []
    return f" (such as {text}:{result[0]})" if result else ""


def _functions(path: Path) -> list[str]:
    """The functions at the top of a file."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _load_json(path: Path, batch: int | None, sequence: int | None, is_packed: bool | None) -> ModelTarget | Plan:
    try:
        text = path.read_text(encoding="utf-8")
        data = read_json(text)
    except OSError as error:
        raise QuestionError(
            f"{str(path)!r} can't be read: {error.strerror}; give the path of a Hugging Face config.json or of a saved "
            "plan, or name a factory as file.py:factory"
        ) from error
    except ValueError as error:
        raise QuestionError(f"{str(path)!r} is no JSON: {error}") from error
    if isinstance(data, dict) and "autopar_plan" in data:
        return Plan.from_json(text)
    if is_config(data):
        return ModelTarget(*model_of_config(path, cast("dict[str, Any]", data), batch, sequence, is_packed))
    raise QuestionError(
        f"{str(path)!r} is neither a saved plan (it has no 'autopar_plan') nor a config of transformers (no "
        "'model_type') or of diffusers (no '_class_name')"
    )


def _import(place: str) -> ModuleType:
    if place.startswith(".") and not place.endswith(".py"):
        raise QuestionError(
            f"module {place!r} has no name: write package.module:factory, or file.py:factory for a file"
        )
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        try:
            with _explained(place, "was imported", "put what it runs under if __name__ == '__main__'"):
                return _import_module(place)
        finally:
            sys.path.remove("")
    path = Path(place)
    if not path.is_file():
        raise QuestionError(f"there is no file {place!r}: give its path from {str(Path.cwd())!r}, as file.py:factory")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with _explained(place, "was imported", "put what it runs under if __name__ == '__main__'"):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _import_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise QuestionError(f"module {place!r} can't be imported: {error}. For a file write file.py:factory") from error


@contextmanager
def _explained(text: str, what: str, instead: str) -> Generator[None]:
    """Inside is the user's own code.

    Raises:
        QuestionError: it failed, or ended the process; the message names its line.
    """
    try:
        yield
    except QuestionError:
        raise
    except SystemExit as error:
        raise QuestionError(f"{text!r} ended the process ({error.code}) when it {what}: {instead}") from error
    except Exception as error:  # whatever the user's code raises
        frames = traceback.extract_tb(error.__traceback__)[1:]
        where = next((f" at {each.filename}:{each.lineno}" for each in reversed(frames) if _is_users(each)), "")
        raise QuestionError(
            f"{text!r} failed{where} when it {what}: {type(error).__name__}: {error!s:.300}. Call it "
            "in Python to see more"
        ) from error


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is neither of an installed package nor of Python's own."""
    others = ("<", sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
    return not frame.filename.startswith(others) and "site-packages" not in frame.filename


def _parameters(text: str, factory: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError as error:  # functions that are not written in Python
        raise QuestionError(f"{text!r} doesn't say what it takes: write a function around it in Python") from error


def _is_required(parameter: inspect.Parameter) -> bool:
    is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_open


def _call_factory(text: str, factory: Any, batch: int | None, sequence: int | None) -> ModelTarget:
    if not callable(factory):
        raise QuestionError(f"{text!r} is not a function: name one that returns a model, or (model, example_inputs)")
    arguments = {"batch": batch, "seq": sequence, "sequence": sequence}
    known = _parameters(text, factory)
    given = {name: value for name, value in arguments.items() if name in known and value is not None}
    missing = [name for name, each in known.items() if _is_required(each) and name not in given]
    if missing:
        wanted = [name for name in missing if name in arguments]
        raise QuestionError(
            f"{text!r} needs {', '.join(missing)}: "
            + (
                f"add --{wanted[0].removesuffix('uence')}"
                if wanted == missing
                else "write a function without them around it"
            )
        )
    if (batch is not None and "batch" not in given) or (sequence is not None and not {"seq", "sequence"} & set(given)):
        raise QuestionError(
            f"{text!r} takes {', '.join(known) or 'no arguments'}: give it parameters batch and seq for --batch and "
            "--seq to go to, or leave these out"
        )
    with _explained(text, "was called", "return a model, or (model, example_inputs)"):
        made: Any = factory(**given)
    called = f"{text.rpartition(':')[2]}({', '.join(f'{name}={value}' for name, value in given.items())})"
    pair = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else ()
    if len(pair) == 2 and isinstance(pair[0], nn.Module):
        return ModelTarget(pair[0], pair[1], f"model, inputs = {called}")
    if isinstance(made, nn.Module):
        return ModelTarget(made, None, f"model, inputs = {called}, None")
    kind = str(type(cast("object", made)).__name__)
    raise QuestionError(f"{text!r} returned a {kind}: return a model, or (model, example_inputs)")
