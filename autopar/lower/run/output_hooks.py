"""Hooks of the caller's on gradients of outputs, which see only what the caller computes of them.

A loss that the model computes of its logits sends its gradient to them inside of the step, where no hook runs: a hook
that changes it, or `retain_grad`, would go without a word.  So the step's backward raises there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import hooks

from autopar.errors import OutputError
from autopar.lower.autograd import on_gradient
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.compat import hooks_on
from autopar.lower.run.carried_tensor import CarriedTensor
from autopar.lower.run.execution import Executor

__all__ = ["with_checked_hooks"]


class _Watched:
    """Outputs of a call that others are computed of inside, as the caller got them."""

    def __init__(self, executor: Executor) -> None:
        self._sources = executor.executable.program.output_sources
        self._calls = executor.communicator.calls
        self._given: dict[str, weakref.ref[Tensor]] = {}

    def add(self, name: str, x: Tensor) -> Tensor:
        """`x` itself, which the caller is about to get."""
        if x.requires_grad:
            on_gradient(x, _unsaved(partial(self._check, name)))
            self._given[name] = weakref.ref(x)
        return x

    def _check(self, name: str, gradient: Tensor | None) -> None:
        """That nobody waits for a gradient which this output's backward gives inside.

        Outputs of one node of autograd have hooks called together, without a gradient where none has come.

        Raises:
            OutputError: somebody does.
        """
        sources = sorted(self._sources[name] & self._given.keys()) if gradient is not None else [name]
        for source in sources:
            x = self._given[source]()
            if x is not None and _has_hooks(x):
                with nullcontext() if self._calls is None else self._calls.failing():
                    raise OutputError(
                        f"the output {source!r} has a hook on its gradient (register_hook, retain_grad), which would "
                        "miss what an output that the model computes of it gives it inside of the model, as a loss "
                        f"does, which is one program. Compute the loss of {source!r} outside, or change its gradient "
                        "in forward, by a torch.autograd.Function"
                    )


def _unsaved(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """`hook`, without which outputs are saved, and without a warning."""
    untyped: Any = hooks
    return untyped.unserializable_hook(hook)


def _has_hooks(x: Tensor) -> bool:
    """Whether the caller wants to see the gradient of `x`; autopar has hooks of its own."""
    found = (hook.func if isinstance(hook, partial) else hook for hook in hooks_on(x))
    return x.retains_grad or not all(getattr(hook, "__module__", "").startswith("autopar.") for hook in found)


def with_checked_hooks(executor: Executor, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`outputs`, whose backward raises OutputError where a hook of the caller's would miss a gradient."""
    names = executor.executable.program.outputs
    sources = executor.executable.program.output_sources
    watched = _Watched(executor)
    seen = {name for name in names if sources[name]}.union(*(sources[name] for name in names))

    def watch(name: str, x: Tensor | None) -> Tensor | None:
        if x is None or name not in seen or isinstance(x, DTensor | CarriedTensor):
            return x
        return x.followed_by(partial(watched.add, name)) if isinstance(x, LateTensor) else watched.add(name, x)

    made: dict[str, Tensor | None] = {name: watch(name, x) for name, x in zip(names, outputs, strict=True)}
    return [made[name] for name in names]
