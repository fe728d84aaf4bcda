"""How a compiler fuses a layer: which ops become one kernel, and which tensors are saved for backward.

The rules are inductor's.  Elementwise ops and reductions over equally many elements become one kernel where one reads
what the other makes or both read the same tensor, unless something else has to run between them; views take nothing.
Products, attention, collectives and lookups stay kernels of their own, and nothing is fused across the pieces that
`lower.program.compiled` compiles one by one.  A kernel reads and writes each tensor once, and what only it reads is
never in memory.

Backward keeps what such kernels of their own saved, and statistics; the rest it computes again from what is kept, in
the kernels that read it, unless that would have to keep more bytes than the result itself.  Results of ops that a
strategy names (`rerun_policy_name`) it always computes again, from what is kept or from results of other such ops.
An output of the layer that backward reads is kept, whatever it could be computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from autopar.ops import family_of
from autopar.ops.products import padded_copies
from autopar.program import itemsize_bytes
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer_tensors.fused_kernels import FusedKernel, Key, Task, join_tasks
from autopar.step.layer_tensors.tensor_graph import (
    GradientTarget,
    TensorGraph,
    TensorKey,
    TensorNode,
    origins,
    tensor_graph,
)

__all__ = ["FusedLayer", "fused_layer", "rerunning_graph", "training_graphs"]

_STATISTICS_SHARE = 4  # a result so many times smaller than what it is made of is kept: it is a statistic
_UNROLLED = 8  # a sum of fewer elements is no loop of its own


@dataclass(frozen=True)
class FusedLayer:
    """A layer as it runs compiled.

    Args:
        graph: its tensors: what is never in memory has no bytes, and nodes save what their backward then reads.
        forward: the kernels made of its ops; ops that are in none have a kernel of their own, views have none.
        backward: likewise of its backward.
    """

    graph: TensorGraph
    forward: tuple[FusedKernel, ...]
    backward: tuple[FusedKernel, ...]


def fused_layer(placed: PlacedLayer, *, fuses_attention: bool, is_training: bool) -> FusedLayer:
    """What a compiler makes of a layer under a strategy.

    Args:
        placed: the layer.
        fuses_attention: as in `TrainingSpec`.
        is_training: whether it has a backward.
    """
    return _fused(placed, fuses_attention, is_training).layer


def training_graphs(placed: PlacedLayer, *, fuses_attention: bool) -> tuple[TensorGraph, TensorGraph]:
    """The tensors of a layer in training if it runs eagerly, and if it is compiled, with the same nodes; arguments as
    of `fused_layer`.
    """
    fused = _fused(placed, fuses_attention, True)
    return fused.whole, fused.layer.graph


def rerunning_graph(
    placed: PlacedLayer, reruns: frozenset[str], *, fuses_attention: bool
) -> tuple[TensorGraph, frozenset[str]]:
    """The tensors of a compiled layer whose backward computes ops of these names again.

    It has the kernels of the layer that names none, but for what these keep to themselves and backward now needs.

    Args:
        placed: the layer, in training.
        reruns: names of ops.
        fuses_attention: as in `TrainingSpec`.

    Returns:
        The graph, as `FusedLayer` has it, and those of the ops whose results backward computes again.
    """
    fused = _fused(placed, fuses_attention, True)
    reruns = _inside_of_pieces(fused.whole, reruns)
    saving = _SavedTensors(fused.whole, reruns)
    graph = _in_memory(fused.seen, fused.inside - saving.kept, saving, on_gpus=fuses_attention)
    return _saved_until(graph, fused.backward), reruns


@lru_cache(maxsize=64)  # prices and memory of one layer read it one after the other
def _fused(placed: PlacedLayer, fuses_attention: bool, is_training: bool) -> _Fused:
    return _fused_graph(tensor_graph(placed, fuses_attention=fuses_attention), is_training, fuses_attention)


@lru_cache(maxsize=256)
def _fused_graph(whole: TensorGraph, is_training: bool, on_gpus: bool) -> _Fused:
    saving = _SavedTensors(whole) if is_training else None
    kept = saving.kept if saving else frozenset[TensorKey]()
    forward = join_tasks(_forward_tasks(whole), kept | {output.key for output in whole.outputs}, whole.sizes)
    graph = _in_memory(whole, forward.inside, saving, on_gpus=on_gpus)
    if saving is None:
        return _Fused(whole, forward.inside, FusedLayer(graph, forward.of_ops(graph), ()))
    backward = _BackwardTasks(graph)
    tasks, leaving = backward.build()
    joined = join_tasks(tasks, leaving, graph.sizes)
    unseen = frozenset(key for key, terms in backward.arriving.items() if joined.inside.issuperset(terms))
    in_memory = _saved_until(_without_gradients(graph, unseen), joined.kernels)  # nothing inside is kept
    layer = FusedLayer(in_memory, forward.of_ops(graph), joined.of_ops(graph))
    return _Fused(whole, forward.inside, layer, joined.kernels, unseen)


@dataclass(frozen=True)
class _Fused:
    """A compiled layer, and what its graph is made of.

    Args:
        whole: its tensors if it runs eagerly.
        inside: of these, what only the kernel of the forward that makes it reads.
        layer: the layer.
        backward: the kernels of its backward, of numbers of nodes.
        unseen: tensors whose gradients are never in memory.
    """

    whole: TensorGraph
    inside: frozenset[Key]
    layer: FusedLayer
    backward: tuple[FusedKernel, ...] = ()
    unseen: frozenset[TensorKey] = frozenset()

    @cached_property
    def seen(self) -> TensorGraph:
        """`whole` without the gradients that are never in memory."""
        return _without_gradients(self.whole, self.unseen)


# --- forward


def _forward_tasks(graph: TensorGraph) -> list[Task]:
    tasks: list[Task] = []
    for number, node in enumerate(graph.nodes):
        if not node.makes:  # a view
            continue
        names = node.op.results if node.op else [name for name, _, _ in node.makes]
        extents = dict(zip(names, node.types[len(node.reads) :], strict=True))
        tasks.append(
            Task(
                number,
                node.fuses or (node.op is None and node.is_local),
                _elements(node),
                _reads(node),
                {key: (size, extents[key[0]].num_elements) for key, size in node.makes.items()},
                node.piece,
                node.passes,
            )
        )
    return tasks


def _elements(node: TensorNode) -> int:
    return max(tensor.num_elements for tensor in node.types)


def _reads(node: TensorNode) -> dict[Key, float]:
    reads: dict[Key, float] = {}
    for key, tensor in zip(node.reads, node.types, strict=False):
        reads[key] = reads.get(key, 0.0) + tensor.num_bytes
    return reads


# --- what backward keeps


def _inside_of_pieces(graph: TensorGraph, named: frozenset[str]) -> frozenset[str]:
    """Of these ops, those that a compiler can run again: it sees them together with the ops that read their results."""
    if not named:
        return named
    pieces: dict[TensorKey, set[int]] = {}
    for node in graph.nodes:
        for key in (*node.reads, *node.makes):
            pieces.setdefault(key, set()).add(node.piece)
    apart = {
        node.op.name
        for node in graph.nodes
        if node.op and (node.has_kernel or any(len(pieces[key]) > 1 for key in node.makes))
    }
    return named - apart


class _SavedTensors:
    """What is kept from forward to backward, and what else each op's backward reads."""

    def __init__(self, graph: TensorGraph, reruns: frozenset[str] = frozenset()) -> None:
        self._sizes = graph.sizes
        self._reruns = reruns
        self._maker = {key: node for node in graph.nodes for key in node.makes}
        self._outputs = {output.key for output in graph.outputs}
        self.keys_read = [_keys_read(node) for node in graph.nodes]
        self._kept: set[TensorKey] = set()
        for node, keys in zip(graph.nodes, self.keys_read, strict=True):
            if not node.fuses:
                self._kept |= self._origins(keys)
        for node, keys in zip(graph.nodes, self.keys_read, strict=True):
            for key in keys if node.fuses else ():
                self._keep(key, node.piece)
        self.kept = frozenset(self._kept)

    def reads(self, number: int, node: TensorNode) -> tuple[TensorKey, ...]:
        """What the backward of this node reads of what is kept."""
        tensors = (each for key in self.keys_read[number] for each in self.sources(key, node.piece))
        return tuple(dict.fromkeys(tensors))

    def sources(self, key: TensorKey, piece: int) -> Iterator[TensorKey]:
        """What is kept, or always there, from which a tensor is computed again in this piece."""
        node = self._maker.get(key)
        if key in self._kept or node is None or not self._is_rerun(node, piece):
            yield key
        else:
            for each in node.reads:
                yield from self.sources(each, piece)

    def _runs_again(self, node: TensorNode) -> bool:
        """Whether a strategy names the op, to run again; moves inside a device run with those that are named."""
        return bool(self._reruns) and (node.op.name in self._reruns if node.op else node.is_local)

    def _origins(self, keys: Iterable[TensorKey]) -> set[TensorKey]:
        return origins(keys, self._maker, self._runs_again)

    def _is_rerun(self, node: TensorNode, piece: int) -> bool:
        made, read = node.types[len(node.reads) :], node.types[: len(node.reads)]
        is_statistic = _STATISTICS_SHARE * sum(t.num_bytes for t in made) < sum(t.num_bytes for t in read)
        is_kernel_of_its_own = not node.fuses or node.piece != piece
        # The caller gets outputs, so they are in memory, and inductor computes nothing again that is.
        return not (is_kernel_of_its_own or is_statistic or self._outputs.intersection(node.makes))

    def _keep(self, key: TensorKey, piece: int) -> None:
        """Keep a tensor, or the tensors to recompute it from if these are no larger."""
        if key in self._maker and self._runs_again(self._maker[key]):
            self._kept |= self._origins([key])
            return
        sources = self._origins(self.sources(key, piece)) & self._sizes.keys()
        missing = sum(self._sizes[each] for each in sources - self._kept)
        self._kept |= sources if missing <= self._sizes.get(key, 0.0) else {key}


def _keys_read(node: TensorNode) -> tuple[TensorKey, ...]:
    """What the backward of a node reads: a fused loss its logits, not what torch keeps in their place."""
    return (node.reads[0], *node.saves) if node.fuses and node.kept_extra else node.saves


def _in_memory(graph: TensorGraph, inside: Set[Key], saving: _SavedTensors | None, *, on_gpus: bool) -> TensorGraph:
    """The graph without what is never in memory, as it is `inside` of kernels; with copies that are made `on_gpus`."""
    nodes: list[TensorNode] = []
    for number, node in enumerate(graph.nodes):
        makes = {key: size for key, size in node.makes.items() if key not in inside}
        if not node.fuses:
            nodes.append(_with_padded_copies(node) if on_gpus else node)
            continue
        extra = node.saved_extra - node.kept_extra
        if node.kept_extra:  # the largest element of each row and its sum, in float32
            extra += 8.0 * node.types[1].num_elements
        saves = saving.reads(number, node) if saving else ()
        scattered = _scattered_bytes(node)
        nodes.append(
            node._replace(makes=makes, saves=saves, saved_extra=extra, forward_extra=0.0, backward_extra=scattered)
        )
    sizes = {key: size for key, size in graph.sizes.items() if key not in inside}
    return replace(graph, nodes=tuple(nodes), sizes=sizes)


def _scattered_bytes(node: TensorNode) -> float:
    """Bytes that the backward of a selection takes, of the largest elements say: the gradient is scattered into zeros,
    which is a kernel of its own, and added to others in float32 (attention with sinks on an H100, torch 2.11).
    """
    selects = node.op is not None and len(node.op.results) == 2 and node.types[-1].dtype == "int64"  # value, index
    operand = node.types[0]
    wide = max(itemsize_bytes("float32"), itemsize_bytes(operand.dtype)) * operand.num_elements
    return operand.num_bytes + wide if selects and node.sources else 0.0


def _with_padded_copies(node: TensorNode) -> TensorNode:
    product = None if node.op is None else family_of(node.op.target).row_products.get(node.op.target)
    if product is None or node.has_kernel:
        return node
    copies = padded_copies(product, node.types, node.types[-1])
    return node._replace(
        forward_extra=node.forward_extra + copies.forward, backward_extra=node.backward_extra + copies.backward
    )


def _without_gradients(graph: TensorGraph, unseen: frozenset[TensorKey]) -> TensorGraph:
    """The graph where the gradients of these tensors are never in memory."""

    def seen(targets: tuple[GradientTarget, ...]) -> tuple[GradientTarget, ...]:
        return tuple(target._replace(num_bytes=0.0) if target.key in unseen else target for target in targets)

    nodes = (
        node
        if unseen.isdisjoint([target.key for target in (*node.targets, *node.sources)])
        else node._replace(targets=seen(node.targets), sources=seen(node.sources))
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _saved_until(graph: TensorGraph, kernels: Sequence[FusedKernel]) -> TensorGraph:
    """The graph where what a kernel of the backward reads of what is saved is there until its last node has run."""
    nodes = list(graph.nodes)
    for kernel in kernels:
        if kernel.ops:
            last = min(kernel.ops)
            saves = dict.fromkeys(key for number in (last, *kernel.ops) for key in nodes[number].saves)
            if tuple(saves) != nodes[last].saves:
                nodes[last] = nodes[last]._replace(saves=tuple(saves))
    return replace(graph, nodes=tuple(nodes))


# --- backward


@dataclass
class _BackwardTasks:
    """The tasks of a backward; `arriving` are the terms of each tensor's gradient so far, with bytes."""

    graph: TensorGraph
    tasks: list[Task] = field(default_factory=list[Task])
    arriving: dict[TensorKey, dict[Key, float]] = field(default_factory=dict[TensorKey, dict[Key, float]])
    leaving: set[Key] = field(default_factory=set[Key])

    def build(self) -> tuple[list[Task], set[Key]]:
        """The tasks in order, and the gradients that leave."""
        for _, target, gets_gradient in self.graph.outputs:
            if gets_gradient:
                self.arriving.setdefault(target.key, {})["out", target.key] = target.num_bytes
        for number in range(len(self.graph.nodes) - 1, -1, -1):
            node = self.graph.nodes[number]
            if any(target.key in self.arriving for target in node.targets):
                self._run(number, node)
        for key in self.graph.inputs.values():
            if len(terms := self.arriving.get(key, {})) > 1:
                self._add_up(key, terms, -1, self.graph.nodes[0].piece)
        self.leaving.update(key for name in self.graph.inputs.values() for key in self.arriving.get(name, ()))
        return self.tasks, self.leaving

    def _run(self, number: int, node: TensorNode) -> None:
        passes = node.passes_gradient and not self._resizes(node)
        for target in node.targets:
            terms = self.arriving.get(target.key, {})
            if len(terms) > 1 and (not node.fuses or (passes and len(node.sources) > 1)):
                self._add_up(target.key, terms, number, node.piece)
        reads: dict[Key, float] = {}
        for target in node.targets:
            reads |= self.arriving.get(target.key, {})
        whole = [source for source in node.sources if passes and self._is_whole(node, source)]
        for source in whole:
            share = {key: min(size, source.num_bytes) for key, size in reads.items()}
            self.arriving.setdefault(source.key, {}).update(share)
        gradients = dict(reads)
        for key in node.saves:
            reads[key] = self.graph.sizes.get(key, 0.0) or max(t.num_bytes for t in node.types)
        for place, source in enumerate(node.sources):
            if source not in whole:
                self._give(number, node, place, gradients if node.op is None else reads)

    def _give(self, number: int, node: TensorNode, place: int, reads: Mapping[Key, float]) -> None:
        """One task for each source: those of a product are one kernel's all the same, as they are priced apart."""
        source = node.sources[place]
        key: Key = ("gradient", number, place)
        elements = _elements(node)
        if node.fuses and elements < _UNROLLED * source.num_elements:
            elements = source.num_elements
        elif node.fuses and self._sums_rows(node, source):
            elements = -elements
        makes: dict[Key, tuple[float, int]] = {key: (source.num_bytes, source.num_elements)}
        self.tasks.append(Task(number, node.fuses, elements, reads, makes, node.piece))
        if source.is_parameter:
            self.leaving.add(key)
        self.arriving.setdefault(source.key, {})[key] = source.num_bytes

    def _add_up(self, key: TensorKey, terms: Mapping[Key, float], node: int, piece: int) -> None:
        made = ("sum", key, len(self.tasks))
        size = max(terms.values())
        count = next((t.num_elements for n in self.graph.nodes for t in (*n.targets, *n.sources) if t.key == key), 0)
        self.tasks.append(Task(node, True, count, dict(terms), {made: (size, count)}, piece))
        self.arriving[key] = {made: size}

    @staticmethod
    def _resizes(node: TensorNode) -> bool:
        """Whether a view drops or repeats elements."""
        is_view = node.op is not None and not node.splits_gradient and len(node.reads) == 1
        return is_view and node.types[0].num_elements != node.types[-1].num_elements

    @staticmethod
    def _is_whole(node: TensorNode, source: GradientTarget) -> bool:
        """Whether a source gets the very gradient of the result, or a slice of it."""
        return node.splits_gradient or any(source.num_elements == t.num_elements for t in node.targets)

    @staticmethod
    def _sums_rows(node: TensorNode, source: GradientTarget) -> bool:
        """Whether a gradient is a sum over rows, not inside of them: another way through the elements."""
        if source.num_elements >= _elements(node):
            return False
        shape = next((t.shape for t in node.types if t.num_elements == source.num_elements), ())
        return bool(shape) and shape[-1] > 1
