"""From an exported torch program to a `Graph`: names, types and arguments become plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, OutputKind

from autopar.errors import TraceError
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.compat import torch_internals
from autopar.trace.compat.source_lines import frame_of_text
from autopar.trace.export.capture import WRAPPED, Captured
from autopar.trace.export.decomposition import CHECKS, Functional
from autopar.trace.export.strides import row_major_strides
from autopar.trace.graph import Graph, Names, call_by
from autopar.trace.module_attributes.outside_reads import refuse_lost_gradients

__all__ = ["convert", "tensor_type"]

_CUTS = frozenset({
    "split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "tensor_split",
    "meshgrid", "broadcast_tensors",
})  # fmt: skip
"""Ops that give a list of tensors, which is the tensor itself where it is one."""
_DROPPED_KWARGS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
"""The runtime decides on which device a tensor is; kernels decide on its memory format, but for a `contiguous()`."""


def tensor_type(tensor: Tensor, where: str = "") -> TensorType:
    """Shape and dtype of a tensor; `where` is the user's line, for the error.

    Raises:
        TraceError: a size is symbolic.
    """
    if not all(type(size) is int for size in tensor.shape):
        raise TraceError(
            f"{where or 'the model'}: a tensor has the size {list(tensor.shape)}, which depends on "
            "values; use fixed sizes and masks (torch.where) instead"
        )
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _is_dropped(target: str, key: str, value: Any) -> bool:
    # GPUs have no fast attention for masks with gaps between columns: models make these contiguous.
    is_contiguous = target == "aten.clone.default" and value is torch.contiguous_format
    return key in _DROPPED_KWARGS and not is_contiguous


@dataclass
class _GraphBuilder:
    """Collects a graph while walking over fx nodes."""

    env: dict[str, Any] = field(default_factory=dict[str, Any])  # fx node name -> Arg, or a list of results
    ops: list[Op] = field(default_factory=list[Op])
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    roles: dict[str, str] = field(default_factory=dict[str, str])
    strided: set[str] = field(default_factory=set[str])
    place: tuple[str, str] = ("", "")  # source and module of the last op that had them

    def define(self, name: str, tensor: Tensor, where: str = "") -> str:
        self.types[name] = tensor_type(tensor, where)
        if not tensor.is_contiguous():
            self.strided.add(name)
        return name

    def argument(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return self.env[arg.name]
        if isinstance(arg, list | tuple):
            return tuple(self.argument(part) for part in cast("Sequence[Any]", arg))
        if arg is None or isinstance(arg, bool | int | float | complex | str):
            return arg
        if isinstance(arg, torch.dtype | torch.memory_format | torch.layout | torch.device):
            return str(arg)
        raise TraceError(f"an op has the argument {arg!r} of type {type(arg).__name__}, which a plan can't carry")

    def visit(self, node: fx.Node) -> None:
        if node.op != "call_function" or str(node.target).startswith(CHECKS):
            return
        if node.target is getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            self.env[node.name] = self.env[source.name][index]
            return
        self._check_target(node)
        value: Tensor | Sequence[Any] = node.meta["val"]
        if isinstance(value, list) and len(value) == 1:
            self._visit_only_part(node, value[0])
            return
        if isinstance(value, Tensor):
            results = (self.define(node.name, value, _source(node)),)
            self.env[node.name] = Ref(node.name)
        else:
            results = self._define_several(node, value)
        self._append(node, results)

    def _visit_only_part(self, node: fx.Node, value: Tensor) -> None:
        """An op that gives a list of one tensor: ops of one result give a tensor."""
        name, target = node.name, str(node.target)
        source, *rest = map(self.argument, node.args)
        result = (self.define(name, value, _source(node)),)
        if target == "aten.unbind.int":
            self._append_op(node, result, "aten.select.int", (source, *(rest or [0]), 0))
        elif target.split(".")[1] in _CUTS:
            only = source[0] if isinstance(source, tuple) else source
            self._append_op(node, result, "aten.reshape.default", (only, tuple(value.shape)))
        else:
            raise TraceError(
                f"{_source(node) or 'the model'}: {target} gives a list of one tensor, for which there is no rule: "
                "compute it with other ops"
            )
        self.env[name] = [Ref(name)]

    def _check_target(self, node: fx.Node) -> None:
        where = _source(node) or "the model"
        if torch_internals.is_higher_order(node.target):
            raise TraceError(
                f"{where}: {node.target} takes functions as arguments, and has no factor rule; "
                "write it with torch.where, or with plain tensor ops, as autopar.parallelize does for flex_attention"
            )
        if not torch_internals.is_plain_op(node.target):
            raise TraceError(
                f"{where}: Python computes with the value of a tensor here ({node.target}); keep it a "
                "tensor (no .item()), or pass it as a plain argument"
            )
        if not isinstance(node.meta.get("val"), Tensor | list | tuple):
            raise TraceError(
                f"{where}: {node.target} gives a number that depends on data; keep it a tensor "
                "(no .item(), no shapes that depend on values)"
            )

    def _define_several(self, node: fx.Node, values: Sequence[Any]) -> tuple[str, ...]:
        # Named after the getitem that reads it, where there is one.
        named = {user.args[1]: user.name for user in node.users if user.target is getitem}
        names: list[str] = []
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                names.append(self.define(named.get(index, f"{node.name}_result_{index}"), value, _source(node)))
        kept = iter(names)
        self.env[node.name] = [Ref(next(kept)) if isinstance(value, Tensor) else None for value in values]
        return tuple(names)

    def _append(self, node: fx.Node, results: tuple[str, ...]) -> None:
        target, args = str(node.target), tuple(map(self.argument, node.args))
        kwargs = tuple((k, self.argument(v)) for k, v in node.kwargs.items() if not _is_dropped(target, k, v))
        if target.startswith("aten.as_strided"):
            target, args, kwargs = "autopar.as_strided", (args[0], *_strides(node)), ()
        self._append_op(node, results, target, args, kwargs)

    def _append_op(
        self,
        node: fx.Node,
        results: tuple[str, ...],
        target: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> None:
        source, module = _source(node), _module(node)
        self.place = (source or self.place[0], module if source or module else self.place[1])
        self.ops.append(Op(node.name, target, args, kwargs, results, source=self.place[0], module=self.place[1]))


def _strides(node: fx.Node) -> tuple[Arg, ...]:
    """The size, strides and offset of a call of ``as_strided`` if its operand lay in row-major order in memory.

    Raises:
        TraceError: it writes to memory, or goes from one dim to another by their places in memory.
    """
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    found = row_major_strides(operand.meta["val"], node.meta["val"])
    if found is None or str(node.target) != "aten.as_strided.default":
        raise TraceError(
            f"{_source(node) or 'the model'}: as_strided reads memory across the dims of a tensor that is no row-major "
            "one, or its result is written to, which has no meaning on several devices, where tensors lie otherwise in "
            "memory. Call it on x.contiguous(), write to a copy of what it gives, or use unfold"
        )
    strides, offset = found
    return tuple(node.meta["val"].shape), strides, offset


def _source(node: fx.Node) -> str:
    return frame_of_text(node.meta.get("stack_trace") or "")


def _module(node: fx.Node) -> str:
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    path = re.sub(r"@\d+$", "", path)  # export marks the second call of one module so
    return path.removeprefix(WRAPPED).removeprefix(".")


def convert(captured: Captured, input_names: Sequence[str], *, training: bool = False) -> Graph:
    """The graph of `captured`; model inputs are renamed to `input_names`.

    Raises:
        TraceError: it has what a graph can't; in `training`, what is not the model's and requires a gradient.
    """
    exported = captured.exported
    builder = _GraphBuilder()
    nodes = list(exported.graph.nodes)
    placeholders = {node.name: node for node in nodes if node.op == "placeholder"}
    constants: dict[str, Tensor] = {}
    exported_constants: dict[str, Any] = {}
    inputs: list[str] = []
    parameters: dict[str, str] = {}
    by_member: dict[str, str] = {}
    written = _written_frozen(captured)
    for spec in exported.inputs:
        name = spec.arg.name
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(name)
            builder.roles[name] = "input"
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            member = captured.names[_member(spec.target)]
            if member in by_member:
                builder.env[name] = Ref(by_member[member])
                continue
            by_member[member] = name
            parameters[name] = member
            is_parameter = spec.kind is InputKind.PARAMETER and member not in written
            builder.roles[name] = "parameter" if is_parameter else "buffer"
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[name] = _constant(exported, spec.target, placeholders[name])
            exported_constants[name] = exported.constants[str(spec.target)]
            builder.roles[name] = "constant"
        else:
            raise TraceError(f"the model holds {spec.target!r}, which is no tensor and takes part in the computation")
        builder.define(name, placeholders[name].meta["val"])
        builder.env[name] = Ref(name)
    for node in nodes:
        builder.visit(node)
    outputs, updates = _ends(
        exported.outputs, builder.env, captured, by_member, dict(zip(inputs, input_names, strict=True))
    )
    trainable = {
        name
        for name, member in parameters.items()
        if builder.roles[name] == "parameter" and captured.tensors[member].requires_grad
    }
    trainable |= {name for name in inputs if placeholders[name].meta["val"].requires_grad}
    graph = Graph(
        ops=tuple(builder.ops), types=builder.types, roles=builder.roles, inputs=tuple(inputs),
        outputs=outputs,
        updates=updates, parameters=parameters, trainable=frozenset(trainable), constants=constants,
        strided=frozenset(builder.strided),
    )  # fmt: skip
    if training:
        refuse_lost_gradients(graph, exported_constants, captured.outside)
    return _add_unused(_rename_roots(graph, input_names), captured)


def _written_frozen(captured: Captured) -> set[str]:
    """The frozen parameters that the forward writes to (momentum encoders): what a program calls a buffer."""
    return {captured.names[_member(s.target)] for s in captured.exported.outputs if _is_frozen_write(s, captured)}


def _is_frozen_write(spec: Any, captured: Captured) -> bool:
    is_parameter = spec.kind is OutputKind.PARAMETER_MUTATION
    return is_parameter and not captured.tensors[captured.names[_member(spec.target)]].requires_grad


def _member(target: str | None) -> str:
    return str(target).removeprefix(WRAPPED + ".")


def _constant(exported: Functional, target: str | None, node: fx.Node) -> Tensor:
    value = exported.constants[str(target)]
    assert isinstance(value, Tensor)
    if torch_internals.is_fake(value):
        where = next((source for user in [*node.users] if (source := _source(user))), "the model")
        raise TraceError(
            f"{where}: a parameter or buffer of {value.dtype} {list(value.shape)}, or a table that a call has left, is "
            "read from an object that is no module, list, dict or function of one, so that its values would never "
            "change: read a parameter from its module; make a table in __init__, or in a function with functools.cache"
        )
    return value.detach().cpu()


def _ends(
    specs: Sequence[Any], env: Mapping[str, Any], captured: Captured, by_member: Mapping[str, str],
    input_names: Mapping[str, str],
) -> tuple[tuple[str, ...], dict[str, str]]:  # fmt: skip
    outputs: list[str] = []
    updates: dict[str, str] = {}
    for spec in specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(env[spec.arg.name].name)
        elif spec.kind is OutputKind.BUFFER_MUTATION or _is_frozen_write(spec, captured):
            updates[by_member[captured.names[_member(spec.target)]]] = env[spec.arg.name].name
        else:
            written = input_names.get(str(spec.target)) or _member(spec.target)
            is_parameter = spec.kind is OutputKind.PARAMETER_MUTATION
            instead = (
                _instead_of_parameter(written, captured)
                if is_parameter
                else "work on a copy (x = x.clone()) or register a buffer"
            )
            raise TraceError(
                f"the model writes to {'the parameter ' * is_parameter}{written!r} in its forward, where only buffers "
                f"can be written to: {instead}"
            )
    return tuple(outputs), updates


def _instead_of_parameter(name: str, captured: Captured) -> str:
    """What to do instead of writing to the parameter in forward."""
    flags = dict.fromkeys(flag for question in captured.questions for flag in question.names)
    if flags:
        return (
            f"if it does so in its first call only, as buffer {' or '.join(map(repr, flags))} says, call the model "
            "before parallelize, on every rank with the same batch: with torch.no_grad(): model(batch)"
        )
    return (
        f"do it in the training loop after optimizer.step(): with torch.no_grad(): model.{name}.clamp_(0, 1); or, if "
        f"no gradient trains it, freeze it before parallelize: model.{name}.requires_grad_(False)"
    )


def _rename_roots(graph: Graph, input_names: Sequence[str]) -> Graph:
    """Inputs as the call names them, parameters and buffers as the module does (dots become underscores)."""
    names = Names(graph)
    new_names = dict(zip(graph.inputs, input_names, strict=True))
    new_names |= {value: re.sub(r"\W", "_", member) for value, member in graph.parameters.items()}
    return call_by(graph, {old: names.fresh(new) for old, new in new_names.items() if old != new})


def _add_unused(graph: Graph, captured: Captured) -> Graph:
    """List the parameters that the graph does not mention too: they are part of the module's state."""
    names = Names(graph)
    listed = set(graph.parameters.values())
    missing = {names.fresh(re.sub(r"\W", "_", m)): m for m in captured.tensors if m not in listed}
    kinds = {
        n: "parameter" if isinstance(captured.tensors[m], torch.nn.Parameter) else "buffer" for n, m in missing.items()
    }
    return replace(
        graph,
        types={**graph.types, **{n: tensor_type(captured.tensors[m]) for n, m in missing.items()}},
        roles={**graph.roles, **kinds},
        parameters={**graph.parameters, **missing},
        trainable=graph.trainable | {n for n, m in missing.items() if captured.tensors[m].requires_grad},
    )
