"""Activation recomputation: what a layer keeps between its forward and its backward.

Autograd hands every tensor that it wants to keep to a hook; the hook keeps a `SavedTensor`, and when the layer has
run, those whose tensor can be had again let go of it: a gathered parameter (ZeRO-3) is gathered again, the
result of an op that is rerun (`ActivationPolicy.reruns`) is computed again; the others may be offloaded
(`OffloadedTensors`).  Tensors are recognized by their storage, so views count too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar.lower.compat import local_part_of, storage_key
from autopar.lower.parameters.layer_parameters import StepParameters
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.layer_program import LayerProgram
from autopar.lower.program.offloading import OffloadedTensors
from autopar.lower.program.saved_tensors import Recipe, SavedTensor
from autopar.step.activation_policies import activation_policy

__all__ = ["KeepingProgram", "keeping_program", "run_keeping_less"]


class KeepingProgram:
    """A layer program that also returns what its rerun ops read and compute, and the programs that compute
    it again.

    One for all layers of a kind and strategy.
    """

    def __init__(self, program: LayerProgram) -> None:
        """Build the forward program; recomputing programs follow when it is known what autograd saves."""
        self.program = program
        graph = program.module.graph
        self.nodes = _relevant_nodes(graph, program.rerun)
        self.module = _returning(graph, self.nodes)
        self._recomputing: dict[frozenset[str], _Recomputing] = {}

    def recomputing(self, names: frozenset[str]) -> _Recomputing:
        """The program that computes the nodes called `names` from kept ones."""
        if names not in self._recomputing:
            self._recomputing[names] = _recomputing(self.program.module.graph, self.program.rerun, names)
        return self._recomputing[names]


@dataclass(frozen=True)
class _Recomputing:
    """``module(*kept, context)`` gives the values of `names`; `kept` names its arguments."""

    module: fx.GraphModule
    kept: tuple[str, ...]
    names: tuple[str, ...]


def _relevant_nodes(graph: fx.Graph, rerun: frozenset[str]) -> tuple[str, ...]:
    """Rerun nodes and what they read, in the graph's order, without the context and multiple results."""
    relevant = {n.name for n in graph.nodes if n.name in rerun}
    relevant |= {n.name for node in graph.nodes if node.name in rerun for n in node.all_input_nodes}
    return tuple(n.name for n in graph.nodes if n.name in relevant and "comment" in n.meta)


def _returning(graph: fx.Graph, names: Sequence[str]) -> fx.GraphModule:
    """A copy of the program that returns ``(outputs, values of names)``."""
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    outputs = copied.graph_copy(graph, mapping)
    by_name = {node.name: new for node, new in mapping.items()}
    copied.output((outputs, tuple(by_name[name] for name in names)))
    return fx.GraphModule(torch.nn.Module(), copied)


def _recomputing(graph: fx.Graph, rerun: frozenset[str], names: frozenset[str]) -> _Recomputing:
    by_name = {node.name: node for node in graph.nodes}
    needed: set[fx.Node] = set()
    waiting = [by_name[name] for name in names]
    kept: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in needed or node in kept or node.name == "context":
            continue
        if node.name not in rerun:
            kept.add(node)
            continue
        needed.add(node)
        waiting.extend(node.all_input_nodes)
    made = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    arguments = [node for node in graph.nodes if node in kept]
    for node in arguments:
        mapping[node] = made.placeholder(node.name)
    mapping[by_name["context"]] = made.placeholder("context")
    for node in graph.nodes:
        if node in needed:
            mapping[node] = made.node_copy(node, lambda n: mapping[n])
    results = [node for node in graph.nodes if node.name in names]
    made.output(tuple(mapping[node] for node in results))
    return _Recomputing(
        fx.GraphModule(torch.nn.Module(), made),
        tuple(n.name for n in arguments),
        tuple(n.name for n in results),
    )


class _Recomputation:
    """The values of one run that backward computes again: all at once, when the first is read."""

    def __init__(self, recomputing: _Recomputing, kept: Sequence[Recipe], context: LayerContext) -> None:
        self._recomputing = recomputing
        self._kept = kept
        self._context = context
        self._values: dict[str, Tensor] | None = None

    def value(self, name: str) -> Tensor:
        if self._values is None:
            with torch.no_grad():
                values = self._recomputing.module(*(get() for get in self._kept), self._context)
            self._values = dict(zip(self._recomputing.names, values, strict=True))
        return self._values[name]


def keeping_program(program: LayerProgram, *, compiled: bool) -> KeepingProgram | None:
    """The variant of `program` for how its strategy keeps activations; None if autograd keeps what it wants, the whole
    layer runs again, or a compiler sees to it.
    """
    reruns = activation_policy(program.strategy.recompute).reruns is not None
    return KeepingProgram(program) if reruns and not compiled else None


def run_keeping_less(
    program: LayerProgram,
    keeping: KeepingProgram | None,
    inputs: Sequence[Tensor],
    state: Sequence[Tensor],
    context: LayerContext,
    parameters: StepParameters | None = None,
    offloaded: OffloadedTensors | None = None,
) -> tuple[Tensor, ...]:
    """Run a layer program; let autograd keep neither gathered parameters nor what its strategy does not keep.

    Args:
        program: to run.
        keeping: its `keeping_program`.
        inputs: the layer's inputs.
        state: its parameters, buffers and constants, in their copy layouts.
        context: of this run.
        parameters: its parameters in this step, if their copies may have to be freed.
        offloaded: takes what is kept, if that is to leave the device.
    """
    boxes: list[SavedTensor] = []

    def pack(tensor: Tensor) -> SavedTensor:
        box = SavedTensor(tensor.detach())  # or the graph would hold itself where backward never runs
        boxes.append(box)
        return box

    with saved_tensors_hooks(pack, SavedTensor.open):
        if keeping is None:
            outputs, values = program.module(*inputs, *state, context), ()
        else:
            outputs, values = keeping.module(*inputs, *state, context)
    gathered = _drop_copies(boxes, parameters) if parameters is not None and parameters.frees else {}
    if keeping is not None:
        boxes += _drop_rerun(boxes, keeping, values, gathered, context)
    if offloaded is not None:
        offloaded.take(boxes, state)
    boxes.clear()  # autograd holds `pack` until the layer's last backward has run
    return outputs


def _drop_copies(boxes: Sequence[SavedTensor], parameters: StepParameters) -> dict[int, Recipe]:
    """Let go of saved compute copies that were gathered; storage -> how to have the copy in backward."""
    own = {storage_key(local_part_of(p)) for p in parameters.stored}
    recipes: dict[int, Recipe] = {}
    for index, value in enumerate(parameters.copies()):
        if storage_key(value) not in own:
            recipes[storage_key(value)] = lambda index=index: parameters.copies()[index]
    for box in boxes:
        if box.tensor is not None and storage_key(box.tensor) in recipes:
            box.let_go(recipes[storage_key(box.tensor)])
    return recipes


def _drop_rerun(
    boxes: Sequence[SavedTensor],
    keeping: KeepingProgram,
    values: Sequence[Tensor | None],
    gathered: dict[int, Recipe],
    context: LayerContext,
) -> list[SavedTensor]:
    """Let go of saved results of ops that are rerun; what is kept to compute them again."""
    by_name = {name: x for name, x in zip(keeping.nodes, values, strict=True) if x is not None}  # a statistic unread
    owner: dict[int, str] = {}
    for name, value in by_name.items():
        owner.setdefault(storage_key(value), name)
    dropped: dict[str, list[SavedTensor]] = {}
    for box in boxes:
        if box.tensor is None:
            continue
        name = owner.get(storage_key(box.tensor))
        if name is not None and name in keeping.program.rerun and by_name[name].dtype == box.tensor.dtype:
            dropped.setdefault(name, []).append(box)
    if not dropped:
        return []
    recomputing = keeping.recomputing(frozenset(dropped))
    kept = [_keep(by_name[name], gathered) for name in recomputing.kept]
    recomputation = _Recomputation(recomputing, [each.open for each in kept], context)
    for name, own in dropped.items():
        for box in own:
            box.let_go(lambda name=name: recomputation.value(name))
    return kept


def _keep(value: Tensor, gathered: dict[int, Recipe]) -> SavedTensor:
    """How to have `value` in backward: it is kept, or gathered again."""
    box = SavedTensor(value.detach())
    if storage_key(value) in gathered:
        box.let_go(gathered[storage_key(value)])
    return box
