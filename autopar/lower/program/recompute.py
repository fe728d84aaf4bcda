"""What a layer keeps between its forward and its backward.

Autograd hands every tensor that it wants to keep to a hook; the hook keeps a `_Box`, and when the layer has
run, boxes whose tensor can be had again let go of it: a gathered parameter (ZeRO-3) is gathered again, the
result of an op that is rerun (`ActivationPolicy.reruns`) is computed again, what is moved off the device
(`ActivationPolicy.transfer_s`) is moved back.  Tensors are recognised by their storage, so views count too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar.lower.compat import local_part_of, storage_key
from autopar.lower.parameters.layer_parameters import StepParameters
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.layer_program import LayerProgram
from autopar.step.activation_policies import activation_policy

__all__ = ["MOVES", "KeepingProgram", "keeping_program", "run_keeping_less"]

# Gives a tensor that was let go: a function of nothing.
_Recipe = Callable[[], Tensor]

MOVES: dict[str, Callable[[Tensor], _Recipe]] = {}
"""By the name of an `ActivationPolicy` with `transfer_s`: moves a tensor away, and returns how to move it back."""


class _Box:
    """A tensor that autograd saved, or how to get it back."""

    __slots__ = ("recipe", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.recipe: _Recipe | None = None

    def open(self) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        assert self.recipe is not None
        return self.recipe()

    def let_go(self, owner: Callable[[], Tensor]) -> None:
        """Drop the tensor; it is a view of what `owner` gives."""
        assert self.tensor is not None
        size, stride, offset = self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset()
        self.recipe = lambda: torch.as_strided(owner(), size, stride, offset)
        self.tensor = None


class KeepingProgram:
    """A layer program that also returns what its rerun ops read and compute, and the programs that compute
    it again; or one whose saved tensors are moved off the device.

    One for all layers of a kind and strategy.
    """

    def __init__(self, program: LayerProgram) -> None:
        """Build the forward program; recomputing programs follow when it is known what autograd saves."""
        self.program = program
        self.move = MOVES.get(program.strategy.recompute)
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
    wanted = {n.name for n in graph.nodes if n.name in rerun}
    wanted |= {n.name for node in graph.nodes if node.name in rerun for n in node.all_input_nodes}
    return tuple(n.name for n in graph.nodes if n.name in wanted and "comment" in n.meta)


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
    """The values of one run that backward computes again: all at once, when the first is asked for."""

    def __init__(self, recomputing: _Recomputing, kept: Sequence[_Recipe], context: LayerContext) -> None:
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
    policy = activation_policy(program.strategy.recompute)
    needs_one = policy.reruns is not None or policy.transfer_s is not None
    return KeepingProgram(program) if needs_one and not compiled else None


def run_keeping_less(
    program: LayerProgram,
    keeping: KeepingProgram | None,
    inputs: Sequence[Tensor],
    held: Sequence[Tensor],
    context: LayerContext,
    parameters: StepParameters | None = None,
) -> tuple[Tensor, ...]:
    """Run a layer program; let autograd keep neither gathered parameters nor what its strategy does not keep.

    Args:
        program: to run.
        keeping: its `keeping_program`.
        inputs: the layer's inputs.
        held: its state, in their copy layouts.
        context: of this run.
        parameters: its parameters in this step, if their copies may have to be freed.
    """
    boxes: list[_Box] = []

    def pack(tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())  # or the graph would hold itself where backward never runs
        boxes.append(box)
        return box

    with saved_tensors_hooks(pack, _Box.open):
        if keeping is None:
            outputs, values = program.module(*inputs, *held, context), ()
        else:
            outputs, values = keeping.module(*inputs, *held, context)
    gathered = _drop_copies(boxes, parameters) if parameters is not None and parameters.frees else {}
    if keeping is not None and keeping.move is not None:
        _move_away(boxes, keeping.move, held)
    elif keeping is not None:
        _drop_rerun(boxes, keeping, values, gathered, context)
    boxes.clear()  # autograd holds `pack` until the layer's last backward has run
    return outputs


def _drop_copies(boxes: Sequence[_Box], parameters: StepParameters) -> dict[int, _Recipe]:
    """Let go of saved compute copies that were gathered; storage -> how to have the copy in backward."""
    own = {storage_key(local_part_of(p)) for p in parameters.layer.current()}
    recipes: dict[int, _Recipe] = {}
    for index, value in enumerate(parameters.copies()):
        if storage_key(value) not in own:
            recipes[storage_key(value)] = lambda index=index: parameters.copies()[index]
    for box in boxes:
        if box.tensor is not None and storage_key(box.tensor) in recipes:
            box.let_go(recipes[storage_key(box.tensor)])
    return recipes


def _move_away(boxes: Sequence[_Box], move: Callable[[Tensor], _Recipe], held: Sequence[Tensor]) -> None:
    """Move saved tensors off the device, each storage once, but not what the layer holds."""
    stays = {storage_key(x) for x in held}
    moved: dict[tuple[int, torch.dtype], _Recipe] = {}
    for box in boxes:
        tensor = box.tensor
        if tensor is None or storage_key(tensor) in stays:
            continue
        key = storage_key(tensor), tensor.dtype
        if key not in moved:
            moved[key] = move(tensor.new_empty(0).set_(tensor.untyped_storage()))
        box.let_go(moved[key])


def _drop_rerun(
    boxes: Sequence[_Box],
    keeping: KeepingProgram,
    values: Sequence[Tensor],
    gathered: dict[int, _Recipe],
    context: LayerContext,
) -> None:
    """Let go of saved results of ops that are rerun."""
    by_name = dict(zip(keeping.nodes, values, strict=True))
    owner: dict[int, str] = {}
    for name, value in by_name.items():
        owner.setdefault(storage_key(value), name)
    dropped: dict[str, list[_Box]] = {}
    for box in boxes:
        if box.tensor is None:
            continue
        name = owner.get(storage_key(box.tensor))
        if name is not None and name in keeping.program.rerun and by_name[name].dtype == box.tensor.dtype:
            dropped.setdefault(name, []).append(box)
    if not dropped:
        return
    recomputing = keeping.recomputing(frozenset(dropped))
    kept = [_keep(by_name[name], gathered) for name in recomputing.kept]
    recomputation = _Recomputation(recomputing, kept, context)
    for name, own in dropped.items():
        for box in own:
            box.let_go(lambda name=name: recomputation.value(name))


def _keep(value: Tensor, gathered: dict[int, _Recipe]) -> _Recipe:
    """How to have `value` in backward: it is kept, or gathered again."""
    box = _Box(value.detach())
    if storage_key(value) in gathered:
        box.let_go(gathered[storage_key(value)])
    return box.open
