"""Functional ATen from an exported program, by torch's own decompositions, each kind of op decomposed once.

torch decomposes a program by running all of it again, which takes twice as long as the export.  A deep model has few
kinds of ops (the same op on tensors of the same shapes, strides and dtypes): a program of one op of each kind is
exported and decomposed, and every op is replaced by what became of its kind.  That is the same as long as no op writes
to a tensor; a program in which one does is decomposed as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from autopar.trace import torch_internals, torch_recording

__all__ = ["CHECKS", "Functional", "decompose"]

# Ops that compute nothing and only check.
CHECKS = ("aten._assert_", "aten.sym_constrain_range")
_LIFTS = ("aten.lift_fresh_copy.default", "aten.lift_fresh.default")


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.ops.aten.native_dropout(x, p, train)[0] if train and p else x.clone()


# Ops that are decomposed into others in one step, and how where that isn't written in C++.
_SHALLOW: Mapping[str, Callable[..., Tensor] | None] = {
    **dict.fromkeys(f"aten.to.{name}" for name in ("dtype", "device", "dtype_layout")),
    **dict.fromkeys(f"aten.{name}" for name in ("reshape.default", "contiguous.default", "flatten.using_ints")),
    "aten.lift_fresh_copy.default": torch.ops.aten.clone.default,
    "aten.dropout.default": _dropout,
}
_KEPT_META = ("stack_trace", "nn_module_stack")


@dataclass(frozen=True)
class Functional:
    """A program whose ops write to no tensor.

    Args:
        graph: nodes with ``meta["val"]``, and where they come from in ``"stack_trace"`` and ``"nn_module_stack"``.
        inputs: what its placeholders are.
        outputs: what it returns, by the names of nodes.
        constants: tensors by the targets of `inputs`.
    """

    graph: fx.Graph
    inputs: Sequence[InputSpec]
    outputs: Sequence[OutputSpec]
    constants: Mapping[str, Any]


def decompose(exported: torch.export.ExportedProgram) -> Functional:
    """`exported` as functional ATen with composite ops (linear, attention, norms, losses) kept whole."""
    kinds = _kinds(exported)
    known = {key: _at_once(kind) for key, kind in kinds.items()}
    changed = {key: kind for key, kind in kinds.items() if known[key] is None}
    pays = bool(kinds) and 2 * len(changed) <= sum(map(_is_op, exported.graph.nodes))
    bodies = (_decompose_kinds(changed) if changed else {}) if pays else None
    if bodies is None:
        whole = torch_internals.run_decompositions(exported)
        signature = whole.graph_signature
        return Functional(whole.graph, signature.input_specs, signature.output_specs, whole.constants)
    bodies |= {key: body for key, body in known.items() if body is not None}
    graph, renamed = _replace_all(exported.graph, bodies)
    signature = exported.graph_signature
    outputs = [
        OutputSpec(each.kind, TensorArgument(renamed[each.arg.name]), each.target) for each in signature.output_specs
    ]
    return Functional(graph, signature.input_specs, outputs, exported.constants)


@dataclass(frozen=True)
class _Kind:
    """Ops that are decomposed alike.

    Args:
        node: the first of them.
        operands: the distinct nodes that it reads.
    """

    node: fx.Node
    operands: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Body:
    """What becomes of a kind of ops: nodes that read `operands`, and the results (one for each that the op has)."""

    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def _kinds(exported: torch.export.ExportedProgram) -> dict[str, _Kind]:
    """The kinds of ops by key; none if they can't be decomposed one by one."""
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in exported.graph_signature.output_specs):
        return {}
    results: dict[str, _Kind] = {}
    for node in filter(_is_op, exported.graph.nodes):
        if not _is_pure(node):
            return {}
        results.setdefault(_key(node), _Kind(node, _operands(node)))
    return results


def _is_op(node: fx.Node) -> bool:
    """Whether the node computes something that may be decomposed."""
    if node.op in ("placeholder", "output") or node.target is getitem or _lifted(node) is not None:
        return False
    return not str(node.target).startswith(CHECKS) and (node.op == "call_function" or bool(node.users))


def _is_pure(node: fx.Node) -> bool:
    """Whether it makes tensors of known sizes and writes to none."""
    return (
        node.op == "call_function"
        and torch_internals.is_plain_op(node.target)
        and not torch_internals.writes(node.target)
        and all(isinstance(each, Tensor) and all(type(size) is int for size in each.shape) for each in _results(node))
    )


def _results(node: fx.Node) -> Sequence[Any]:
    value: Any = node.meta.get("val")
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else (value,)


def _lifted(node: fx.Node) -> fx.Node | None:
    """The constant of the code that `node` detaches in place, which nobody else reads: torch's way to take it in."""
    if str(node.target) != "aten.detach_.default":
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if str(source.target) in _LIFTS and len(source.users) == 1 else None


def _operands(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(node.all_input_nodes))


def _key(node: fx.Node) -> str:
    """All that the decomposition of an op depends on, as text (1, 1.0 and True are different)."""
    operands = _operands(node)
    number: dict[fx.Node, Any] = {operand: slice(index) for index, operand in enumerate(operands)}  # no op takes slices
    types = [_type_text(operand) for operand in operands]
    args, kwargs = fx.map_arg((node.args, node.kwargs), number.__getitem__)
    return f"{node.target} {args!r} {kwargs!r} {types}"


def _type_text(node: fx.Node) -> str:
    value = _value(node)
    # Torch decomposes without gradients: only what is given can ask for one.
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device} {_wants_gradient(node)}"


def _wants_gradient(node: fx.Node) -> bool:
    return node.op == "placeholder" and _value(node).requires_grad


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def _decompose_kinds(kinds: Mapping[str, _Kind]) -> dict[str, _Body] | None:
    """What becomes of each kind; None if one of them writes to an operand, or makes constants."""
    graph, mode = fx.Graph(), torch_internals.fake_mode()
    inputs: list[Tensor] = []
    made: dict[str, list[fx.Node]] = {}
    for key, kind in kinds.items():
        made[key] = [graph.placeholder(f"x{len(inputs) + index}") for index in range(len(kind.operands))]
        inputs += [
            torch_internals.fake_tensor(mode, _value(operand).detach()).requires_grad_(_wants_gradient(operand))
            for operand in kind.operands
        ]
    results = [
        graph.node_copy(kind.node, dict(zip(kind.operands, made[key], strict=True)).__getitem__)
        for key, kind in kinds.items()
    ]
    graph.output(tuple(results))
    exported = torch.export.export(fx.GraphModule(torch.nn.Module(), graph), tuple(inputs), strict=False)
    whole = torch_internals.run_decompositions(exported)
    signature = whole.graph_signature
    if any(spec.kind is not InputKind.USER_INPUT for spec in signature.input_specs):
        return None
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        return None
    nodes = {node.name: node for node in whole.graph.nodes}
    given = iter([nodes[spec.arg.name] for spec in signature.input_specs])
    taken = iter([nodes[spec.arg.name] for spec in signature.output_specs])
    order = {node: index for index, node in enumerate(whole.graph.nodes)}
    bodies: dict[str, _Body] = {}
    for key, kind in kinds.items():
        operands = tuple(next(given) for _ in kind.operands)
        ends = tuple(next(taken) for _ in _results(kind.node))
        bodies[key] = _Body(operands, tuple(sorted(_behind(operands, ends), key=order.__getitem__)), ends)
    return bodies


def _at_once(kind: _Kind) -> _Body | None:
    """What becomes of a kind, where that is known without torch's decompositions, which take most of their time to be
    set up.
    """
    if torch_internals.stays(kind.node.target) or str(kind.node.target) == "aten.alias.default":
        return _as_it_is(kind)
    return _as_dispatched(kind) if str(kind.node.target) in _SHALLOW else None


def _as_dispatched(kind: _Kind) -> _Body:
    """What becomes of a kind of `_SHALLOW`, with one operand: what the dispatcher gets when it is called."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    target: Any = kind.node.target
    mode = torch_internals.fake_mode()
    with mode, torch.no_grad():
        x = torch_internals.fake_tensor(mode, _value(kind.operands[0]).detach())
        made = {x: given}
        args, kwargs = fx.map_arg((kind.node.args, kind.node.kwargs), lambda _: x)
        with torch_recording.OpsBelow(graph, made):
            result = (_SHALLOW[str(target)] or target)(*args, **kwargs)
    return _Body((given,), tuple(node for node in graph.nodes if node is not given), (made[result],))


def _as_it_is(kind: _Kind) -> _Body:
    """What becomes of a kind that is functional ATen already."""
    graph = fx.Graph()
    operands = tuple(
        graph.node_copy(each) if each.op == "placeholder" else graph.placeholder(each.name) for each in kind.operands
    )
    made = graph.node_copy(kind.node, dict(zip(kind.operands, operands, strict=True)).__getitem__)
    if isinstance(kind.node.meta["val"], Tensor):
        return _Body(operands, (made,), (made,))
    parts = [graph.call_function(getitem, (made, index)) for index in range(len(_results(kind.node)))]
    for part, value in zip(parts, _results(kind.node), strict=True):
        part.meta["val"] = value
    return _Body(operands, (made, *parts), tuple(parts))


def _behind(operands: Sequence[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that it takes to get from the operands to the results."""
    result: set[fx.Node] = set()
    waiting = [node for node in results if node not in operands]
    while waiting:
        node = waiting.pop()
        if node not in result:
            result.add(node)
            waiting += [source for source in node.all_input_nodes if source not in operands]
    return result


def _replace_all(graph: fx.Graph, bodies: Mapping[str, _Body]) -> tuple[fx.Graph, dict[str, str]]:
    """`graph` with every op replaced, without what nobody reads; and the new names of nodes that have one result."""
    made = fx.Graph()
    known: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = (made.node_copy(node),)
        elif node.target is getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            known[node] = (known[source][index],)
        elif (lifted := _lifted(node)) is not None:
            known[node] = known[lifted]
        elif _is_op(node):
            known[node] = _insert(made, node, bodies[_key(node)], known)
        elif node.op == "output":
            made.output(fx.map_arg(node.args[0], lambda each: known[each][0]))
    made.eliminate_dead_code()
    return made, {node.name: new[0].name for node, new in known.items() if len(new) == 1}


def _insert(
    graph: fx.Graph, node: fx.Node, body: _Body, known: Mapping[fx.Node, tuple[fx.Node, ...]]
) -> tuple[fx.Node, ...]:
    """Put what becomes of `node` at the end of `graph`; its results."""
    operands = [known[operand][0] for operand in _operands(node)]
    copies = dict(zip(body.operands, operands, strict=True))
    origin = {name: node.meta[name] for name in _KEPT_META if name in node.meta}
    for each in body.nodes:
        args, kwargs = fx.map_arg((each.args, each.kwargs), copies.__getitem__)
        name = re.sub(r"_\d+$", "", each.name)  # the graph numbers those of one name through
        copies[each] = graph.create_node(each.op, each.target, args, kwargs, name)
        copies[each].meta = {"val": each.meta["val"], **origin}
    return tuple(copies[result] for result in body.results)
