"""Parts of torch.autograd whose annotations are incomplete, each behind a small function with its types."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import checkpoint

__all__ = [
    "ambient_autocast",
    "backward_token",
    "before_backward",
    "call_function",
    "call_untraced",
    "edge_of",
    "enter_graph",
    "gradients_of",
    "is_custom_node",
    "leaves_behind",
    "on_gradient",
    "refuse_gradient",
    "run_backward",
    "run_backward_from",
    "run_twice",
]


def call_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, whose annotations are incomplete."""
    untyped: Any = function
    return untyped.apply(*args)


def call_untraced(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, with a backward that Dynamo does not trace.

    On CPUs autograd runs backward in the thread that asks for it: in a training step that is compiled as a whole Dynamo
    would trace what runs the plan there.
    """
    return call_function(_untraced(function) if "torch._dynamo" in sys.modules else function, *args)


@cache
def _untraced(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    untyped: Any = torch.compiler
    return type(function.__name__, (function,), {"backward": staticmethod(untyped.disable(function.backward))})


def enter_graph(x: Tensor, leaf: Tensor) -> Tensor:
    """The values of `x`, as a tensor whose gradient is that of `leaf`, which has its shape.

    What autograd saves of the result keeps the memory of `x`; `leaf` does not, nor does whoever holds it.
    """
    # Detached: the caller may have made `x` by ops of its own, whose nodes backward would run, and free, as well.
    entered: Tensor = call_function(_Entrance, leaf, x.detach())
    # Backward runs the ready node that was made last, and this one first of all, as if the leaf were read without it: a
    # gradient that is a slice of a larger one would keep that one until the rest of the layer has run.
    untyped: Any = entered.grad_fn
    untyped._set_sequence_nr(_FIRST)
    return entered


_FIRST = 2**63 - 1
"""A number that no op of forward reaches, in the order that autograd's engine prefers among nodes that are ready."""


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], None


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ctx.error


def refuse_gradient(x: Tensor, error: Exception) -> Tensor:
    """The values of `x`, as a tensor that requires a gradient: `error` is raised when backward comes to it."""
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    with torch.enable_grad():
        return call_function(_Refused, x.detach(), anchor, error)


def on_gradient(x: Tensor, action: Callable[[Tensor], None]) -> None:
    """Call `action` with the gradient of `x` when backward has it."""
    untyped: Any = x
    untyped.register_hook(action)


def run_backward(loss: Tensor) -> None:
    """``loss.backward()``, whose annotations are incomplete."""
    untyped: Any = loss
    untyped.backward()


def run_twice(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    again: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Sequence[Tensor]:
    """``run(*inputs)``, run again in backward; random number generators are not restored.

    The context that `again` gives is entered each time it runs again (more than once with `retain_graph`).  All of it
    runs again: stopping behind the last tensor that is saved would leave out collectives that were priced.
    """
    untyped: Any = checkpoint
    return untyped.checkpoint(
        run, *inputs, use_reentrant=False, preserve_rng_state=False, early_stop=False,
        context_fn=lambda: (nullcontext(), again()),
    )  # fmt: skip


def ambient_autocast(device_type: str) -> torch.dtype | None:
    """The dtype of the ``torch.autocast`` that this is called in; None outside of any."""
    is_on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def edge_of(x: Tensor) -> GradientEdge:
    """Where the gradient of `x` enters the graph; keeps the graph alive, not the tensor."""
    return get_gradient_edge(x)


def before_backward(node: Node, action: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...] | None]) -> Any:
    """Call `action` with the gradients that arrive at `node` before it runs; its result replaces them."""
    return node.register_prehook(action)  # pyright: ignore[reportArgumentType]


def is_custom_node(node: Node) -> bool:
    """Whether it is the backward of a ``torch.autograd.Function``, which computes all gradients, needed or not."""
    return isinstance(node, BackwardCFunction)


def gradients_of(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge]
) -> list[Tensor | None]:
    """The gradients of `inputs` when `roots` have `gradients`; the graph stays for another pass."""
    untyped: Any = torch.autograd
    return list(untyped.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True))


def run_backward_from(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor] | None = None,
    *,
    keep_graph: bool = False,
) -> None:
    """Backward from several places with these gradients, adding up in the leaves' ``grad``.

    With `leaves` only in theirs; the graph then stays for another pass, as it does with `keep_graph`.
    """
    untyped: Any = torch.autograd
    retain_graph = keep_graph or leaves is not None
    untyped.backward(list(roots), list(gradients), retain_graph=retain_graph, inputs=leaves)


def leaves_behind(x: Tensor) -> Iterator[Tensor]:
    """What autograd would give gradients of `x` to: `x` itself, or the leaves of its graph."""
    if x.grad_fn is None:
        yield x
        return
    seen = {x.grad_fn}
    waiting: list[Any] = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following


def backward_token(backward: Callable[[], Sequence[Tensor | None]], *sources: Tensor) -> Tensor:
    """A scalar whose backward gives `sources` the gradients that ``backward()`` returns, and holds none of them."""
    return call_untraced(_GradientToken, backward, *sources)


class _GradientToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Callable[[], Sequence[Tensor | None]], *sources: Tensor) -> Tensor:
        ctx.run_backward = backward
        ctx.count = len(sources)
        ctx.set_materialize_grads(False)
        return torch.zeros((), device="cpu")

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        if gradients[0] is None:  # a backward passes by
            return (None,) * (1 + ctx.count)
        return None, *ctx.run_backward()
