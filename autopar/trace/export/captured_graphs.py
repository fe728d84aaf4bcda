"""Dynamo's graphs, run node by node so that they can be traced again (as torch 2.13 makes them)."""

# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx

from autopar.trace.compat import torch_internals

__all__ = ["function_gradients", "hidden_backwards", "run_captured"]

_CHECKPOINT, _FUNCTION = "tag_activation_checkpoint", "autograd_function_apply"
_ENTER_AUTOCAST, _EXIT_AUTOCAST = torch_internals.autocast_calls()
_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}  # as the ops that are made of them: for the process's life


def run_captured(module: fx.GraphModule, args: Sequence[Any]) -> Any:
    """Run a graph of Dynamo's node by node; what is traced meanwhile takes over source lines and module paths.

    What it checkpoints runs as it is: what to recompute is decided for the whole program.  A custom autograd function,
    of which Dynamo has a graph for each direction, is one again, and so is a region of autocast: what torch has for
    these in a graph changes no dtype while a graph is traced.
    """
    with fx.traceback.preserve_node_meta(), ExitStack() as regions:
        return _Runner(module, regions).run(*args)


def hidden_backwards(module: fx.GraphModule) -> list[str]:
    """The stack traces of the custom autograd functions in one of Dynamo's graphs that `run_captured` can't carry: in
    graphs inside of it that it does not run node by node, and those that write to what they are given.
    """
    within = set(_run_by_node(module))
    graphs = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [
        str(node.meta.get("stack_trace") or "")
        for graph in graphs
        for node in graph.graph.nodes
        if _name(node.target) == _FUNCTION and (graph not in within or not _is_carried(node.kwargs))
    ]


def function_gradients(module: fx.GraphModule) -> list[str]:
    """The stack traces of gradients by ``torch.func`` (grad, vjp, jacrev) in one of Dynamo's graphs.

    They can't be traced, and an error on the way would leave torch inside of them.
    """
    graphs = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [
        str(node.meta.get("stack_trace") or "")
        for graph in graphs
        for node in graph.graph.nodes
        if getattr(node.target, "__name__", "") == "_grad_increment_nesting"
    ]


class _Runner(fx.Interpreter):
    """Runs the bodies of checkpointed regions in place; numbers may stand in for tensors that hold them."""

    def __init__(self, module: fx.GraphModule, regions: ExitStack) -> None:
        """`regions` ends those of autocast that an error leaves open."""
        super().__init__(module, garbage_collect_values=False)
        self._regions = regions

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "item" and isinstance(args[0], int | float):
            return args[0]
        return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _name(target) == _CHECKPOINT:
            body, *operands = args
            return _Runner(body, self._regions).run(*operands)
        if target is _ENTER_AUTOCAST:
            device_type, dtype, enabled, cache = args
            region = torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache)
            opened = self._regions.enter_context(ExitStack())
            opened.enter_context(region)
            return opened
        if target is _EXIT_AUTOCAST:
            return args[0].close()
        if _name(target) == _FUNCTION:
            ahead, back, *operands = args
            function: Any = _function_of(ahead, back, kwargs)
            return function.apply(*operands)
        return super().call_function(target, args, kwargs)


def _name(target: Any) -> str:
    return target.name() if torch_internals.is_higher_order(target) else ""


def _is_carried(arguments: Mapping[str, Any]) -> bool:
    """Whether the call of a custom function has the form that is known (since torch 2.12), and writes to nothing."""
    return "saved_for_backward_idx" in arguments and not arguments.get("dirty_idx")


def _run_by_node(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield module
    for node in module.graph.nodes:
        body = node.args[0] if _name(node.target) == _CHECKPOINT else None
        if isinstance(body, fx.Node) and isinstance(made := getattr(module, str(body.target), None), fx.GraphModule):
            yield from _run_by_node(made)


def _function_of(
    ahead: fx.GraphModule, back: fx.GraphModule, arguments: Mapping[str, Any]
) -> type[torch.autograd.Function]:
    """The custom function with these graphs; calls with equal graphs get the same one."""
    undifferentiated = tuple(arguments["non_differentiable_idx"])
    text = f"{_text(ahead)} {_text(back)} {undifferentiated}"
    if text not in _FUNCTIONS:
        made = _made_of(ahead, back, undifferentiated)
        made.__qualname__ = made.__name__ = f"function_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        _FUNCTIONS[text] = made
    return _FUNCTIONS[text]


def _made_of(
    ahead: fx.GraphModule, back: fx.GraphModule, undifferentiated: tuple[int, ...]
) -> type[torch.autograd.Function]:
    class CapturedFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results, saved = ahead.forward(*args)  # a call of the module would print what fails while slices are tried
            ctx.save_for_backward(*(x for x in saved if isinstance(x, Tensor)))
            ctx.others = [None if isinstance(x, Tensor) else (x,) for x in saved]
            parts = results if isinstance(results, tuple | list) else (results,)
            ctx.mark_non_differentiable(*(parts[place] for place in undifferentiated))
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            tensors = iter(ctx.saved_tensors)
            saved = [next(tensors) if each is None else each[0] for each in ctx.others]
            return back.forward(*gradients, *saved)

    return CapturedFunction


def _text(module: fx.GraphModule) -> str:
    """All that a graph computes, without the names of its values."""
    number = {node: slice(place) for place, node in enumerate(module.graph.nodes)}  # no op takes slices of this form
    written: list[str] = []
    for node in module.graph.nodes:
        target = "" if node.op == "placeholder" else node.target
        if node.op in ("get_attr", "call_module"):  # a constant, or another graph: equal only in the same graph
            target = f"{node.target} {id(module)}"
        call = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        written.append(f"{node.op} {target} {'' if node.op == 'placeholder' else call}")
    return "\n".join(written)
