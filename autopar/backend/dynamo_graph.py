"""The graph that Dynamo passes, with the role and the user's name of each of its flat arguments."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.backend.sharding import whole_parameter
from autopar.lower.compat import storage_key
from autopar.trace import argument_source, is_wrapped_number, run_captured

__all__ = ["CapturedGraph", "Expected", "GraphArgument", "make_module", "read_graph", "readable_name"]

_DTENSOR = "torch.distributed.tensor"
_KEPT_META = ("nn_module_stack", "stack_trace")


@dataclass(frozen=True)
class GraphArgument:
    """One argument of a graph.

    `role` is ``"input"``, ``"parameter"``, ``"buffer"`` or ``"number"`` (also one that travels as a tensor); `name` is
    what the module calls it.
    """

    role: str
    name: str


@dataclass(frozen=True)
class Expected:
    """What Dynamo expects of an output: a plain tensor of this dtype, or a DTensor with these placements on `mesh`."""

    dtype: torch.dtype
    mesh: DeviceMesh | None = None
    placements: tuple[TorchPlacement, ...] = ()


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A graph of Dynamo's, with nothing kept alive that it was made from.

    Args:
        code: the graph, on flat arguments.
        arguments: what they are.
        classes: path of a module that the graph runs through -> name of its class.
        passed: per output the argument that it is, or -1.
        outputs: per output what Dynamo expects it to be, or None if it is no tensor.
        is_distributed: whether the graph itself moves DTensors about: the user's own doing, to be run as it is.
    """

    code: fx.GraphModule
    arguments: tuple[GraphArgument, ...]
    classes: Mapping[str, str]
    passed: tuple[int, ...]
    outputs: tuple[Expected | None, ...]
    is_distributed: bool

    def __deepcopy__(self, memo: Any) -> CapturedGraph:
        """Itself: a copy of a module shares its code."""
        return self

    def numbers(self, values: Sequence[Any]) -> dict[int, Any]:
        """The arguments that are numbers, as such, by their place: a plan is for these."""
        results = {place: values[place] for place in self.places("number")}
        return {place: value.item() if isinstance(value, Tensor) else value for place, value in results.items()}

    @property
    def only_writes(self) -> bool:
        """Whether it makes no tensor that it returns: an optimizer's step, which ranks run on their own tensors."""
        return not any(made is not None and place < 0 for made, place in zip(self.outputs, self.passed, strict=True))

    def places(self, role: str) -> list[int]:
        """The arguments of this role."""
        return [place for place, argument in enumerate(self.arguments) if argument.role == role]

    def names(self, role: str) -> list[str]:
        """Their names."""
        return [argument.name for argument in self.arguments if argument.role == role]


def read_graph(module: fx.GraphModule, example_inputs: Sequence[Any]) -> CapturedGraph:
    """Read what Dynamo hands over, while it is still there."""
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    arguments: list[GraphArgument] = []
    taken: set[str] = set()
    for node, example in zip(holders, example_inputs, strict=True):
        source = argument_source(node)
        name = _unused(readable_name(source) or str(node.name), taken)
        role = "number" if is_wrapped_number(node) else _role(example, source)
        arguments.append(GraphArgument(role, name))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    classes: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.target is whole_parameter and node.args[0] in holders:
            copies[node] = copies[node.args[0]]
            continue
        made = graph.node_copy(node, lambda operand: copies[operand])
        made.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        if "nn_module_stack" in made.meta:
            made.meta["nn_module_stack"] = _readable_stack(made.meta["nn_module_stack"], classes)
        copies[node] = made
    outputs = _outputs(module.graph)
    return CapturedGraph(
        _with_plain_bodies(fx.GraphModule(module, graph)), tuple(arguments), classes,
        tuple(_argument_of(output, holders, arguments) for output in outputs),
        tuple(map(_expected, outputs)), any(map(_moves_dtensors, module.graph.nodes)),
    )  # fmt: skip


def _with_plain_bodies(code: fx.GraphModule) -> fx.GraphModule:
    """`code`, with graphs inside (of activation checkpoints) that take parameters whole."""
    for name, body in list(code.named_children()):
        if isinstance(body, fx.GraphModule):
            graph = fx.Graph()
            copies: dict[fx.Node, fx.Node] = {}
            for node in body.graph.nodes:
                is_read = node.target is whole_parameter
                copies[node] = copies[node.args[0]] if is_read else graph.node_copy(node, copies.__getitem__)
            code.add_module(name, _with_plain_bodies(fx.GraphModule(body, graph)))
    return code


def _outputs(graph: fx.Graph) -> Sequence[Any]:
    node = next(node for node in graph.nodes if node.op == "output")
    return cast("Sequence[Any]", node.args[0])


def _argument_of(output: Any, holders: Sequence[fx.Node], arguments: Sequence[GraphArgument]) -> int:
    """The place of the argument that an output is, or -1.

    It may be a buffer that the graph wrote to (``self.u = normalize(x, out=self.u)``): Dynamo sets the attribute to the
    output, so that another tensor with the same values would take the buffer's place.
    """
    if output in holders:
        return holders.index(output)
    buffers = [place for place, argument in enumerate(arguments) if argument.role == "buffer"]
    return next((place for place in buffers if _is_same_memory(output, holders[place])), -1)


def _is_same_memory(output: Any, holder: fx.Node) -> bool:
    """Whether both are the same entries of one tensor, without gradient."""
    found = [_entries(node) for node in (output, holder)]
    return bool(found[0]) and found[0] == found[1]


def _entries(node: Any) -> tuple[object, ...]:
    """Which entries of which memory a plain tensor without gradient is; empty: it is something else."""
    x = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.requires_grad:
        return ()
    return storage_key(x), x.shape, x.stride(), x.storage_offset(), x.dtype


def _expected(output: Any) -> Expected | None:
    example = output.meta.get("example_value") if isinstance(output, fx.Node) else None
    if isinstance(example, DTensor):
        return Expected(example.dtype, example.device_mesh, tuple(example.placements))
    return Expected(example.dtype) if isinstance(example, Tensor) else None


def _moves_dtensors(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("full_tensor", "redistribute", "to_local")
    return node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith(_DTENSOR)


def _role(example: Any, source: str) -> str:
    if not isinstance(example, Tensor):
        return "number"
    if isinstance(example, nn.Parameter):
        return "parameter"
    return "buffer" if re.search(r"_buffers(?:'\])?\[", source) else "input"


# Dynamo reads the tables of modules with a `__getattr__` of their own, such as peft's, from their `__dict__`.
_TABLES = r"\.(?:__dict__\[')?_(?:modules|parameters|buffers)\b(?:'\])?"


def readable_name(source: str) -> str:
    """``transformer.h.0.weight`` for ``L['self']._modules['transformer']._modules['h']...``; "" for nothing."""
    text = re.sub(_TABLES, "", source)
    text = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", text)
    text = re.sub(r"^[LG]\.(self(\.|$))?", "", text)
    return re.sub(r"[^\w.]", "_", text).strip(".")


def _readable_stack(stack: Mapping[str, Any], classes: dict[str, str]) -> dict[str, tuple[str, str]]:
    results: dict[str, tuple[str, str]] = {}
    for key, (source, owner) in stack.items():
        path = readable_name(re.sub(r"@\d+$", "", source))
        kind = owner if isinstance(owner, str) else str(owner.__qualname__)
        classes[path] = kind.rpartition(".")[2]
        results[key] = path, kind
    return results


def _unused(name: str, taken: set[str]) -> str:
    number, result = 1, name
    while result in taken:
        number += 1
        result = f"{name}_{number}"
    taken.add(result)
    return result


def make_module(graph: CapturedGraph, values: Sequence[Any]) -> nn.Module:
    """The graph as a module: called on its inputs, with these parameters, buffers and numbers."""
    taken: set[str] = set()
    names = [_unused(_identifier(name), taken) for name in graph.names("input")]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("self", *names)]

    def forward(self: _GraphModule, *tensors: Tensor) -> list[Any]:
        return self.run(tensors)

    forward.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    made = type("Graph", (_GraphModule,), {"forward": forward})(graph, values)
    for argument, value in zip(graph.arguments, values, strict=True):
        path, _, last = argument.name.rpartition(".")
        if argument.role == "parameter":
            _submodule(made, path, graph.classes).register_parameter(last, value)
        elif argument.role == "buffer":
            _submodule(made, path, graph.classes).register_buffer(last, value)
    for path in graph.classes:
        _submodule(made, path, graph.classes)
    return made


def _identifier(name: str) -> str:
    result = re.sub(r"\W", "_", name)
    return f"{result}_" if keyword.iskeyword(result) or result == "self" or not result.isidentifier() else result


def _submodule(root: nn.Module, path: str, classes: Mapping[str, str]) -> nn.Module:
    """The module at `path`, made with all above it if there is none, of a class called as the user's."""
    module = root
    walked: list[str] = []
    for name in path.split(".") if path else ():
        walked.append(name)
        if name not in dict(module.named_children()):
            kind = type(classes.get(".".join(walked), "Module"), (nn.Module,), {})
            module.add_module(name, kind())
        module = module.get_submodule(name)
    return module


class _GraphModule(nn.Module):
    """Looks its parameters and buffers up when it runs, so that a copy with others runs on those."""

    def __init__(self, graph: CapturedGraph, values: Sequence[Any]) -> None:
        super().__init__()
        self._graph = graph
        self._numbers = graph.numbers(values)

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The outputs that are no arguments."""
        graph, inputs = self._graph, iter(tensors)
        flat: list[Any] = []
        for place, argument in enumerate(graph.arguments):
            if argument.role == "number":
                flat.append(self._numbers[place])
            elif argument.role == "input":
                flat.append(next(inputs))
            else:
                path, _, last = argument.name.rpartition(".")
                flat.append(getattr(self.get_submodule(path), last))
        results = run_captured(graph.code, flat)
        return [result for result, place in zip(results, graph.passed, strict=True) if place < 0]
