"""Joins a padding and the convolution that reads it, so that both split in space as one op.

``convolution(pad(x))`` becomes a convolution with that padding, if it is of zeros and equal on both sides, and
``autopar.padded_convolution`` otherwise (`autopar.ops.padded_convolutions`).  A cast between the two moves before the
padding.  Paddings in a row are one padding before that, where one adds what both do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ops.family import argument, packet_name
from autopar.ops.halos import per_dim
from autopar.ops.padded_convolutions import PADDED_CONVOLUTION, width_pairs
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.graph import Graph, Names
from autopar.trace.passes.cleanup import drop_dead_ops

__all__ = ["join_padding"]

_CONVOLUTIONS = {"aten.conv1d": 1, "aten.conv2d": 2, "aten.conv3d": 3}
_CAST = "aten._to_copy.default"
_PADS = ("aten.pad", "aten.constant_pad_nd")


@dataclass(frozen=True)
class _Padding:
    """What a pad adds to spatial dims: widths for all of them, the last dim first, a mode and a value."""

    widths: tuple[int, ...]
    mode: str
    value: float

    @property
    def is_of_zeros(self) -> bool:
        """Whether it adds what a convolution's own padding adds."""
        return self.mode == "constant" and self.value == 0


def join_padding(graph: Graph) -> Graph:
    """Every convolution that alone reads a padding of spatial dims becomes one op with it.

    That may read another padding, of another mode: it joins that, too.
    """
    made = _join_convolutions(_join_rows_of_pads(graph))
    while made is not graph:
        graph, made = made, _join_convolutions(made)
    return made


def _join_convolutions(graph: Graph) -> Graph:
    readers, names = graph.count_readers(), Names(graph)
    types: dict[str, TensorType] = {}

    def sole_source(op: Op) -> Op | None:
        """The op that computes the first operand, if no other reads it."""
        source = op.args[0] if op.args else None
        return graph.producers.get(source.name) if isinstance(source, Ref) and readers[source.name] == 1 else None

    def step(op: Op) -> list[Op] | None:
        count = _CONVOLUTIONS.get(packet_name(op.target), 0)
        direct = pad = sole_source(op) if count else None
        if direct is not None and direct.target == _CAST and [key for key, _ in direct.kwargs] == ["dtype"]:
            pad = sole_source(direct)
        padding = _padding_of(pad, count) if pad is not None and packet_name(pad.target) in _PADS else None
        if pad is None or direct is None or padding is None:
            return None
        (source, *_), before = pad.args, list[Op]()
        if not isinstance(source, Ref) or len(graph.types[source.name].shape) != count + 2:
            return None
        if direct is not pad:
            name = names.fresh(direct.results[0])
            types[name] = replace(graph.types[source.name], dtype=graph.types[direct.results[0]].dtype)
            before = [replace(direct, name=name, args=(source, *direct.args[1:]), results=(name,))]
            source = Ref(name)
        joined = _joined(op, source, padding, count)
        return joined and [*before, joined]

    made = graph.rewrite(step)
    return graph if made is graph else drop_dead_ops(made.with_types(types))


def _join_rows_of_pads(graph: Graph) -> Graph:
    """Two paddings, of which the second alone reads the first, become one where that adds the same; so do more."""
    readers, joined = graph.count_readers(), dict[str, Op]()

    def step(op: Op) -> list[Op] | None:
        source = op.args[0] if packet_name(op.target) in _PADS and len(op.args) > 1 else None
        if not isinstance(source, Ref):
            return None
        first = joined.get(source.name) or graph.producers.get(source.name)
        rank = len(graph.types[source.name].shape)
        both = first and packet_name(first.target) in _PADS and (_padding_of(first, rank), _padding_of(op, rank))
        if first is None or not both or None in both or readers[source.name] != 1:
            return None
        widths = _sum_of(*both)
        if widths is None:
            return None
        made = replace(op, args=(first.args[0], _as_long(widths, op, first), *op.args[2:]))
        joined[op.results[0]] = made
        return [made]

    made = graph.rewrite(step)
    return graph if made is graph else drop_dead_ops(made)


def _sum_of(first: _Padding | None, second: _Padding | None) -> tuple[int, ...] | None:
    """The widths of a padding that adds what two do, one after the other; None if none does."""
    if first is None or second is None or (first.mode, first.value) != (second.mode, second.value):
        return None
    pairs = list(zip(first.widths, second.widths, strict=True))
    # What reflects, or comes from the other end, is of the padded tensor where one dim is padded twice.
    twice = any(any(a) and any(b) for a, b in zip(_pairs(first.widths), _pairs(second.widths), strict=True))
    return None if twice and first.mode not in ("constant", "replicate") else tuple(a + b for a, b in pairs)


def _pairs(widths: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(widths[::2], widths[1::2], strict=True))


def _as_long(widths: tuple[int, ...], *pads: Op) -> tuple[int, ...]:
    """The widths of as many dims as the longer one of `pads` has: all others are zeros."""
    lists = (argument(pad, 1, "pad") for pad in pads)
    return widths[: max(len(each) for each in lists if isinstance(each, tuple))]


def _padding_of(pad: Op, count: int) -> _Padding | None:
    """What `pad` adds to `count` spatial dims; None if it pads others, or drops rows."""
    widths = argument(pad, 1, "pad")
    is_constant = packet_name(pad.target) == "aten.constant_pad_nd"
    mode = "constant" if is_constant else argument(pad, 2, "mode", "constant")
    value = argument(pad, 2 if is_constant else 3, "value")
    value = 0.0 if value is None else value
    if not isinstance(widths, tuple) or not isinstance(mode, str) or not isinstance(value, int | float):
        return None
    numbers = tuple(width for width in widths if isinstance(width, int) and width >= 0)
    if len(numbers) != len(widths) or any(numbers[2 * count :]):
        return None
    return _Padding((*numbers[: 2 * count], *(0,) * (2 * count - len(numbers))), mode, float(value))


def _joined(op: Op, source: Arg, padding: _Padding, count: int) -> Op | None:
    own = argument(op, 4, "padding", 0)
    paddings = per_dim(0 if own == "valid" else own, count, 0)
    strides, dilations = (per_dim(argument(op, at, key, 1), count, 1) for at, key in ((3, "stride"), (5, "dilation")))
    if not paddings or not strides or not dilations:
        return None
    groups, bias = argument(op, 6, "groups", 1), argument(op, 2, "bias")
    operands = (source, argument(op, 1, "weight"), bias)
    pairs = width_pairs(padding.widths)
    if padding.is_of_zeros:
        if all(before == after for before, after in pairs):
            sums = tuple(own + before for own, (before, _) in zip(paddings, pairs, strict=True))
            return _call(op, f"aten.conv{count}d.default", (*operands, strides, sums, dilations, groups))
        sums = [(before + own, after + own) for own, (before, after) in zip(paddings, pairs, strict=True)]
        padding = replace(padding, widths=tuple(width for pair in reversed(sums) for width in pair))
        paddings = (0,) * count
    rest: Sequence[Arg] = (padding.widths, padding.mode, padding.value if padding.mode == "constant" else None)
    return _call(op, PADDED_CONVOLUTION, (*operands, strides, paddings, dilations, groups, *rest))


def _call(op: Op, target: str, args: tuple[Arg, ...]) -> Op:
    return replace(op, target=target, args=args, kwargs=())
