"""Random numbers for a parameter or gradient are drawn for the whole tensor, and are those of the first rank.

torch's DTensor draws for each rank's part from that rank's generator: on CPUs the same numbers in each part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.lower.compat import local_tensor
from autopar.lower.parameters.function_calls import FunctionCall, plain
from autopar.lower.parameters.known_meshes import share_whole
from autopar.lower.parameters.view_writes import write_through

__all__ = ["draw_in_place", "draw_like", "draws_in_place", "draws_like"]

_IN_PLACE = frozenset({
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_",
})  # fmt: skip
_LIKE = frozenset({"randn_like", "rand_like", "randint_like"})


def draws_in_place(call: FunctionCall) -> bool:
    """Whether it gives a tensor random numbers, or is one of the initializers that torch lets tensors overload."""
    return call.name in _IN_PLACE or _is_initializer(call)


def _is_initializer(call: FunctionCall) -> bool:
    """``nn.init.normal_`` has the name of ``Tensor.normal_``, but also writes to a parameter that requires grad."""
    return getattr(call.function, "__module__", "") == "torch.nn.init"


def draw_in_place(call: FunctionCall) -> Any:
    """Give a DTensor the random numbers that one device draws for it."""
    target = call.known[0]
    if target.requires_grad and torch.is_grad_enabled() and not _is_initializer(call):
        return call.natively()  # torch says that a parameter that requires grad can't be written to
    with torch.no_grad():
        whole = _memory(target)
        call.with_leaves(lambda x: whole if x is target else plain(x))
        local_tensor(target).copy_(local_tensor(share_whole(whole, target)))
    write_through(target)
    return target


def draws_like(call: FunctionCall) -> bool:
    """Whether it makes a tensor of random numbers of the shape of its argument."""
    return call.name in _LIKE


def draw_like(call: FunctionCall) -> DTensor:
    """A DTensor laid out as the argument, with the random numbers that one device draws."""
    like = call.known[0]
    whole = _memory(like)
    drawn = call.with_leaves(lambda x: whole if x is like else x)
    made = share_whole(drawn, like)
    made.requires_grad_(bool(call.kwargs.get("requires_grad", False)))
    return made


def _memory(x: DTensor) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device=local_tensor(x).device)
