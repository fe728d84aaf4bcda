"""What torch.export can be spared, as nothing here needs it or it changes nothing (seen on torch 2.13)."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.graph import _PyTreeCodeGen

from autopar.trace.compat import torch_internals

__all__ = ["inline_grad_regions", "kept_regions", "known_paths", "known_sizes", "late_code"]


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def late_code() -> Iterator[None]:
    """Inside, Python code of graphs is written when they are first called, which those of an export are not."""
    write = fx.GraphModule.recompile

    def recompile(module: fx.GraphModule) -> None:
        def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            write(self)
            return self.forward(*args, **kwargs)

        codegen: Any = module.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(module).forward = forward

    with patch.object(fx.GraphModule, "recompile", recompile):
        yield


def inline_grad_regions(module: fx.GraphModule) -> None:
    """Put the bodies of ``with torch.no_grad()`` regions into the graph, behind a detach of what they read.

    torch.export keeps such a region as a sub-graph, and its decompositions inline it and forget that no
    gradient leaves it.  After this, "no gradient" is part of the graph's data flow.
    """
    for _, sub in list(module.named_children()):
        if isinstance(sub, fx.GraphModule):
            inline_grad_regions(sub)
    if any(node.target is torch._C._set_grad_enabled for node in module.graph.nodes):
        _detach_in_regions(module.graph)
    for node in list(module.graph.nodes):
        if torch_internals.is_higher_order(node.target) and node.target.name() == "wrap_with_set_grad_enabled":
            _inline_region(module, node)
    module.graph.lint()
    module.recompile()


def _detach_in_regions(graph: fx.Graph) -> None:
    """`inline_grad_regions` where regions are still ops between two that turn gradients on or off (`kept_regions`)."""
    begin: fx.Node | None = None  # of the region without gradients that the node is in
    detached: dict[fx.Node, Any] = {}
    inside: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            begin = node if not node.args[0] and torch.is_grad_enabled() else None
            detached, inside = {}, set()
        elif begin is not None and node.op != "output":
            inside.add(node)
            with graph.inserting_before(begin):
                for operand in node.all_input_nodes:
                    if operand not in inside and operand not in detached:
                        detached[operand] = _detached(graph, operand)
            for operand, own in detached.items():
                node.replace_input_with(operand, own)
    for node in [each for each in graph.nodes if each.target is torch._C._set_grad_enabled]:
        graph.erase_node(node)


def _inline_region(module: fx.GraphModule, node: fx.Node) -> None:
    enabled, body, *operands = node.args
    assert isinstance(body, fx.Node)
    sub = module.get_submodule(str(body.target))
    assert isinstance(sub, fx.GraphModule)
    graph = module.graph
    for inner in list(sub.graph.nodes):
        if inner.op == "get_attr":  # the body of a region in this one, which another of the module may be named like
            own = f"{body.target}_{inner.target}"
            module.add_submodule(own, sub.get_submodule(str(inner.target)))
            inner.target = own
    with graph.inserting_before(node):
        read = operands if enabled else [_detached(graph, operand) for operand in operands]
        names: dict[Any, Any] = dict(zip([n for n in sub.graph.nodes if n.op == "placeholder"], read, strict=True))
        copied: Any = graph.graph_copy(sub.graph, names)
    results: Sequence[Any] = copied if isinstance(copied, tuple | list) else (copied,)
    for user in list(node.users):
        user.replace_all_uses_with(results[int(str(user.args[1]))])  # every user is a getitem
        graph.erase_node(user)
    graph.erase_node(node)


def _detached(graph: fx.Graph, operand: Any) -> Any:
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or operand.name.startswith("b_"):
        return operand  # buffers have no gradient, and may be written to in here
    made = graph.call_function(torch.ops.aten.detach.default, (operand,))
    made.meta = dict(operand.meta)
    return made


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def kept_regions() -> Iterator[None]:
    """Inside, torch.export leaves the ops that turn gradients on or off in the graph, where only these make regions.

    Otherwise it cuts the whole graph into modules at them and puts most of these together again, which takes a
    twentieth of a trace.
    """
    name = "replace_set_grad_with_hop_pass"
    module: Any = importlib.import_module(f"torch._export.passes.{name}")
    cut: Any = getattr(module, name, None)  # a torch without it, or that calls it in another way, cuts

    def keep(graph_module: fx.GraphModule, signature: Any) -> Any:
        is_flat = not any(isinstance(each, fx.GraphModule) for each in graph_module.children())
        has_casts = any("autocast" in str(node.target) for node in graph_module.graph.nodes)
        return (graph_module, signature) if is_flat and not has_casts else cut(graph_module, signature)

    replaced = patch.object(module, name, keep)
    with replaced if cut is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def known_sizes() -> Iterator[None]:
    """Inside, torch.export looks for sizes that depend on values only where ops have made some."""
    module: Any = importlib.import_module("torch.export._trace")
    look: Any = getattr(module, "_replace_unbacked_bindings", None)

    def look_if_any(graph_module: fx.GraphModule) -> None:
        if any("unbacked_bindings" in node.meta for node in graph_module.graph.nodes):
            look(graph_module)

    replaced = patch.object(module, "_replace_unbacked_bindings", look_if_any)
    with replaced if look is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def known_paths() -> Iterator[None]:
    """Inside, torch.export takes its prefix from the paths of modules without looking for other containers in them: it
    does so for each op, which takes a thirtieth of a trace.
    """
    module: Any = importlib.import_module("torch.export._trace")
    strip: Any = getattr(module, "_strip_root", None)
    whole: Any = pytree.tree_map

    def stripped(function: Any, tree: Any, *rest: Any, **options: Any) -> Any:
        is_known = function is strip and type(tree) is dict and all(type(x) is tuple for x in tree.values())
        if not is_known or rest or options:
            return whole(function, tree, *rest, **options)
        return {key: tuple(map(strip, path)) for key, path in tree.items()}

    replaced = patch.object(pytree, "tree_map", stripped)
    with replaced if strip is not None else contextlib.nullcontext():
        yield
