"""Functions of parameters and gradients of pipeline stages, which every rank calls.

What changes or copies them entry by entry is done where they are.  A norm is joined from norms of parts.  All else is
computed of whole tensors, on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.compat import foreach_norm
from autopar.lower.parameters.dtensor_writes import is_by_element
from autopar.lower.parameters.function_calls import FunctionCall
from autopar.lower.parameters.known_meshes import placements_of, stage_norms, stages_of

__all__ = ["norm_order", "norms", "stays_in_parts"]

_torch: Any = torch  # the annotations of its norms are incomplete
_tensor: Any = Tensor
_VIEWS = frozenset(
    getter.__get__ for getter in (_tensor.T, _tensor.mT, _tensor.H, _tensor.mH, _tensor.real, _tensor.imag)
)
_NORMS = (foreach_norm, _torch.linalg.vector_norm, _torch.norm, _torch.Tensor.norm)
_COPIES = frozenset({
    "clone", "detach", "detach_", "to", "float", "double", "half", "bfloat16", "type", "cpu", "cuda", "contiguous",
    "alias", "zeros_like", "ones_like", "full_like", "empty_like", "requires_grad_", "neg", "abs", "sqrt", "square",
    "sign",
})  # fmt: skip
"""Of one tensor, entry by entry."""


def stays_in_parts(call: FunctionCall) -> bool:
    """Whether each entry of the result follows from the same entries of the arguments, which lie alike, or it is a
    property that has nothing to do with entries.
    """
    if call.name in _COPIES or (call.name in ("__get__", "__set__") and call.function not in _VIEWS):
        return True
    is_of_lists = call.name.startswith("_foreach_") and "max" not in call.name and "norm" not in call.name
    return (is_of_lists or is_by_element(call.name)) and _are_alike(call)


def _are_alike(call: FunctionCall) -> bool:
    """Whether the tensors among its arguments are DTensors of one shape and layout, or plain numbers."""
    if call.name.startswith("_foreach_"):
        return not call.is_mixed()
    first = call.known[0]
    return all(
        (not x.dim() and not isinstance(x, DTensor))
        or (isinstance(x, DTensor) and x.shape == first.shape and placements_of(x) == placements_of(first))
        for x in call.tensors
    )  # fmt: skip


def norm_order(call: FunctionCall) -> float | None:
    """The order of the norm of all of a tensor, or of each of a list; None: it is something else."""
    said = {key: value for key, value in call.kwargs.items() if value is not None and value is not False}
    if call.function not in _NORMS or not 1 <= len(call.args) <= 2 or not said.keys() <= {"ord", "p"}:
        return None
    given = (*call.args[1:], *said.values(), 2.0)[0]
    order = 2.0 if given in ("fro", None) else given
    is_number = isinstance(order, int | float) and order > 0
    return float(order) if is_number and not _has_graph(call) else None


def _has_graph(call: FunctionCall) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors)


def norms(call: FunctionCall, order: float) -> Any:
    """The norms as plain scalars."""
    if call.function is not foreach_norm:
        return stage_norms([call.known[0]], order)[0]
    of_stages = [x for x in call.known if stages_of(x) is not None]
    joint = {id(x): norm for x, norm in zip(of_stages, stage_norms(of_stages, order), strict=True)}
    return [joint[id(x)] if id(x) in joint else foreach_norm([x], order)[0] for x in call.args[0]]
