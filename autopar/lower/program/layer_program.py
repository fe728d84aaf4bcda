"""One layer under one strategy as an FX program on plain local tensors, with every move between devices in
sight.

A value goes: produced layout --once--> copy layout --for each reader--> that operand's layout.  `search`
prices exactly these moves.  In time (microbatches) a value is cut on the way: before the copy if it arrives
whole and all readers want the same slices, else for each reader.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.errors import PlanMismatchError
from autopar.lower.kernels import resolve_target
from autopar.lower.program.layer_ops import draw, microbatch_slice, redistribute, run_kernel
from autopar.lower.program.naming import Buffer, layout_suffix, node_name, step_buffers, type_comment
from autopar.placement import (
    BROADCAST,
    REPLICATE,
    Axis,
    Layout,
    Placement,
    format_layout,
    local_shape,
    mesh_axes,
    reshard,
)
from autopar.plan import LayerStrategy
from autopar.program import Arg, Layer, Op, Option, Program, Ref, TensorType, is_cheap

__all__ = ["LayerProgram", "find_option", "layer_program"]


@dataclass(frozen=True)
class LayerProgram:
    """The lowered program of all layers of one kind that run under one strategy.

    `module` is called ``module(*inputs, *held, context)``: inputs in the strategy's input layouts, held
    values in their copy layouts, a `LayerContext`.  It returns the outputs in the strategy's output layouts.
     `output_times` are their placements in time.  `cheap` names the nodes that selective recomputation may
     run again.
    """

    module: fx.GraphModule
    layer: Layer
    strategy: LayerStrategy
    num_microbatches: int
    held_layouts: tuple[Layout, ...]
    output_times: tuple[Placement, ...]
    cheap: frozenset[str]


def find_option(op: Op, factor: str) -> Option:
    """The op's option of this factor; ``"-"`` and ``"~"`` exist for every op.

    Raises:
        PlanMismatchError: the op has no such factor.
    """
    for option in op.options:
        if option.factor == factor:
            return option
    if factor in ("-", "~"):
        placement = REPLICATE if factor == "-" else BROADCAST
        return Option(factor, (placement,) * len(op.operands), (placement,) * len(op.results))
    raise PlanMismatchError(
        f"op {op.name} ({op.target}) has no factor {factor!r}; it has "
        f"{[option.factor for option in op.options]}: plan again with this version of autopar"
    )


def layer_program(
    program: Program,
    layer: Layer,
    strategy: LayerStrategy,
    num_microbatches: int = 1,
    arrivals: tuple[Placement, ...] | None = None,
    device: str = "cpu",
) -> LayerProgram:
    """Build the local program of `layer`, the first of its kind.

    Args:
        program: that the layer is in.
        layer: the first layer of the kind (the strategy's copies are named after its values).
        strategy: how it runs.
        num_microbatches: into how many slices the batch is cut in time.
        arrivals: per layer input, its placement in time where it arrives; by default whole (``R``).
        device: where ops that create tensors put them.

    Raises:
        PlanMismatchError: the strategy names factors or needs moves in time that this layer does not have.
    """
    if not len(layer.ops) == len(strategy.assignments) or (strategy.time and len(strategy.time) != len(layer.ops)):
        raise PlanMismatchError(
            f"layer {layer.name} has {len(layer.ops)} ops, but the strategy assigns "
            f"{len(strategy.assignments)} in space and {len(strategy.time)} in time"
        )
    time_factors = strategy.time if num_microbatches > 1 else ()
    builder = _Builder(program, layer, strategy, num_microbatches, time_factors, device)
    builder.add_placeholders(arrivals or (REPLICATE,) * len(layer.inputs))
    for index, op in enumerate(layer.ops):
        builder.add_op(index, op)
    return builder.finish()


@dataclass(frozen=True)
class _Place:
    """A tensor at one point of its way: its node, layout on the devices and placement in time."""

    node: fx.Node
    layout: Layout
    time: Placement


@dataclass
class _Builder:
    """The state of one build: the graph so far and where each value lies in it."""

    program: Program
    layer: Layer
    strategy: LayerStrategy
    num_microbatches: int
    time_factors: tuple[str, ...]
    device: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    produced: dict[str, _Place] = field(default_factory=dict[str, _Place])
    copies: dict[str, _Place] = field(default_factory=dict[str, _Place])
    cheap: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.mesh = self.strategy.mesh
        self.place = ("", "")  # the module and the line that nodes are made for
        self.copy_layouts = dict(self.strategy.copies)
        self.time_operands = [
            find_option(op, factor).operands
            for op, factor in zip(self.layer.ops, self.time_factors or ("-",) * len(self.layer.ops), strict=True)
        ]

    def add_placeholders(self, arrivals: tuple[Placement, ...]) -> None:
        """Inputs, held values (in their copy layouts), and the context."""
        strategy = self.strategy
        for name, layout, time in zip(self.layer.inputs, strategy.inputs, arrivals, strict=True):
            self.produced[name] = self._placeholder(name, layout, time)
        for name, layout in zip(self.layer.held, self.held_layouts(), strict=True):
            self.produced[name] = self._placeholder(name, layout, REPLICATE)
        self.context = self.graph.placeholder("context")
        for name in (*self.layer.inputs, *self.layer.held):
            self._cut_on_arrival(name)

    def add_op(self, index: int, op: Op) -> None:
        """The op on its operands' local tensors, each moved to where the op's options want it."""
        self.place = (op.module, op.source)
        options = [find_option(op, factor) for factor in self.strategy.assignments[index]]
        operands = iter(
            [
                self._operand(name, tuple(option.operands[i] for option in options), self.time_operands[index][i])
                for i, name in enumerate(op.operands)
            ]
        )
        time = find_option(op, self.time_factors[index]) if self.time_factors else None
        times = time.results if time else (REPLICATE,) * len(op.results)
        layouts = [tuple(option.results[i] for option in options) for i in range(len(op.results))]
        local = [self._local(name, layout, t) for name, layout, t in zip(op.results, layouts, times, strict=True)]
        args = [self._literal(arg, operands) for arg in op.args]
        for position in op.size_args:
            args[position] = local[0].shape
        kwargs = {key: self._literal(arg, operands) for key, arg in op.kwargs}
        if "device" in kwargs:
            kwargs["device"] = torch.device(self.device)
        node = self._call_op(index, op, options, layouts, tuple(args), kwargs)
        self._define(op, node, local, layouts, times)

    def finish(self) -> LayerProgram:
        """Move the outputs to their layouts and compile the code."""
        nodes: list[fx.Node] = []
        times: list[Placement] = []
        self.place = ("", "")
        for name, layout in zip(self.layer.outputs, self.strategy.outputs, strict=True):
            place = self._copy(name)
            nodes.append(self._move(name, place, layout).node)
            times.append(place.time)
        self.graph.output(tuple(nodes))
        self.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.graph, class_name=f"Kind{self.layer.kind}")
        return LayerProgram(
            module,
            self.layer,
            self.strategy,
            self.num_microbatches,
            self.held_layouts(),
            tuple(times),
            frozenset(self.cheap),
        )

    def held_layouts(self) -> tuple[Layout, ...]:
        """In which layouts held values arrive: as copies, but whole in the dim in which time cuts them first."""
        found: list[Layout] = []
        for name, stored in zip(self.layer.held, self.strategy.storage, strict=True):
            time = self._time_on_arrival(name)
            copy = self.copy_layouts.get(name, stored)
            found.append(tuple(REPLICATE if time is not None and p == time else p for p in copy))
        return tuple(found)

    def _placeholder(self, name: str, layout: Layout, time: Placement) -> _Place:
        node = self.graph.placeholder(node_name(name))
        node.meta["comment"] = type_comment(self._local(name, layout, time), layout)
        return _Place(node, layout, time)

    def _local(self, name: str, layout: Layout, time: Placement) -> TensorType:
        tensor = self.program.type_of(name)
        shape = local_shape(tensor.shape, (time,), (self.num_microbatches,))
        return TensorType(local_shape(shape, layout, self.mesh), tensor.dtype)

    def _cut_on_arrival(self, name: str) -> None:
        time = self._time_on_arrival(name)
        if time is not None and not self.produced[name].time.is_shard:
            self.produced[name] = self._cut(name, self.produced[name], time)

    def _time_on_arrival(self, name: str) -> Placement | None:
        """How a whole arrival that is no parameter is cut right away: if all its readers want the same slices."""
        wanted = {
            self.time_operands[index][mention]
            for index, op in enumerate(self.layer.ops)
            for mention, operand in enumerate(op.operands)
            if operand == name
        }
        is_cut = len(wanted) == 1 and self.program.values[name].role != "parameter"
        return next((time for time in wanted if is_cut and time.is_shard), None)

    def _copy(self, name: str) -> _Place:
        if name not in self.copies:
            place = self.produced[name]
            self.copies[name] = self._move(name, place, self.copy_layouts.get(name, place.layout))
        return self.copies[name]

    def _operand(self, name: str, layout: Layout, time: Placement) -> fx.Node:
        place = self._copy(name)
        if place.time != time:
            place = self._cut(name, place, time)
        return self._move(name, place, layout).node

    def _cut(self, name: str, place: _Place, time: Placement) -> _Place:
        """Change the placement in time; only what needs no other microbatch is possible."""
        value = self.program.values[name]
        is_whole = place.time.kind in "RB"
        if is_whole and time.kind in "RB" and (not value.requires_grad or value.role == "parameter"):
            return _Place(place.node, place.layout, time)
        if not (is_whole and time.is_shard) or value.requires_grad:
            raise PlanMismatchError(
                f"microbatches can't take {name} from {place.time} to {time} in time: plan again "
                "with this version of autopar"
            )
        # Time is outside all devices: microbatch m of a shard is not the shard of microbatch m.
        place = self._move(name, place, tuple(REPLICATE if p == time else p for p in place.layout))
        node = self._call(
            microbatch_slice,
            (place.node, time.dim, self.num_microbatches, self.context),
            f"{node_name(name)}_microbatch",
        )
        node.meta["comment"] = type_comment(self._local(name, place.layout, time), place.layout)
        self.cheap.add(node.name)
        return _Place(node, place.layout, time)

    def _move(self, name: str, place: _Place, layout: Layout) -> _Place:
        steps = reshard(place.layout, layout, self.mesh)
        if not steps:
            return _Place(place.node, layout, place.time)
        args = (place.node, format_layout(place.layout), format_layout(layout), self.mesh, self.context)
        node = self._call(redistribute, args, f"{node_name(name)}_{layout_suffix(layout)}")
        local = self._local(name, layout, place.time)
        tensor = self.program.type_of(name)
        whole = TensorType(local_shape(tensor.shape, (place.time,), (self.num_microbatches,)), tensor.dtype)
        node.meta["comment"] = type_comment(local, layout)
        node.meta["collectives"] = step_buffers(steps, whole, has_gradient=self.program.values[name].requires_grad)
        node.meta["axes"] = frozenset(step.axis for step in steps)
        if all(step.forward in ("none", "slice", "pad", "mask") for step in steps):
            self.cheap.add(node.name)
        return _Place(node, layout, place.time)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], name: str, kwargs: Any = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        node.meta["place"] = self.place
        return node

    def _call_op(
        self,
        index: int,
        op: Op,
        options: list[Option],
        layouts: list[Layout],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> fx.Node:
        axes = mesh_axes(self.mesh)
        name = node_name(op.results[0]) if len(op.results) == 1 else node_name(op.name)
        kernels = {option.kernel for option in options if option.kernel}
        if len(kernels) > 1:
            raise PlanMismatchError(f"op {op.name} can't run by two kernels at once: {sorted(kernels)}")
        if kernels:
            split = tuple((a.size, a.stride) for a, o in zip(axes, options, strict=True) if o.kernel and a.size > 1)
            node = self._call(run_kernel, (kernels.pop(), split, self.context, *args), name, kwargs)
            node.meta["axes"] = frozenset(Axis(*axis) for axis in split)
            node.meta["collectives"] = self._kernel_buffers(index, op, options, layouts)
            return node
        if op.is_random:
            shards = tuple(
                (a.size, a.stride) for a, p in zip(axes, layouts[0], strict=True) if p.is_shard and a.size > 1
            )
            return self._call(draw, (op.target, index, shards, self.context, *args), name, kwargs)
        node = self._call(resolve_target(op.target), args, name, kwargs)
        if is_cheap(op):
            self.cheap.add(node.name)
        return node

    def _kernel_buffers(self, index: int, op: Op, options: list[Option], layouts: list[Layout]) -> tuple[Buffer, ...]:
        """What the kernel of `op` communicates."""
        names = (*op.operands, *op.results)
        laid = [*zip(*(option.operands for option in options), strict=True), *layouts]
        times = (*self.time_operands[index], *(REPLICATE for _ in op.results))
        found: list[Buffer] = []
        for axis, option in zip(mesh_axes(self.mesh), options, strict=True):
            for each in option.collectives if axis.size > 1 else ():
                whole = self._local(names[each.operand], laid[each.operand], times[each.operand]).shape
                shape = tuple(size for dim, size in enumerate(whole) if dim not in each.drop_dims)
                num_bytes = TensorType(shape, each.dtype).num_bytes * each.count
                found.append(Buffer(each.kind, axis, num_bytes, each.phase))
        return tuple(found)

    def _define(
        self,
        op: Op,
        node: fx.Node,
        local: list[TensorType],
        layouts: list[Layout],
        times: tuple[Placement, ...],
    ) -> None:
        nodes = [node]
        if len(op.results) > 1:
            nodes = [self._call(operator.getitem, (node, i), node_name(name)) for i, name in enumerate(op.results)]
            if node.name in self.cheap:
                self.cheap.update(n.name for n in nodes)
        for name, own, tensor, layout, time in zip(op.results, nodes, local, layouts, times, strict=True):
            own.meta["value"] = name  # fx renames nodes that are called as a builtin is
            own.meta["comment"] = type_comment(tensor, layout)
            self.produced[name] = _Place(own, layout, time)

    def _literal(self, arg: Arg, operands: Iterator[fx.Node]) -> Any:
        if isinstance(arg, Ref):
            return next(operands)
        if isinstance(arg, tuple):
            return [self._literal(part, operands) for part in arg]
        if isinstance(arg, str) and arg.startswith("torch."):
            return getattr(torch, arg.removeprefix("torch."))
        return arg
