"""Gradients of pipeline stages, for `torch.nn.utils.clip_grad_norm_` and `get_total_norm`.

These take the norm of each gradient, stack the norms and take the norm of the stack.  A rank has the gradients of its
own stages only, so here the norm of a stack of norms of gradients is that of the gradients of all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import GradientNormError
from autopar.lower.compat import dtensor_like, foreach_norm, local_part_of, make_dtensor, map_leaves, tensor_norms
from autopar.lower.parameters.gradient_norm import GradientNorm
from autopar.placement import REPLICATE

__all__ = ["StageGradient"]

_torch: Any = torch  # the annotations of its norms are incomplete
_NORMS = (foreach_norm, _torch.linalg.vector_norm, _torch.norm, _torch.Tensor.norm)
_JOINT = (
    "a norm of gradients (with pipeline stages of all of model.parameters(), or by model.clip_grad_norm_), number {}"
)
_COPIES = (Tensor.to, Tensor.detach, Tensor.float, Tensor.double)


class StageGradient(DTensor):
    """The gradient of the parameter of the name `parameter`, whose norm `joint` joins with those of other stages."""

    parameter: str
    joint: GradientNorm

    @classmethod
    def of(cls, x: DTensor, **attributes: Any) -> Self:
        """`x`, sharing its memory, with these attributes."""
        made = dtensor_like(local_part_of(x), x, cls)
        vars(made).update(attributes)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As of any DTensor, but for norms of whole gradients."""
        order = _order(func, args, kwargs or {})
        if order is not None:
            return [_norm(x, order) for x in args[0]] if func is foreach_norm else _norm(args[0], order)
        untyped: Any = super()
        made = untyped.__torch_function__(func, types, args, kwargs or {})
        return cls.of(made, **vars(args[0])) if func in _COPIES and isinstance(args[0], cls) else made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What subclasses of DTensor get from torch 2.13 on: the op on plain DTensors."""
        plain = map_leaves(_plain, (tuple(args), dict(kwargs or {})))
        return func(*plain[0], **plain[1])


def _plain(x: Any) -> Any:
    return dtensor_like(local_part_of(x), x) if isinstance(x, StageGradient) else x


def _norm(x: Tensor, order: float) -> Tensor:
    if not isinstance(x, StageGradient):
        return tensor_norms([x], order)[0]
    plain: Any = _plain(x)
    # A rank with nothing to train has a gradient without elements, which has no largest one.
    norm: Any = tensor_norms([plain], order)[0] if x.numel() else plain.sum()
    return _Norm.of(norm, **{**vars(x), "order": order})


class _Norm(StageGradient):
    """The norm, of this order, of a gradient."""

    order: float

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.stack and len(args) == 1 and not kwargs:
            return _Norms.of_parts(args[0])
        return super().__torch_function__(func, types, args, kwargs)


class _Norms(DTensor):
    """A stack of `parts`, norms of gradients and others; it is computed only when more than its norm is read."""

    parts: Sequence[Tensor]

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor]) -> Self:
        """The stack, with sizes and dtype only."""
        store = next(part for part in parts if isinstance(part, _Norm)).joint.store
        local = torch.stack([local_part_of(part) for part in parts])
        whole = make_dtensor(local, store.device_mesh, (REPLICATE,) * len(store.mesh), local.shape)
        made = dtensor_like(local, whole, cls)
        made.parts = tuple(parts)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        order = _order(func, args, kwargs or {})
        if order is not None and all(part.order == order for part in args[0].parts if isinstance(part, _Norm)):
            return _total(args[0].parts, order)
        made = map_leaves(_stacked, (tuple(args), dict(kwargs or {})))
        return func(*made[0], **made[1])


def _order(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """The order of the norm of all of a tensor; None: `func` is something else."""
    said = {key: value for key, value in kwargs.items() if value is not None and value is not False}
    if func not in _NORMS or not 1 <= len(args) <= 2 or not said.keys() <= {"ord", "p"}:
        return None
    order = (*args[1:], *said.values(), 2.0)[0]
    return 2.0 if order == "fro" else float(order)


def _stacked(x: Any) -> Any:
    if not isinstance(x, _Norms):
        return x
    return torch.stack([_plain(part) for part in x.parts])


def _total(norms: Sequence[Tensor], order: float) -> Tensor:
    """The norm of what has these norms, and of what the other stages have."""
    if not order > 0:
        raise GradientNormError(
            f"the norm of all gradients is of order {order:g}, but with pipeline stages only positive orders are "
            "supported (inf for the largest entry): pass one as norm_type"
        )
    by_model: dict[GradientNorm, dict[str, Tensor]] = {}
    for norm in norms:
        if isinstance(norm, _Norm):
            by_model.setdefault(norm.joint, {})[norm.parameter] = local_part_of(norm)
    totals = [_total_of_model(joint, own, order) for joint, own in by_model.items()]
    totals += [norm for norm in norms if not isinstance(norm, _Norm)]
    (total,) = tensor_norms([torch.stack(totals)], order)
    return total


def _total_of_model(joint: GradientNorm, norms: Mapping[str, Tensor], order: float) -> Tensor:
    calls = joint.communicator.calls
    if calls is not None:  # a rank that has none of these gradients does something else now, and is told
        calls.enter(_JOINT, lambda: (None, ()))
    named = joint.store.module.named_parameters()
    left_out = [name for name, p in named if p.grad is not None and p.numel() and name not in norms]
    count = joint.over_stages(torch.tensor(float(len(left_out)), device=joint.communicator.device), "sum")
    if count > 0:
        raise GradientNormError(
            f"{int(count)} gradients (here {left_out[:3]}) were left out of a norm that torch.nn.utils takes, but with "
            "pipeline stages only the norm of all gradients is supported: pass all of model.parameters(), or call "
            "model.clip_grad_norm_(max_norm). To clip groups of parameters apart, plan without stages ('pipeline=1')"
        )
    total = joint.total([(name, norm) for name, norm in norms.items() if name in joint.store.stored], order)
    return total.to(reduce(torch.promote_types, (stored.dtype for stored in joint.store.stored.values())))
