"""One layer under one strategy as an FX program on plain local tensors, with every move between devices in sight.

What runs, in which order and on which local types is `layer.local_program`'s to say; a program has one node for
each of its instructions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.errors import PlanMismatchError
from autopar.lower.kernels import chooses_device, resolve_target, torch_argument
from autopar.lower.program.layer_ops import (
    begin_kernel,
    continue_kernel,
    draw,
    finish_kernel,
    microbatch_slice,
    microbatch_term,
    moved_product,
    products_of_moved,
    redistribute,
    run_kernel,
)
from autopar.lower.program.naming import layout_suffix, node_name, type_comment
from autopar.placement import LOCAL, Axis, Placement, format_layout, mesh_axes
from autopar.plan import LayerStrategy
from autopar.program import Layer, Program
from autopar.step.activation_policies import ActivationPolicy, activation_policy
from autopar.step.layer.instructions import (
    InParts,
    InPieces,
    Instruction,
    KeepInFirst,
    LocalProgram,
    Reshard,
    RunOp,
    TakeMicrobatch,
)
from autopar.step.layer.local_layer import place
from autopar.step.layer.local_program import derive
from autopar.step.layer.op_states import kernel_runs
from autopar.step.layer.pieces import row_product
from autopar.step.layer.value_flows import gets_gradient
from autopar.step.prices import reshard_calls

__all__ = ["LayerProgram", "layer_program"]


@dataclass(frozen=True)
class LayerProgram:
    """The lowered program of all layers of one kind that run under one strategy.

    `module` is called ``module(*inputs, *state, context)``: inputs in the strategy's input layouts, parameters, buffers
    and constants in their copy layouts, a `LayerContext`.  It returns the outputs in the strategy's output layouts.
    `local` is what it was emitted from.  `rerun` names the nodes that `ActivationPolicy.reruns`.  `unread` are the
    positions of differentiable outputs that only the model's caller reads, mostly without gradients.
    """

    module: fx.GraphModule
    layer: Layer
    strategy: LayerStrategy
    num_microbatches: int
    local: LocalProgram
    rerun: frozenset[str]
    unread: tuple[int, ...]


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
        arrivals: per layer input, its placement in time where it arrives; by default see `derive`.
        device: where ops that create tensors put them.

    Raises:
        PlanMismatchError: the strategy names factors or needs moves in time that this layer does not have.
    """
    if not len(layer.ops) == len(strategy.assignments) or (strategy.time and len(strategy.time) != len(layer.ops)):
        raise PlanMismatchError(
            f"layer {layer.name} has {len(layer.ops)} ops, but the strategy assigns "
            f"{len(strategy.assignments)} in space and {len(strategy.time)} in time"
        )
    local = derive(place(program, layer, strategy, num_microbatches), arrivals)
    policy = activation_policy(strategy.recompute)
    emitter = _Emitter(layer, strategy.mesh, num_microbatches, local, device, policy)
    emitter.add_placeholders()
    for instruction in local.instructions:
        emitter.add(instruction)
    graph = emitter.finish()
    module = fx.GraphModule(torch.nn.Module(), graph, class_name=f"Kind{layer.kind}")
    put_out = [program.values[name] for name in layer.outputs]
    unread = [i for i, x in enumerate(put_out) if x.requires_grad and not gets_gradient(program, x)]
    if not any(gets_gradient(program, x) for x in put_out):
        unread = []  # its backward runs for them or not at all
    return LayerProgram(module, layer, strategy, num_microbatches, local, frozenset(emitter.rerun), tuple(unread))


@dataclass
class _Emitter:
    """The graph so far, and the node of each local value."""

    layer: Layer
    mesh: tuple[int, ...]
    num_microbatches: int
    local: LocalProgram
    device: str
    policy: ActivationPolicy
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    rerun: set[str] = field(default_factory=set[str])
    place: tuple[str, str] = ("", "")  # the module and the line that nodes are made for

    def add_placeholders(self) -> None:
        """Inputs, state (in their copy layouts), and the context."""
        for index in (*self.local.inputs, *self.local.state):
            node = self.graph.placeholder(node_name(self.local.values[index].value.name))
            # fx renames what is named as a builtin ("sum" to "sum_1"), and would write over an argument of that name.
            node.target = node.name
            self._keep(index, node)
        self.context = self.graph.placeholder("context")
        self.places = {op.index: (op.op.module, op.op.source) for op in self._ops()}

    def _ops(self) -> Iterator[RunOp]:
        return (each for each in self.local.singles if isinstance(each, RunOp))

    def add(self, instruction: Instruction) -> None:
        """The node of one instruction."""
        if isinstance(instruction, RunOp):
            self.place = self.places[instruction.index]
            self._run(instruction)
        elif isinstance(instruction, Reshard):
            self.place = self.places.get(instruction.before, ("", ""))
            self._reshard(instruction)
        elif isinstance(instruction, InPieces):
            self.place = self.places[instruction.products[0].index]
            self._in_pieces(instruction)
        elif isinstance(instruction, InParts):
            self._in_parts(instruction)
        elif isinstance(instruction, KeepInFirst):
            self._keep_in_first(instruction)
        else:
            self._take_microbatch(instruction)

    def finish(self) -> fx.Graph:
        """Put the outputs out."""
        self.graph.output(tuple(self.nodes[index] for index in self.local.outputs))
        self.graph.lint()
        return self.graph

    def _keep(self, index: int, node: fx.Node) -> None:
        value = self.local.values[index]
        node.meta["comment"] = type_comment(value.type, value.layout)
        self.nodes[index] = node

    def _take_microbatch(self, instruction: TakeMicrobatch) -> None:
        target = self.local.values[instruction.target]
        args = (self.nodes[instruction.source], target.time.dim, self.num_microbatches, self.context)
        node = self._call(microbatch_slice, args, f"{node_name(target.value.name)}_microbatch")
        self.rerun.add(node.name)
        self._keep(instruction.target, node)

    def _keep_in_first(self, instruction: KeepInFirst) -> None:
        name = f"{node_name(self.local.values[instruction.target].value.name)}_term"
        node = self._call(microbatch_term, (self.nodes[instruction.source], self.context), name)
        self.rerun.add(node.name)
        self._keep(instruction.target, node)

    def _reshard(self, instruction: Reshard) -> None:
        source, target = (self.local.values[index] for index in (instruction.source, instruction.target))
        args = (
            self.nodes[instruction.source], format_layout(source.layout), format_layout(target.layout), self.mesh,
            self.context,
        )  # fmt: skip
        node = self._call(redistribute, args, f"{node_name(target.value.name)}_{layout_suffix(target.layout)}")
        node.meta["collectives"] = reshard_calls(
            instruction.steps, instruction.tensor.num_bytes, has_gradient=target.value.requires_grad
        )
        node.meta["axes"] = frozenset(step.axis for step in instruction.steps)
        if all(step.forward in LOCAL for step in instruction.steps):
            self.rerun.add(node.name)
        self._keep(instruction.target, node)

    def _in_pieces(self, each: InPieces) -> None:
        """One node for a collective and its products: a result for each product, or what is moved."""
        source, target = (self.local.values[index] for index in (each.move.source, each.move.target))
        forms = [form for run in each.products if (form := row_product(run))]
        first = each.move.source if each.moves_first else each.products[0].operands[forms[0].rows]
        matrices: list[tuple[fx.Node, fx.Node | None, bool]] = []
        for run, form in zip(each.products, forms, strict=True):
            added = None if form.added < 0 else self.nodes[run.operands[form.added]]
            matrices.append((self.nodes[run.operands[form.matrix]], added, form.transposed))
        args = (
            self.nodes[first], tuple(matrices) if each.moves_first else matrices[0], format_layout(source.layout),
            format_layout(target.layout), self.mesh, (each.dim, each.count), self.context,
        )  # fmt: skip
        calls = reshard_calls(
            each.move.steps, each.move.tensor.num_bytes / each.count, has_gradient=target.value.requires_grad
        )
        results = [run.results[0] for run in each.products] if each.moves_first else [each.move.target]
        names = [node_name(self.local.values[index].value.name) for index in results]
        function = products_of_moved if each.moves_first else moved_product
        node = self._call(function, args, f"{names[0]}_in_pieces")
        node.meta["collectives"] = tuple(call for call in calls for _ in range(each.count))
        node.meta["axes"] = frozenset(step.axis for step in each.move.steps)
        if not each.moves_first:
            self._keep(each.move.target, node)
            return
        for number, (index, name) in enumerate(zip(results, names, strict=True)):
            own = self._call(operator.getitem, (node, number), name)
            own.meta["value"] = self.local.values[index].value.name
            self._keep(index, own)

    def _in_parts(self, each: InParts) -> None:
        """A node for each part of the kernel, with those of what runs in its pauses in between."""
        name = node_name(each.run.op.results[0])
        self.place = self.places[each.run.index]
        parts = self._call_kernel(begin_kernel, each.run, *self._arguments(each.run), f"{name}_begun")
        for number, pause in enumerate(each.pauses):
            if number:
                self.place = self.places[each.run.index]
                self._call(continue_kernel, (parts,), f"{name}_continued")
            for single in pause:
                self.add(single)
        self.place = self.places[each.run.index]
        node = self._call(finish_kernel, (parts,), name)
        node.meta["value"] = each.run.op.results[0]
        self._keep(each.run.results[0], node)

    def _run(self, instruction: RunOp) -> None:
        op = instruction.op
        node = self._call_op(instruction, *self._arguments(instruction))
        nodes = [node]
        if len(op.results) > 1:
            nodes = [self._call(operator.getitem, (node, i), node_name(name)) for i, name in enumerate(op.results)]
            if node.name in self.rerun:
                self.rerun.update(each.name for each in nodes)
        for index, name, own in zip(instruction.results, op.results, nodes, strict=True):
            own.meta["value"] = name  # fx renames nodes that are called as a builtin is
            self._keep(index, own)

    def _arguments(self, instruction: RunOp) -> tuple[tuple[Any, ...], dict[str, Any]]:
        op, state = instruction.op, instruction.state
        operands = (self.nodes[index] for index in instruction.operands)
        args = [torch_argument(arg, lambda _: next(operands)) for arg in op.args]
        for position in op.size_args:
            args[position] = state.result_types[0].shape
        kwargs = {key: torch_argument(arg, lambda _: next(operands)) for key, arg in op.kwargs}
        if chooses_device(op):
            kwargs["device"] = torch.device(self.device)
        return tuple(args), kwargs

    def _call_op(self, instruction: RunOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        op, state = instruction.op, instruction.state
        name = node_name(op.results[0]) if len(op.results) == 1 else node_name(op.name)
        if state.has_kernel:
            return self._call_kernel(run_kernel, instruction, args, kwargs, name)
        if op.is_random:
            shards = self._axes_where(tuple(placement.is_shard for placement in state.results[0]))
            return self._call(draw, (op.target, instruction.index, shards, self.context, *args), name, kwargs)
        node = self._call(resolve_target(op.target), args, name, kwargs)
        if self.policy.is_rerun(op):
            self.rerun.add(node.name)
        return node

    def _call_kernel(
        self, function: Callable[..., Any], run: RunOp, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> fx.Node:
        options = run.state.options
        kernel = next(option.kernel for option in options if option.kernel)
        split = self._axes_where(tuple(bool(option.kernel) for option in options))
        node = self._call(function, (kernel, split, self.context, *args), name, kwargs)
        node.meta["axes"] = frozenset(Axis(*axis) for axis in split)
        node.meta["collectives"] = kernel_runs(run.state, self.mesh)
        return node

    def _axes_where(self, chosen: tuple[bool, ...]) -> tuple[tuple[int, int], ...]:
        """The axes of more than one device that are chosen, as literals."""
        axes = zip(mesh_axes(self.mesh), chosen, strict=True)
        return tuple((axis.size, axis.stride) for axis, is_chosen in axes if is_chosen and axis.size > 1)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], name: str, kwargs: Any = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        node.meta["place"] = self.place
        return node
