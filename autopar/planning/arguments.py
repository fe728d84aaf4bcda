"""Parsing of keyword arguments: amounts of memory, constraints, dtypes, inputs and outputs, the optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from autopar.errors import ConstraintError, MaterializationError
from autopar.plan import Plan
from autopar.planning.optimizer_state import state_bytes_per_element, whole_states
from autopar.search import TrainingSpec
from autopar.search.pipeline.pipeline_constraints import stages_demanded
from autopar.search.settings.constraints import check_patterns, parse_constraints

__all__ = [
    "check_constraints",
    "check_materialized",
    "layers_demanded",
    "read_bytes",
    "read_constraints",
    "read_dtype",
    "read_outputs",
    "training_spec",
]

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32, "fp64": torch.float64, "float64": torch.float64,
}  # fmt: skip


def read_bytes(memory: float | str) -> float:
    """Bytes, from a number or from text such as ``"70GiB"`` or ``"80 GB"``.

    Raises:
        ConstraintError: it is neither, or not positive.
    """
    if not isinstance(memory, str):
        try:
            number, unit = float(memory), ""
        except (TypeError, OverflowError):
            number, unit = 0.0, "?"
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", memory)
        number, unit = (float(match[1]), match[2].upper()) if match else (0.0, "?")
    if unit not in _UNITS or not 0 < number < math.inf:
        raise ConstraintError(
            f"memory={memory!r:.80} is not an amount of memory: write bytes as a number, or text such as "
            "'70GiB' or '80GB'"
        )
    return number * _UNITS[unit]


def read_constraints(constraints: Any) -> tuple[str, ...]:
    """The texts of constraints; a text alone is one, None is none.

    Raises:
        ConstraintError: they are no texts.
    """
    if constraints is None:
        return ()
    if isinstance(constraints, str):
        return (constraints,)
    texts = tuple(cast("Iterable[Any]", constraints)) if isinstance(constraints, Iterable) else (constraints,)
    if not all(isinstance(text, str) for text in texts):
        raise ConstraintError(f"constraints={constraints!r:.80}: write a list of texts, such as ['tensor=2', 'zero=3']")
    return texts


def check_constraints(model: nn.Module, constraints: Any, world_size: int) -> tuple[str, ...]:
    """The texts of constraints, checked for all errors that can be seen without tracing `model`.

    Raises:
        ConstraintError: they can't be read, contradict each other, or name no parameter and no module.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in cast("Iterable[tuple[str, Any]]", model.named_modules(remove_duplicate=False))]
    texts = read_constraints(constraints)
    check_patterns(parse_constraints(texts, world_size), names)
    return texts


def layers_demanded(texts: Iterable[str], world_size: int, plan: Plan | None = None) -> int:
    """Into at least how many layers a model is cut, for a plan that is given or constraints on the search for one."""
    return stages_demanded(parse_constraints(texts, world_size)) if plan is None else len(plan.decisions.layers)


def read_dtype(precision: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype to compute in; None for the parameters' own.

    Raises:
        ConstraintError: not a floating dtype.
    """
    if precision is None:
        return None
    dtype = _DTYPES.get(precision) if isinstance(precision, str) else precision
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConstraintError(
            f"precision={precision!r} is not a floating-point dtype: use one of {', '.join(_DTYPES)}, "
            "a torch.dtype, or None for the dtype that the parameters have"
        )
    return dtype


def are_inputs_local(inputs: str) -> bool:
    """Whether each rank calls the module with rows of its own.

    Raises:
        ConstraintError: `inputs` is no word for either.
    """
    if inputs not in ("global", "local"):
        raise ConstraintError(
            f"inputs={inputs!r}: write 'global' where every rank passes the whole batch, or 'local' where each passes "
            "its own rows of it"
        )
    return inputs == "local"


def read_outputs(outputs: str | None) -> bool | None:
    """What `ParallelModule.whole_outputs` is to be.

    Raises:
        ConstraintError: `outputs` is no word for it.
    """
    words = {None: None, "whole": True, "local": False}
    if outputs not in words:
        raise ConstraintError(
            f"outputs={outputs!r}: write 'whole' for whole tensors on every rank, 'local' for what this rank has, or "
            "None for whole ones in eval mode, and in training when they are read"
        )
    return words[outputs]


def training_spec(model: nn.Module, optimizer: str | Callable[..., torch.optim.Optimizer]) -> TrainingSpec:
    """What training by `optimizer` takes per parameter.

    Gradients and stored parameters have the parameters' dtype.

    Raises:
        ConstraintError: the optimizer is not known.
    """
    itemsize = max((p.element_size() for p in model.parameters() if p.requires_grad), default=4)
    return TrainingSpec(
        optimizer_state_bytes_per_element=state_bytes_per_element(model, optimizer),
        gradient_itemsize_bytes=itemsize,
        storage_itemsize_bytes=itemsize,
        whole_states=whole_states(optimizer),
    )


def check_materialized(model: nn.Module) -> None:
    """Raise unless every parameter and buffer of `model` has values.

    Raises:
        MaterializationError: naming the first on the meta device.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise MaterializationError(
                f"{name!r} is on the meta device, so there are no values to compute with: call "
                "autopar.materialize(model) first, which gives all of them on this device"
            )
