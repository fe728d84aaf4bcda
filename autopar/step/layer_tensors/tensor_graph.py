"""The local tensors of a layer: what each op and move reads, makes and saves, and where gradients flow back.

It is what `liveness` follows through a forward and a backward, made from the layer's local program.  Parameters,
buffers and constants are not counted, but what is sliced or gathered from them for one op is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autopar.ops import family_of, is_fused, result_order
from autopar.ops.family import Buffers, OpFamily
from autopar.ops.memory_order import Order, has_even_rows, in_order
from autopar.placement import LOCAL, Step
from autopar.program import Op, TensorType
from autopar.step.layer.instructions import InParts, InPieces, Reshard, RunOp, Single
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.local_program import local_program
from autopar.step.layer.value_flows import gets_gradient

__all__ = ["GradientTarget", "OutputNode", "TensorGraph", "TensorKey", "TensorNode", "origins", "tensor_graph"]

TensorKey = tuple[str, str, int]
"""A tensor in memory: the value, for which purpose it was made (``"source"``: by an op, or it arrived so), and which
local value that is (-1: the source)."""


class GradientTarget(NamedTuple):
    """Where a gradient arrives: at which tensor, its bytes and elements; whether that is a parameter of the layer."""

    key: TensorKey
    num_bytes: float
    is_parameter: bool
    num_elements: int


class OutputNode(NamedTuple):
    """An output of the layer: its tensor, where its gradient arrives, and whether it gets one."""

    key: TensorKey
    target: GradientTarget
    gets_gradient: bool


class TensorNode(NamedTuple):
    """An op, or a move of a value: the tensors that it reads, makes (with bytes) and saves, by key.

    A tuple, as a search makes and changes millions, for which frozen dataclasses take several times as long.

    Args:
        reads: its operands.
        makes: the results that are tensors of their own, with bytes.
        targets: where the gradients of its results arrive.
        sources: where it sends the gradients of its operands.
        saves: what autograd saves.
        saved_extra: other bytes that autograd saves.
        forward_extra: bytes that it allocates while it runs.
        backward_extra: the same of its backward.
        passes_gradient: whether its operands get the very gradient that arrives, not one of their own.
        splits_gradient: whether they get parts of it.
        expands_gradient: whether its operand gets that gradient expanded, a view.
        copies_expanded: whether its backward copies a gradient that arrives expanded.
        view_gradients: operands whose gradients are views of what its backward computes.
        op: None of a move.
        is_local: of a move, whether it has no collective.
        op_index: of the op in its layer; -1 of a move.
        types: of its operands, then of its results, as one device has them.
        fuses: whether a compiler fuses it with neighboring ops like it.
        piece: counts what a compiler leaves out up to here; what is compiled in one go has the same number.
        kept_extra: of `saved_extra`, what is kept in place of the first operand.
        passes: how often its forward reads its operands, in between of collectives.
        has_kernel: whether a special kernel runs it.
    """

    reads: tuple[TensorKey, ...]
    makes: Mapping[TensorKey, float]
    targets: tuple[GradientTarget, ...]
    sources: tuple[GradientTarget, ...]
    saves: tuple[TensorKey, ...] = ()
    saved_extra: float = 0.0
    forward_extra: float = 0.0
    backward_extra: float = 0.0
    passes_gradient: bool = False
    splits_gradient: bool = False
    op: Op | None = None
    is_local: bool = True
    op_index: int = -1
    types: tuple[TensorType, ...] = ()
    fuses: bool = False
    piece: int = 0
    kept_extra: float = 0.0
    passes: int = 1
    has_kernel: bool = False
    expands_gradient: bool = False
    copies_expanded: bool = True
    view_gradients: tuple[TensorKey, ...] = ()


@dataclass(frozen=True, eq=False)
class TensorGraph:
    """A layer's tensors.  Layers on which devices have the same tensors share one, so it counts by identity.

    Args:
        sizes: bytes of each that is counted.
        nodes: what runs, in order.
        inputs: the tensors of the layer's inputs, by name in order.
        outputs: those of its outputs, in order.
    """

    sizes: Mapping[TensorKey, float]
    nodes: tuple[TensorNode, ...]
    inputs: Mapping[str, TensorKey]
    outputs: tuple[OutputNode, ...]


def tensor_graph(placed: PlacedLayer, *, fuses_attention: bool) -> TensorGraph:
    """The tensors of a layer; `fuses_attention` as in `TrainingSpec`.

    Strategies on other meshes, or with more data ranks and fewer microbatches, may leave a device the same tensors.
    """
    return _first_alike(_GraphContent(_TensorGraphBuilder(placed, fuses_attention=fuses_attention).build()))


_OP = TensorNode._fields.index("op")


class _GraphContent:
    """A graph that is equal to others of the same tensors; ops count by identity."""

    def __init__(self, graph: TensorGraph) -> None:
        self.graph = graph
        nodes = tuple(
            (*node[:1], tuple(node.makes.items()), *node[2:_OP], id(node.op), *node[_OP + 1 :]) for node in graph.nodes
        )
        self._key = nodes, tuple(graph.sizes.items()), tuple(graph.inputs.items()), graph.outputs
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GraphContent) and self._key == other._key


@lru_cache(maxsize=256)  # those of one layer's strategies, and of the next numbers of microbatches; 0.1 MB each
def _first_alike(content: _GraphContent) -> TensorGraph:
    return content.graph


def origins(
    keys: Iterable[TensorKey], makers: Mapping[TensorKey, TensorNode], runs_again: Callable[[TensorNode], bool]
) -> set[TensorKey]:
    """These tensors, with the tensors to compute them again from in place of those whose maker `runs_again`."""
    kept: set[TensorKey] = set()
    seen: set[TensorKey] = set()
    waiting = list(keys)
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        if key in makers and runs_again(makers[key]):
            waiting += makers[key].reads
        else:
            kept.add(key)
    return kept


class _Located(NamedTuple):
    """A local value: its tensor, where its gradient arrives, and the order of its elements in memory."""

    key: TensorKey
    target: GradientTarget
    order: Order


class _Rows(NamedTuple):
    """How a product reads rows of more than two dims: as a matrix, which is a view of them or a copy.

    Args:
        operand: which of the operands has the rows.
        copied_bytes: bytes of the copy, 0 of a view.
        views: operands that it reads as views, so that their gradients are views as well.
    """

    operand: int = -1
    copied_bytes: float = 0.0
    views: tuple[int, ...] = ()

    @staticmethod
    def of(family: OpFamily, op: Op, orders: Sequence[Order], types: Sequence[TensorType]) -> _Rows:
        """Of an op of this family; nothing of one that is no such product."""
        product = family.row_products.get(op.target)
        if product is None or len(types) <= product.matrix or len(types[product.matrix].shape) != 2:
            return _Rows()
        rows = types[product.rows]
        is_flattened = len(rows.shape) > 2
        is_copied = is_flattened and not has_even_rows(rows.shape, orders[product.rows])
        views = (product.rows,) * is_flattened + (product.matrix,) * product.transposed
        return _Rows(product.rows, float(rows.num_bytes) if is_copied else 0.0, views)


class _TensorGraphBuilder:
    """Follows a local program instruction by instruction; `located` has its local values so far."""

    def __init__(self, placed: PlacedLayer, *, fuses_attention: bool) -> None:
        self.placed = placed
        self.fuses_attention = fuses_attention
        self.local = local_program(placed)
        self.sizes: dict[TensorKey, float] = {}
        self.nodes: list[TensorNode] = []
        self.located: dict[int, _Located] = {}
        self.piece = 0

    def build(self) -> TensorGraph:
        placed, local = self.placed, self.local
        for index in local.inputs:
            self._add_input(index)
        for index in local.state:
            value, _, _, tensor = local.values[index]
            key: TensorKey = (value.name, "state", -1)
            target = GradientTarget(key, tensor.num_bytes, True, tensor.num_elements)
            self.located[index] = _Located(key, target, in_order(tensor.shape))
        for each in local.instructions:
            if isinstance(each, InPieces):
                self._add_in_pieces(each)
            elif isinstance(each, InParts):
                self._add_in_parts(each)
            else:
                self._add_single(each)
        inputs: dict[str, TensorKey] = {name: (name, "source", -1) for name in placed.layer.inputs}
        outputs = [
            OutputNode(*self.located[index][:2], gets_gradient(placed.program, placed.flows[name].value))
            for index, name in zip(local.outputs, placed.layer.outputs, strict=True)
        ]
        return TensorGraph(self.sizes, tuple(self.nodes), inputs, tuple(outputs))

    def _add_single(self, each: Single) -> None:
        if isinstance(each, RunOp):
            self._add_op(each)
        elif isinstance(each, Reshard):
            self._add_move(each)
        else:  # a view, or a term, whose zeros are no larger
            self.piece += 1
            order = in_order(self.local.values[each.target].type.shape)
            self.located[each.target] = self.located[each.source]._replace(order=order)

    def _add_input(self, index: int) -> None:
        """A microbatch's share of an input.  What the caller keeps whole is not counted."""
        value, layout, time, tensor = self.local.values[index]
        view = self.placed.view
        key: TensorKey = (value.name, "source", -1)
        microbatch = view.value_type(self.placed.flows[value.name])
        share = microbatch.num_bytes / max(1, view.cut(value.type, time).num_bytes)
        num_bytes = tensor.num_bytes * share
        if value.name not in self.placed.program.inputs or any(p.is_shard for p in layout):
            self.sizes[key] = num_bytes
        target = GradientTarget(key, num_bytes, False, round(tensor.num_elements * share))
        self.located[index] = _Located(key, target, in_order(tensor.shape))

    def _add_op(self, run: RunOp) -> None:
        placed, op, state = self.placed, run.op, run.state
        operands = [self.located[index] for index in run.operands]
        trains = [placed.flows[name].value.requires_grad for name in op.operands]
        family, has_kernel = family_of(op.target), state.has_kernel
        buffers = family.buffers(op, state.operand_types, state.result_types, trains, has_kernel)
        makes = self._add_results(run, operands)
        results = [self.located[index] for index in run.results]
        trained = [placed.flows[name].value.requires_grad for name in op.results]
        saves, extra, temporary = self._kept(op)
        on_device = family.buffers_on_gpus if self.fuses_attention else family.buffers_on_cpus
        more = Buffers() if has_kernel else on_device(op, state.operand_types, trains)
        rows = _Rows.of(family, op, [each.order for each in operands], state.operand_types)
        keys = [each.key for each in (*operands, *results)]
        is_copy_kept = rows.copied_bytes > 0 and rows.operand in saves
        share = self._share(op, (*state.result_types, *state.operand_types))
        is_apart = op.is_random or family.runs_apart
        self.piece += is_apart
        self.nodes.append(
            TensorNode(
                tuple(keys[: len(operands)]),
                makes,
                targets=tuple(each.target for each, takes in zip(results, trained, strict=True) if takes),
                sources=tuple(each.target for each, takes in zip(operands, trains, strict=True) if takes),
                saves=tuple(
                    keys[i] for i in saves if (i or not buffers.kept) and not (is_copy_kept and i == rows.operand)
                ),
                saved_extra=extra * share + buffers.kept + more.kept + rows.copied_bytes * is_copy_kept,
                forward_extra=buffers.forward + temporary[0] * share + rows.copied_bytes * (not is_copy_kept),
                backward_extra=buffers.backward + more.backward + temporary[1] * share,
                passes_gradient=op.is_view or family.gradient in ("passed", "parts"),
                expands_gradient=family.gradient == "expanded",
                copies_expanded=not (family.is_pointwise or family.takes_expanded or op.is_view),
                splits_gradient=family.gradient == "parts",
                op=op,
                op_index=run.index,
                types=(*state.operand_types, *state.result_types),
                fuses=is_fused(op),
                passes=2 if has_kernel else 1,
                has_kernel=has_kernel,
                piece=self.piece,
                kept_extra=buffers.kept,
                view_gradients=tuple(keys[i] for i in rows.views),
            )
        )
        self.piece += is_apart

    def _buffers(self, run: RunOp) -> Buffers:
        trains = [self.placed.flows[name].value.requires_grad for name in run.op.operands]
        state = run.state
        return family_of(run.op.target).buffers(
            run.op, state.operand_types, state.result_types, trains, state.has_kernel
        )

    def _add_in_parts(self, each: InParts) -> None:
        """The op in its second part; what runs between its parts does so while its buffers travel."""
        before, behind = each.pauses
        buffers = self._buffers(each.run)
        for singles in (before, (each.run,), behind):
            begin = len(self.nodes)
            self.piece += 1  # a compiler leaves the parts out
            for single in singles:
                self._add_single(single)
            for number in range(begin, len(self.nodes)) if singles != (each.run,) else ():
                node = self.nodes[number]
                self.nodes[number] = node._replace(
                    forward_extra=node.forward_extra + buffers.forward,
                    backward_extra=node.backward_extra + buffers.backward,
                )
        self.piece += 1

    def _add_in_pieces(self, each: InPieces) -> None:
        """The move and the products, with the buffers of pieces in place of those of what is whole.

        Two pieces of what travels are in memory at once, and one of what is multiplied.
        """
        begin = len(self.nodes)
        self.piece += 1  # a compiler leaves it out
        for single in each.singles:
            if isinstance(single, RunOp):
                self._add_op(single)
            else:
                self._add_move(single)
        values = self.local.values
        source, target = (float(values[index].type.num_bytes) for index in (each.move.source, each.move.target))
        results = [float(run.state.result_types[0].num_bytes) for run in each.products]
        piece = (2 * max(source, target) + max(results)) / each.count
        stays = source if each.moves_first else 0.0  # read until the last piece has gone
        for number in range(begin, len(self.nodes)):
            node = self.nodes[number]
            self.nodes[number] = node._replace(forward_extra=piece + stays, backward_extra=node.backward_extra + piece)
        if not each.moves_first:  # the terms are never there as a whole
            made = self.nodes[begin]
            makes = {key: 2 * size / each.count for key, size in made.makes.items()}
            self.sizes.update(makes)
            self.nodes[begin] = made._replace(makes=makes, forward_extra=piece)
        self.piece += 1

    def _add_results(self, run: RunOp, operands: Sequence[_Located]) -> dict[TensorKey, float]:
        """The results that are no views of the first operand, with bytes."""
        op, state = run.op, run.state
        makes: dict[TensorKey, float] = {}
        for index, name, tensor in zip(run.results, op.results, state.result_types, strict=True):
            key: TensorKey = (name, "source", -1)
            if operands:
                is_view, order = result_order(op, state.operand_types[0].shape, operands[0].order, tensor.shape)
            else:
                is_view, order = False, in_order(tensor.shape)
            if not is_view:
                makes[key] = self.sizes[key] = tensor.num_bytes
            target = GradientTarget(key, tensor.num_bytes, False, tensor.num_elements)
            self.located[index] = _Located(operands[0].key if is_view else key, target, order)
        return makes

    def _kept(self, op: Op) -> tuple[Sequence[int], float, tuple[int, int]]:
        """Positions of what autograd saves, among operands and results, other bytes, and bytes of temporaries."""
        is_plain = bool(op.plain_saves or op.plain_saved_extra_bytes) and not self.fuses_attention
        if is_plain:
            return op.plain_saves, op.plain_saved_extra_bytes, op.plain_temporary_bytes
        return op.saves, op.saved_extra_bytes, op.temporary_bytes

    def _share(self, op: Op, types: Sequence[TensorType]) -> float:
        """The part of an op's largest tensor that a device has, given its local results and operands."""
        whole = [self.placed.program.type_of(name).num_elements for name in (*op.results, *op.operands)]
        largest = max(range(len(whole)), key=lambda index: whole[index])
        return types[largest].num_elements / max(1, whole[largest])

    def _add_move(self, reshard: Reshard) -> None:
        source = self.located[reshard.source]
        value, _, _, tensor = self.local.values[reshard.target]
        if reshard.source in self.local.state and reshard.purpose == "copy":  # a slice of what is held: a view
            self.located[reshard.target] = source
            return
        key: TensorKey = (value.name, reshard.purpose, reshard.target)
        num_bytes = float(tensor.num_bytes)
        target = GradientTarget(key, num_bytes, False, tensor.num_elements)
        if all(step.forward == "none" for step in reshard.steps):
            makes, self.located[reshard.target] = {}, _Located(source.key, target, source.order)
        else:
            makes, self.located[reshard.target] = {key: num_bytes}, _Located(key, target, in_order(tensor.shape))
        self.sizes.update(makes)
        self.nodes.append(
            TensorNode(
                (source.key,),
                makes,
                targets=(target,) if value.requires_grad else (),
                sources=(source.target,) if value.requires_grad else (),
                forward_extra=_buffer_bytes(reshard.steps, num_bytes, source.target.num_bytes, is_forward=True),
                backward_extra=_buffer_bytes(reshard.steps, num_bytes, source.target.num_bytes, is_forward=False),
                passes_gradient=all(step.backward == "none" for step in reshard.steps),
                is_local=all(step.forward in LOCAL for step in reshard.steps),
                types=(self.local.values[reshard.source].type, tensor),
                piece=self.piece,
            )
        )


def _buffer_bytes(steps: tuple[Step, ...], after: float, before: float, *, is_forward: bool) -> float:
    """Bytes of the buffers besides what is moved and what becomes of it.

    A gather that joins another dim than the first one makes room for what arrives before it is put in order, and so
    does what is cut along another dim before it is sent.
    """
    whole = max(after, before)
    extra = 0.0
    for step in steps:
        kind = step.forward if is_forward else step.backward
        dim = max(step.src.dim, step.dst.dim)
        if kind == "all_to_all" or (kind in ("all_gather", "reduce_scatter") and dim > 0):
            extra = max(extra, whole)
    return extra
