"""Collectives of ``torch.distributed`` that a script calls on parameters and gradients, as those without DDP do.

``dist.all_reduce(p.grad)`` and ``dist.broadcast(p.data, 0)`` see whole tensors, as every rank of the script has them:
the sum over four ranks is four times the gradient, which the script divides by four.  What they wrote is kept by each
rank for its part, which is right where they write the same on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from autopar.errors import ModelError
from autopar.lower.parameters.dtensor_writes import write_arguments
from autopar.lower.parameters.function_calls import FunctionCall, find_tensors

__all__ = ["is_collective", "run_collective"]

_untyped: Any = dist
_MODULE = _untyped.all_reduce.__module__
_WRITE_ALIKE = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_single",
})  # fmt: skip
"""Each rank of the group has the same in its outputs."""
_SENDS = frozenset({"send", "isend", "gather"})
"""Their first argument is read only."""


def is_collective(call: FunctionCall) -> bool:
    """Whether it is a function of ``torch.distributed`` that communicates."""
    return getattr(call.function, "__module__", None) == _MODULE


def run_collective(call: FunctionCall) -> Any:
    """What the function returns; it has ended then, also with ``async_op=True``.

    Raises:
        ModelError: it would write to a parameter or gradient what other ranks don't have.
    """
    outputs = set[int]() if call.name in _SENDS else set(map(id, find_tensors(call.args[:1])))
    written = [x for x in call.known if id(x) in outputs]
    if written and call.name not in _WRITE_ALIKE:
        raise ModelError(
            f"torch.distributed.{call.name} writes to a parameter or gradient of shape {list(written[0].shape)}, and "
            "not the same on every rank, but each rank keeps only a part of it: use all_reduce or broadcast. Gradients "
            "of a parallelized model are already those of the whole batch"
        )
    return write_arguments(replace(call, function=_ended(call)), written)


def _ended(call: FunctionCall) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        work = call.function(*args, **kwargs)
        if hasattr(work, "wait"):
            work.wait()
        return work

    return run
