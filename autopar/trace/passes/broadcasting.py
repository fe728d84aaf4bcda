"""Passes that keep masks as small as they are: nothing is repeated that its readers would repeat themselves.

And what is repeated from one row (``self.cls_token.repeat(batch, 1, 1)``) is expanded, which splits by these rows.

Models build the mask of a padded batch in steps: what each sample pads, [batch, 1, 1, keys], "and" what every query may
see, [1, 1, queries, keys].  Where the latter is everything, as in an encoder, the mask needs no queries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.ops.family import argument
from autopar.program import Op, Ref, TensorType
from autopar.trace.gradients import differentiable
from autopar.trace.graph import Graph, Names
from autopar.trace.passes.cleanup import is_elementwise
from autopar.trace.passes.constants import Evaluator, broadcast_shape, constant_cone
from autopar.trace.passes.masks import ATTENTION, decisive_operand
from autopar.trace.passes.rewrites import Writer, rewrite

__all__ = ["delay_expansions", "drop_neutral_masks", "expand_at_readers", "expand_repeats", "expand_single_rows"]


def expand_single_rows(graph: Graph) -> Graph:
    """Let ``repeat`` and ``repeat_interleave`` of dims that have one entry be ``expand``; other dims are repeated after
    it.
    """
    strided: set[str] = set()

    def write(writer: Writer, op: Op) -> None:
        times = _repetitions(op, writer)
        if times is None:
            return
        source, result = writer.type_of(op.args[0]), graph.types[op.results[0]]
        own = (*(1 for _ in range(len(times) - len(source.shape))), *source.shape)
        if not any(size == 1 < count for size, count in zip(own, times, strict=True)):
            return
        shape = tuple(count if size == 1 else size for size, count in zip(own, times, strict=True))
        rest = tuple(1 if size == 1 else count for size, count in zip(own, times, strict=True))
        if set(rest) == {1}:
            strided.update(op.results)
            writer.add("aten.expand.default", (op.args[0], shape), op.results[0])
            return
        expanded = writer.add("aten.expand.default", (op.args[0], shape), replace(result, shape=shape))
        writer.add("aten.repeat.default", (expanded, rest), op.results[0])

    written = rewrite(graph, write)
    return replace(written, strided=written.strided | strided)


def expand_repeats(graph: Graph) -> Graph:
    """Let ``x.repeat(batch, 1, 1)`` expand a dim before the rows of x, and merge both: so it splits by the batch, and
    runs in microbatches, where ``repeat`` has whole rows.
    """

    def write(writer: Writer, op: Op) -> None:
        times = None if op.target == "aten.repeat_interleave.self_int" else _repetitions(op, writer)
        if times is None or set(times) == {1} or 0 in times:
            return
        source, result = writer.type_of(op.args[0]), graph.types[op.results[0]]
        own = (*(1 for _ in range(len(times) - len(source.shape))), *source.shape)
        pairs = tuple(zip(times, own, strict=True))
        apart = tuple(each for count, size in pairs for each in ((1, size) if size != 1 < count else (size,)))
        whole = tuple(
            each for count, size in pairs for each in ((count, size) if size != 1 < count else (count * size,))
        )
        split = writer.add("aten.reshape.default", (op.args[0], apart), replace(source, shape=apart))
        expanded = writer.add("aten.expand.default", (split, whole), replace(source, shape=whole))
        writer.add("aten.reshape.default", (expanded, result.shape), op.results[0])

    return rewrite(graph, write)


def _repetitions(op: Op, writer: Writer) -> tuple[int, ...] | None:
    """How many times `op` repeats each dim of its result; None: it does something else, or repeats rows one by one."""
    if op.target not in ("aten.repeat.default", "aten.tile.default", "aten.repeat_interleave.self_int"):
        return None
    shape = writer.type_of(op.args[0]).shape
    if op.target != "aten.repeat_interleave.self_int":
        times = op.args[1] if isinstance(op.args[1], tuple) else ()
        counts = tuple(count for count in times if isinstance(count, int))
        return (1,) * (len(shape) - len(times)) + counts if len(counts) == len(times) else None
    count, dim = op.args[1], argument(op, 2, "dim")
    if not isinstance(count, int) or not isinstance(dim, int) or shape[dim] != 1:
        return None
    return tuple(count if axis == dim % len(shape) else 1 for axis in range(len(shape)))


def drop_neutral_masks(graph: Graph) -> Graph:
    """Let an "and" with what is always true, and an "or" with what never is, give its other operand."""
    known = constant_cone(graph) | graph.constants.keys()
    evaluator = Evaluator(graph)

    def step(op: Op) -> Iterable[Op] | None:
        if known.issuperset(op.results):
            return None
        other = decisive_operand(evaluator, op, known.__contains__)
        if other is None:
            return None
        args = (Ref(other), graph.types[op.results[0]].shape)
        return [replace(op, target="aten.expand.default", args=args, kwargs=())]

    return graph.rewrite(step)


def delay_expansions(graph: Graph) -> Graph:
    """Let ops read what has no gradient before it is expanded, and expand their results instead where that matters."""
    delayed = _Delayed(graph)
    return graph.rewrite(delayed.step).with_types(delayed.types)


def expand_at_readers(graph: Graph) -> tuple[Graph, frozenset[str]]:
    """Let ``gather`` read an index that is the same for all heads of a batch from an expansion of its own: unlike a
    constant, that splits with the rows of the batch, and has the memory of what it expands.

    Elementwise ops read what is expanded itself (`delay_expansions`); values of other constants are looked at.

    Returns the graph, and the results of these expansions.
    """
    cone, names = constant_cone(graph), Names(graph)
    expansions = {
        op.results[0]: op
        for op in graph.ops
        if op.target == "aten.expand.default" and cone.issuperset(op.results) and _grows(op, graph)
    }
    types: dict[str, TensorType] = {}

    def step(op: Op) -> Iterable[Op] | None:
        if op.target != "aten.gather.default" or cone.issuperset(op.results):
            return None
        own: dict[str, Op] = {}
        for name in expansions.keys() & set(op.operands):
            fresh = names.fresh(name)
            types[fresh] = graph.types[name]
            own[name] = replace(expansions[name], name=fresh, results=(fresh,), module=op.module)
        return [*own.values(), op.reading({name: each.name for name, each in own.items()})] if own else None

    return graph.rewrite(step).with_types(types), frozenset(types)


def _grows(op: Op, graph: Graph) -> bool:
    return graph.types[op.results[0]].num_elements > graph.types[op.operands[0]].num_elements


class _Delayed:
    """The expanded values of a graph that is being rewritten."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.types: dict[str, TensorType] = {}
        self._names = Names(graph)
        self._live = differentiable(graph)
        self._sources: dict[str, str] = {}  # an expanded value -> the value that it repeats

    def step(self, op: Op) -> Iterable[Op] | None:
        """What becomes of `op`; None: it stays."""
        if op.target == "aten.expand.default" and op.operands[0] not in self._live:
            self._sources[op.results[0]] = self._sources.get(op.operands[0], op.operands[0])
        if not any(name in self._sources for name in op.operands):
            return None
        if op.target == ATTENTION:
            return self._with_small_mask(op)
        if not is_elementwise(op):
            return None
        names = {name: self._sources[name] for name in op.operands if name in self._sources}
        shape = broadcast_shape([self._type_of(names.get(name, name)).shape for name in op.operands])
        if shape == self.graph.types[op.results[0]].shape:
            return [op.reading(names)]
        return self._expanded_after(op.reading(names), shape)

    def _with_small_mask(self, op: Op) -> Iterable[Op] | None:
        mask = argument(op, 3, "attn_mask", None)
        if not isinstance(mask, Ref) or mask.name not in self._sources or mask.name in op.operands[:3]:
            return None
        given, small = self.graph.types[mask.name].shape, self._type_of(self._sources[mask.name]).shape
        # Attention repeats rows itself, but reads along them.
        is_readable = len(small) >= 2 and small[-1] == given[-1]
        return [op.reading({mask.name: self._sources[mask.name]})] if is_readable else None

    def _expanded_after(self, op: Op, shape: tuple[int, ...]) -> list[Op]:
        kind = self.graph.types[op.results[0]]
        small = self._names.fresh(f"{op.results[0]}_small")
        self.types[small] = replace(kind, shape=shape)
        self._sources[op.results[0]] = small
        expand = replace(op, target="aten.expand.default", args=(Ref(small), kind.shape), kwargs=())
        return [replace(op, name=small, results=(small,)), expand]

    def _type_of(self, name: str) -> TensorType:
        return self.types.get(name) or self.graph.types[name]
