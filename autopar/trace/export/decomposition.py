"""Functional ATen from an exported program, by torch's own decompositions, each kind of op decomposed once.

torch decomposes a program by running all of it again, which takes twice as long as the export.  A deep model has few
kinds of ops (the same op on tensors of the same shapes, strides and dtypes): a program of one op of each kind is
exported and decomposed, and every op is replaced by what became of its kind.  That is the same as long as no op writes
to a tensor.  Ops that write to a tensor that one of them makes are taken together (`own_writes`); a program with other
writes is decomposed as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from autopar.trace.compat import torch_internals, torch_recording
from autopar.trace.export.canonical_texts import canonical_text
from autopar.trace.export.hidden_views import refuse_writes_to_hidden_views
from autopar.trace.export.own_writes import copy_written_results, group_writes

__all__ = ["CHECKS", "Functional", "decompose"]

# Ops that compute nothing and only check.
CHECKS = ("aten._assert_", "aten.sym_constrain_range")
_LIFTS = ("aten.lift_fresh_copy.default", "aten.lift_fresh.default")


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.ops.aten.native_dropout(x, p, train)[0] if train and p else x.clone()


# Ops that are decomposed into others in one step, and how where that isn't written in C++.
_SHALLOW: Mapping[str, Callable[..., Any] | None] = {
    **dict.fromkeys(f"aten.to.{name}" for name in ("dtype", "device", "dtype_layout")),
    **dict.fromkeys(
        f"aten.{name}.default"
        for name in (
            "reshape",
            "contiguous",
            "chunk",
            "expand_as",
            "mT",
            "narrow",
            "numpy_T",
            "reshape_as",
            "swapaxes",
            "view_as",
        )
    ),
    **dict.fromkeys(f"aten.{name}" for name in ("flatten.using_ints", "unflatten.int", "movedim.int")),
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

    def is_same(self, other: Functional) -> bool:
        """Whether it computes the same, constants included."""
        used = {node.name for node in self.graph.nodes if node.op == "placeholder" and node.users}
        names = [str(spec.target) for spec in self.inputs if spec.arg.name in used]
        return str(self.graph) == str(other.graph) and all(
            _are_equal(self.constants[name], other.constants.get(name)) for name in names if name in self.constants
        )

    def gives_same(self, other: Functional) -> bool:
        """Whether all its results are computed in the same way, whatever else is computed, and in which order."""
        (text, names), (other_text, other_names) = (canonical_text(x.graph, x.inputs) for x in (self, other))
        return text == other_text and all(
            _are_equal(self.constants[name], other.constants.get(other_name)) if name in self.constants
            else name == other_name
            for name, other_name in zip(names, other_names, strict=True)
        )  # fmt: skip


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two constants have the same values; of those that were made in a trace the graph says which they have."""
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return any(map(torch_internals.is_fake, (one, other))) or torch.equal(one, other)


def decompose(exported: torch.export.ExportedProgram) -> Functional:
    """`exported` as functional ATen with composite ops (linear, attention, norms, losses) kept whole.

    Numbers of tensors that only torch's checks of them read are gone, in `exported` as well.

    Raises:
        TraceError: something is written where that can't be followed.
    """
    _drop_checked_numbers(exported.graph)
    refuse_writes_to_hidden_views(exported.graph)
    _drop_other_names(exported)
    copy_written_results(exported.graph, _is_plain)
    units = _units(exported)
    keys = {last: unit.key for last, unit in units.items()}
    kinds = {keys[last]: unit for last, unit in reversed(units.items())}
    known = {key: _at_once(kind) for key, kind in kinds.items()}
    changed = {key: kind for key, kind in kinds.items() if known[key] is None}
    pays = bool(kinds) and 2 * len(changed) <= len(units)
    bodies = (_decompose_kinds(changed) if changed else {}) if pays else None
    if bodies is None:
        whole = torch_internals.run_decompositions(exported)
        signature = whole.graph_signature
        return Functional(whole.graph, signature.input_specs, signature.output_specs, whole.constants)
    bodies |= {key: body for key, body in known.items() if body is not None}
    graph, renamed = _replace_all(exported.graph, {last: (unit, bodies[keys[last]]) for last, unit in units.items()})
    signature = exported.graph_signature
    outputs = [
        OutputSpec(each.kind, TensorArgument(renamed[each.arg.name]), each.target) for each in signature.output_specs
    ]
    return Functional(graph, signature.input_specs, outputs, exported.constants)


@dataclass(frozen=True)
class _Unit:
    """An op that is decomposed by itself, or several in order that are decomposed together (`own_writes`)."""

    nodes: tuple[fx.Node, ...]

    @cached_property
    def operands(self) -> tuple[fx.Node, ...]:
        """The distinct nodes of others that it reads."""
        return tuple(dict.fromkeys(x for node in self.nodes for x in node.all_input_nodes if x not in self.nodes))

    @cached_property
    def ends(self) -> tuple[fx.Node, ...]:
        """The op, or those of several that others read."""
        if len(self.nodes) == 1:
            return self.nodes
        return tuple(node for node in self.nodes if any(user not in self.nodes for user in node.users))

    @property
    def results(self) -> list[Any]:
        """All results of the ends."""
        return [each for node in self.ends for each in _results(node)]

    @property
    def key(self) -> str:
        """All that its decomposition depends on, as text (1, 1.0 and True are different)."""
        number: dict[fx.Node, Any] = {x: slice(index) for index, x in enumerate(self.operands)}  # no op takes slices
        number |= {node: slice(index, index) for index, node in enumerate(self.nodes)}
        calls = [(node.target, *fx.map_arg((node.args, node.kwargs), number.__getitem__)) for node in self.nodes]
        written = [f"{target} {args!r} {kwargs!r}" for target, args, kwargs in calls]
        return f"{written} {[_type_text(x) for x in self.operands]} {[number[node] for node in self.ends]}"


@dataclass(frozen=True)
class _DecomposedUnit:
    """What becomes of a kind of units: nodes that read `operands`, and the results (one for each that a unit has)."""

    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the nodes, without numbers: a graph numbers those of one name itself."""
        return tuple(re.sub(r"_\d+$", "", each.name) for each in self.nodes)


def _units(exported: torch.export.ExportedProgram) -> dict[fx.Node, _Unit]:
    """All units by their last op; none if not all ops can be decomposed so."""
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in exported.graph_signature.output_specs):
        return {}
    ops = [node for node in exported.graph.nodes if _is_op(node)]
    groups = group_writes(ops) if all(map(_is_plain, ops)) else None
    if groups is None:
        return {}
    units = (_Unit(groups.get(node, (node,))) for node in ops)
    return {unit.nodes[-1]: unit for unit in units}


def _drop_other_names(exported: torch.export.ExportedProgram) -> None:
    """Drop further names of a parameter or buffer that no op reads: torch can't have two of what ops write to."""
    tensors = {**exported.state_dict, **exported.constants}
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    inputs = exported.graph_signature.input_specs
    members = [each for each in inputs if each.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
    read = {id(tensors.get(str(each.target))) for each in members if placeholders[each.arg.name].users}
    for each in members:
        node = placeholders[each.arg.name]
        if not node.users and id(tensors.get(str(each.target))) in read:
            inputs.remove(each)
            exported.graph.erase_node(node)


def _drop_checked_numbers(graph: fx.Graph) -> None:
    """Drop numbers that depend on data, where only torch's checks read them, and what only these read."""
    numbers = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch_internals.SYMBOLIC)]
    if not numbers:
        return
    checks = [node for node in graph.nodes if str(node.target).startswith(CHECKS)]
    dropped = {*numbers, *checks}
    for node in reversed(graph.nodes):
        is_behind = bool(node.users) and dropped.issuperset(node.users) and not node.is_impure()
        if is_behind:
            dropped.add(node)
    for node in reversed(graph.nodes):
        if node in dropped and not node.users:
            graph.erase_node(node)


def _is_op(node: fx.Node) -> bool:
    """Whether the node computes something that may be decomposed."""
    if node.op in ("placeholder", "output") or node.target is getitem or _lifted(node) is not None:
        return False
    return not str(node.target).startswith(CHECKS) and (node.op == "call_function" or bool(node.users))


def _is_plain(node: fx.Node) -> bool:
    """Whether it makes tensors of known sizes."""
    return (
        node.op == "call_function"
        and torch_internals.is_plain_op(node.target)
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


def _decompose_kinds(kinds: Mapping[str, _Unit]) -> dict[str, _DecomposedUnit] | None:
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
    results: list[fx.Node] = []
    for key, kind in kinds.items():
        copies = dict(zip(kind.operands, made[key], strict=True))
        for node in kind.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        results += map(copies.__getitem__, kind.ends)
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
    bodies: dict[str, _DecomposedUnit] = {}
    for key, kind in kinds.items():
        operands = tuple(next(given) for _ in kind.operands)
        ends = tuple(next(taken) for _ in kind.results)
        bodies[key] = _DecomposedUnit(operands, tuple(sorted(_behind(operands, ends), key=order.__getitem__)), ends)
    return bodies


def _at_once(kind: _Unit) -> _DecomposedUnit | None:
    """What becomes of a kind, where that is known without torch's decompositions, which take most of their time to be
    set up.
    """
    first, *others = kind.nodes
    if others:
        return None
    target = first.target
    if torch_internals.stays(target) or str(target) == "aten.alias.default":
        return _as_it_is(kind)
    return _as_dispatched(kind) if str(target) in _SHALLOW else None


def _as_dispatched(kind: _Unit) -> _DecomposedUnit:
    """What becomes of a kind of `_SHALLOW`: what the dispatcher gets when it is called."""
    graph, (node,) = fx.Graph(), kind.nodes
    given = tuple(graph.placeholder(f"x{index}") for index in range(len(kind.operands)))
    target: Any = node.target
    mode = torch_internals.fake_mode(repeats=False)
    with mode, torch.no_grad():
        tensors = [torch_internals.fake_tensor(mode, _value(operand).detach()) for operand in kind.operands]
        made = dict(zip(tensors, given, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(kind.operands, tensors, strict=True)).__getitem__)
        with torch_recording.OpsBelow(graph, made):
            result = (_SHALLOW[str(target)] or target)(*args, **kwargs)
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    return _DecomposedUnit(
        given, tuple(node for node in graph.nodes if node not in given), tuple(made[each] for each in results)
    )


def _as_it_is(kind: _Unit) -> _DecomposedUnit:
    """What becomes of a kind of op that is functional ATen already."""
    graph, (node,) = fx.Graph(), kind.nodes
    operands = tuple(
        graph.node_copy(each) if each.op == "placeholder" else graph.placeholder(each.name) for each in kind.operands
    )
    made = graph.node_copy(node, dict(zip(kind.operands, operands, strict=True)).__getitem__)
    if isinstance(node.meta["val"], Tensor):
        return _DecomposedUnit(operands, (made,), (made,))
    parts = [graph.call_function(getitem, (made, index)) for index in range(len(kind.results))]
    for part, value in zip(parts, kind.results, strict=True):
        part.meta["val"] = value
    return _DecomposedUnit(operands, (made, *parts), tuple(parts))


def _behind(operands: Sequence[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes between the operands and the results."""
    result: set[fx.Node] = set()
    waiting = [node for node in results if node not in operands]
    while waiting:
        node = waiting.pop()
        if node not in result:
            result.add(node)
            waiting += [source for source in node.all_input_nodes if source not in operands]
    return result


def _replace_all(
    graph: fx.Graph, replacements: Mapping[fx.Node, tuple[_Unit, _DecomposedUnit]]
) -> tuple[fx.Graph, dict[str, str]]:
    """`graph` with the unit that each of these ops ends replaced, without what nobody reads; and the new names of nodes
    that have one result.
    """
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
        elif node in replacements:
            known.update(_insert(made, *replacements[node], known))
        elif node.op == "output":
            made.output(fx.map_arg(node.args[0], lambda each: known[each][0]))
    made.eliminate_dead_code()
    return made, {node.name: new[0].name for node, new in known.items() if len(new) == 1}


def _insert(
    graph: fx.Graph, unit: _Unit, body: _DecomposedUnit, known: Mapping[fx.Node, tuple[fx.Node, ...]]
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Put what becomes of `unit` at the end of `graph`; the results of its ends."""
    operands = [known[operand][0] for operand in unit.operands]
    copies = dict(zip(body.operands, operands, strict=True))
    origin = {name: unit.nodes[-1].meta[name] for name in _KEPT_META if name in unit.nodes[-1].meta}
    for each, name in zip(body.nodes, body.names, strict=True):
        args, kwargs = fx.map_arg((each.args, each.kwargs), copies.__getitem__)
        copies[each] = graph.create_node(each.op, each.target, args, kwargs, name)
        copies[each].meta = {"val": each.meta["val"], **origin}
    results = iter(body.results)
    return {end: tuple(copies[next(results)] for _ in _results(end)) for end in unit.ends}
