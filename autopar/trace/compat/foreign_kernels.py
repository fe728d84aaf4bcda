"""Functions that launch kernels of their own, on tensors with and without memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from autopar.trace.compat import torch_internals

__all__ = ["forgetting_values", "in_own_memory", "launches_left_out"]


@contextmanager
def launches_left_out() -> Generator[list[Any]]:
    """Inside, a Triton kernel that is given a tensor without memory isn't launched: it would write to address 0, and
    has only values to write; what it writes to was made, in its shape, before.  Gives the kernels, as they come.

    ``kernel[grid](...)`` is how Triton launches, whether a kernel is tuned or not.
    """
    left_out: list[Any] = []
    triton: Any = sys.modules.get("triton")
    if triton is None:
        yield left_out
        return
    owner: Any = triton.runtime.jit.KernelInterface
    launcher = owner.__getitem__

    def choose(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = launcher(kernel, grid)

        def maybe(*args: Any, **kwargs: Any) -> Any:
            given = torch_internals.flatten((args, kwargs))[0]
            if not any(map(torch_internals.is_fake, given)):
                return launch(*args, **kwargs)
            left_out.append(kernel)
            return None

        return maybe

    owner.__getitem__ = choose
    try:
        yield left_out
    finally:
        owner.__getitem__ = launcher


class _Decisions(torch_internals.DispatchMode):
    """Conditions on values hold, which tensors without memory can't tell: what a function checks is right, mostly."""

    were_asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            self.were_asked = True
            return True
        return func(*args, **(kwargs or {}))


@contextmanager
def forgetting_values(tensors: Iterable[Tensor]) -> Generator[_Decisions]:
    """Inside, a function of these tensors runs although they may have no values, if its shapes don't depend on them.

    What is given says whether it asked for a condition on values.
    """
    mode = next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), None)
    decisions = _Decisions()
    if mode is None:
        yield decisions
        return
    assert mode.shape_env is not None
    with (
        mode.shape_env.ignore_fresh_unbacked_symbols(),
        decisions,
        # Tracing notes what a model reads, not what its functions do.
        patch.object(Tensor, "item", torch._C.TensorBase.item),  # pyright: ignore[reportPrivateUsage]
    ):
        yield decisions


def in_own_memory(results: Iterable[Tensor], operands: Iterable[Tensor]) -> list[Tensor]:
    """What a functional op may return: copies of those results that share memory with an operand or with each other, as
    gradients do that a kernel cuts out of one buffer.
    """
    taken = {torch_internals.storage_key(x) for x in operands}
    own: list[Tensor] = []
    for x in results:
        own.append(x.clone() if torch_internals.storage_key(x) in taken else x)
        taken.add(torch_internals.storage_key(own[-1]))
    return own
