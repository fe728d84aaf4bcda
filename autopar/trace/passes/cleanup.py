"""Cleanup passes: remove asserts, aliases, copies, dead code and common subexpressions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.ops import family_of
from autopar.ops.family import argument
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.gradients import differentiable
from autopar.trace.graph import Graph, rename

__all__ = [
    "TO_THE_END", "bypass", "drop_aliases", "drop_dead_ops", "drop_identities", "drop_needless_copies",
    "is_elementwise", "is_repeatable", "merge_equal_ops", "slice_bounds", "spell_out_copies", "spell_out_sizes",
]  # fmt: skip

_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


def is_repeatable(op: Op) -> bool:
    """Whether running `op` twice gives the same results."""
    family = family_of(op.target)
    return not (family.draws(op) or family.is_uninitialized)


def is_elementwise(op: Op) -> bool:
    """Whether `op` computes each element from those at the same place of its operands, which it broadcasts."""
    return family_of(op.target).is_pointwise and is_repeatable(op)


def drop_aliases(graph: Graph) -> Graph:
    """Take away alias and lift ops, and detach where no gradient arrives anyway."""
    live = differentiable(graph)

    def is_alias(op: Op) -> bool:
        if op.target == "aten.detach.default":
            return op.operands[0] not in live
        return op.target in ("aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift.default")

    return bypass(graph, {op.name for op in graph.ops if is_alias(op)})


def drop_needless_copies(graph: Graph) -> Graph:
    """Take away clones that change no memory order, or that a reshape makes itself when it has to.

    Views become reshapes: on a device's local tensors, whose strides may differ from the whole ones', a view
    could fail; where it would not, a reshape is one.
    """
    graph = graph.rewrite(lambda op: [replace(op, target="aten.reshape.default")] if op.target in _RESHAPES else None)
    readers: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in op.operands:
            readers.setdefault(name, []).append(op.target)
    at_end = graph.read_at_end

    def is_needless(op: Op) -> bool:
        if op.target not in ("aten.clone.default", "aten.contiguous.default"):
            return False
        if op.operands[0] not in graph.strided:
            return True
        only_reshapes = set(readers.get(op.results[0], ())) <= {"aten.reshape.default"}
        return op.results[0] in graph.strided or (only_reshapes and op.results[0] not in at_end)

    return bypass(graph, {op.name for op in graph.ops if is_needless(op)})


def drop_identities(graph: Graph) -> Graph:
    """Take away ops that give back their operand: slices of everything, casts to the same dtype, cat of one
    tensor ...

    A cat with empty pieces (a key/value cache before its first token) loses the pieces first, what puts the pieces of a
    tensor together again reads that one, and so does what takes a tensor back to the shape that it had.
    """
    graph = graph.rewrite(lambda op: _without_empty_pieces(op, graph))
    cut_by = graph.producers
    graph = graph.rewrite(lambda op: _without_cuts(op, graph, cut_by))
    producers = graph.producers
    graph = graph.rewrite(lambda op: _without_round_trip(op, graph, producers))
    return bypass(graph, {op.name for op in graph.ops if len(op.results) == 1 and _is_identity(op, graph)})


def _without_empty_pieces(op: Op, graph: Graph) -> Iterable[Op] | None:
    pieces = op.args[0] if op.args else None
    if op.target != "aten.cat.default" or not isinstance(pieces, tuple):
        return None
    full = tuple(p for p in pieces if isinstance(p, Ref) and graph.types[p.name].num_elements)
    return [replace(op, args=(full, *op.args[1:]))] if full and len(full) < len(pieces) else None


_TRANSPOSE = "aten.transpose.int"
_CUTS = {  # the place of the dim among arguments
    "aten.unbind.int": 1, "aten.split.Tensor": 2, "aten.split_with_sizes.default": 2, "aten.chunk.default": 2,
}  # fmt: skip


def _without_cuts(op: Op, graph: Graph, producers: Mapping[str, Op]) -> Iterable[Op] | None:
    """A cat of all pieces of a tensor, in order and along the dim that was cut, as LLaVA has it of the features of
    images: with it, as many values as there are images are gone.
    """
    cut = producers.get(op.operands[0]) if op.target == "aten.cat.default" else None
    if cut is None or cut.target not in _CUTS or cut.results != op.operands:
        return None
    source, made = graph.types[cut.operands[0]], graph.types[op.results[0]]
    dim, joined = argument(cut, _CUTS[cut.target], "dim", 0), argument(op, 1, "dim", 0)
    assert isinstance(dim, int)
    assert isinstance(joined, int)
    if dim % len(source.shape) != joined % len(made.shape):
        return None
    return [replace(op, target=_REGROUPINGS[0], args=(Ref(cut.operands[0]), made.shape), kwargs=())]


_REGROUPINGS = (
    "aten.reshape.default", "aten.view.default", "aten.squeeze.dim", "aten.unsqueeze.default",
)  # fmt: skip


def _without_round_trip(op: Op, graph: Graph, producers: Mapping[str, Op]) -> Iterable[Op] | None:
    maker = producers.get(op.operands[0]) if op.operands else None
    while maker is not None and op.target in _REGROUPINGS and maker.target in _REGROUPINGS:
        source = maker.operands[0]
        if graph.types[source] == graph.types[op.results[0]]:
            return [_as_given(op, source, graph)]
        maker = producers.get(source)
    if maker is not None and op.target == maker.target == _TRANSPOSE:
        rank = len(graph.types[op.results[0]].shape)
        first, second = ({dim % rank for dim in each.args[1:3] if isinstance(dim, int)} for each in (maker, op))
        return [_as_given(op, maker.operands[0], graph)] if first == second else None
    return None


def _as_given(op: Op, source: str, graph: Graph) -> Op:
    return replace(op, target=_REGROUPINGS[0], args=(Ref(source), graph.types[source].shape), kwargs=())


def _is_identity(op: Op, graph: Graph) -> bool:
    operands = op.operands
    if not operands or graph.types[op.results[0]] != graph.types[operands[0]]:
        return False
    if op.target == "aten.cat.default":
        return len(operands) == 1
    if op.target == "aten.slice.Tensor":
        return True  # of the same shape, so of everything
    if op.target == _TRANSPOSE:
        return op.args[1] == op.args[2]
    if op.target == "aten.permute.default":
        return op.args[1] == tuple(range(len(graph.types[operands[0]].shape)))
    if op.target == "aten.dropout.default":
        return argument(op, 2, "train", True) is False or op.args[1] == 0
    return op.target in (
        "aten._to_copy.default", "aten.to.dtype", "aten.expand.default", "aten.reshape.default",
        "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default",
    )  # fmt: skip


def bypass(graph: Graph, ops: set[str]) -> Graph:
    """Remove the ops of these names; who read their first result reads their first operand."""
    gone = {op.results[0]: op.operands[0] for op in graph.ops if op.name in ops}
    return rename(replace(graph, ops=tuple(op for op in graph.ops if op.name not in ops)), gone)


def spell_out_sizes(graph: Graph) -> Graph:
    """Write sizes in full (no -1), and "to the end" of a slice always the same way, so that equal ops look equal."""

    def spell(op: Op) -> Iterable[Op] | None:
        if op.target in ("aten.reshape.default", "aten.expand.default"):
            return [replace(op, args=(op.args[0], graph.types[op.results[0]].shape, *op.args[2:]))]
        if op.target == "aten.slice.Tensor":
            return [_spell_slice(op, graph.types[op.operands[0]])]
        if op.target == "aten.broadcast_tensors.default":
            return [_as_expand(op, index, graph) for index in range(len(op.results))]
        return None

    return graph.rewrite(spell)


def spell_out_copies(graph: Graph) -> Graph:
    """Write what functional copies do as casts and expansions: a copy's destination gives no more than its type."""
    types: dict[str, TensorType] = {}

    def spell(op: Op) -> Iterable[Op] | None:
        if op.target not in _COPIES:
            return None
        source = op.args[0 if op.target == "aten.type_as.default" else 1]
        result = graph.types[op.results[0]]
        assert isinstance(source, Ref)
        given = graph.types[source.name]
        cast_name = op.results[0] if given.shape == result.shape else f"{op.name}_cast"
        types[cast_name] = replace(given, dtype=result.dtype)
        cast = replace(
            op,
            name=cast_name,
            target="aten._to_copy.default",
            args=(source,),
            kwargs=(("dtype", f"torch.{result.dtype}"),),
            results=(cast_name,),
        )
        if given.shape == result.shape:
            return [cast]
        args = (Ref(cast_name), result.shape)
        return [cast, replace(op, target="aten.expand.default", args=args, kwargs=())]

    return graph.rewrite(spell).with_types(types)


_COPIES = ("aten.copy.default", "aten.fill.Tensor", "aten.type_as.default")
TO_THE_END = 2**63 - 1  # where a slice ends that has all that follows, however large that is on a device


def _spell_slice(op: Op, source: TensorType) -> Op:
    dim = argument(op, 1, "dim", 0)
    start, end = argument(op, 2, "start"), argument(op, 3, "end")
    assert isinstance(dim, int)
    dim %= len(source.shape)
    size = source.shape[dim]

    def place(value: Arg, default: int) -> int:
        if not isinstance(value, int):
            return default
        return min(max(value + size if value < 0 else value, 0), size)

    low, high = place(start, 0), place(end, size)
    step = argument(op, 4, "step", 1)
    args = (op.args[0], dim, low, TO_THE_END if high == size else high)
    return replace(op, args=args if step == 1 else (*args, step), kwargs=())


def slice_bounds(op: Op, source: TensorType) -> tuple[int, int, int] | None:
    """The dim that `op` cuts, and from where to where; None if it leaves gaps, or numbers are not known."""
    if argument(op, 4, "step", 1) != 1:
        return None
    dim, start, end = _spell_slice(op, source).args[1:4]
    if not isinstance(dim, int) or not isinstance(start, int) or not isinstance(end, int):
        return None
    return dim, start, min(end, source.shape[dim])


def _as_expand(op: Op, index: int, graph: Graph) -> Op:
    result = op.results[index]
    args = (Ref(op.operands[index]), graph.types[result].shape)
    return replace(op, name=result, target="aten.expand.default", args=args, kwargs=(), results=(result,))


def drop_dead_ops(graph: Graph) -> Graph:
    """Take away ops whose results nobody reads, and constants that nobody reads."""
    needed = set(graph.read_at_end)
    kept: list[Op] = []
    for op in reversed((*graph.hoisted, *graph.ops)):
        if needed.intersection(op.results):
            kept.append(op)
            needed.update(op.operands)
    live = {op.name for op in kept}
    defined = {name for op in kept for name in op.results} | {
        name for name, role in graph.roles.items() if role != "constant" or name in needed
    }
    return replace(
        graph,
        ops=tuple(op for op in graph.ops if op.name in live),
        hoisted=tuple(op for op in graph.hoisted if op.name in live),
        types={name: t for name, t in graph.types.items() if name in defined},
        roles={name: role for name, role in graph.roles.items() if name in defined},
        constants={name: c for name, c in graph.constants.items() if name in defined},
    )


def merge_equal_ops(graph: Graph, within: dict[str, int] | None = None) -> Graph:
    """Compute only once what several ops compute.

    `within` (op name -> group) restricts this to ops of one group, so that merging does not tie layers
    together.
    """
    seen: dict[object, Op] = {}
    names: dict[str, str] = {}
    kept: list[Op] = []
    for op in graph.ops:
        now = op.reading(names)
        key = (0 if within is None else within[op.name], now.target, repr(now.args), repr(now.kwargs))
        first = seen.setdefault(key, now)
        if first is now or not is_repeatable(now) or len(first.results) != len(now.results):
            kept.append(now)
        else:
            names.update(zip(now.results, first.results, strict=True))
    return rename(replace(graph, ops=tuple(kept)), names)
