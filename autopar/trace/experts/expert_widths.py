"""Whether devices can share each expert: which slices of its weights make results that are terms of the whole one.

An expert's inner width is the width of what its last products read and its first ones write, as two halves where the
gate and the up projection are one matrix.  Candidates follow from the sizes of the matrices.  Each is run: the terms of
slices must add up to the whole result, and their gradients to the whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autopar.ops import family_of
from autopar.ops.experts import IDS, PRODUCT, TRANSPOSE, Body, InnerWidth
from autopar.program import Op, Ref, TensorType
from autopar.trace.experts.grouped_products import run_experts

__all__ = ["NUM_SLICES", "in_equal_parts", "inner_widths", "moved_bytes", "run_in_slices"]

NUM_SLICES = 2  # by which the comparison cuts: any more are slices of these
_MOST_PARTS = 4  # of one matrix: gate and up projection are two
_SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor")


def in_equal_parts(op: Op, source: TensorType) -> Op:
    """Rewrite a split into equal parts as one by their number, so that it also works on slices of each part."""
    if op.target not in _SPLITS or op.kwargs or not 2 <= len(op.args) <= 3:
        return op
    dim = int(str(op.args[2])) if len(op.args) == 3 else 0
    sizes, count = op.args[1], len(op.results)
    each = set(sizes) if isinstance(sizes, tuple) else {sizes}
    if each != {source.shape[dim] // count} or source.shape[dim] % count:
        return op
    return replace(op, target="aten.chunk.default", args=(op.args[0], count, dim))


def moved_bytes(ops: Sequence[Op], types: Mapping[str, TensorType], names: frozenset[str] | None = None) -> float:
    """What ops but products read and write of each row; `names` are those that count, None: all."""
    return float(
        sum(
            types[name].num_bytes
            for op in ops
            if op.target not in (PRODUCT, TRANSPOSE) and not family_of(op.target).is_view
            for name in (*op.operands, *op.results)
            if name in types and (names is None or name in names)
        )
    )


def inner_widths(body: Body, experts: Sequence[TensorType]) -> Iterator[InnerWidth]:
    """The ways that sizes allow; `experts` is the op's list."""
    turned = {op.results[0]: op.operands[0] for op in body.ops if op.target == TRANSPOSE}
    after: set[str] = set()  # what is computed from a product
    first, last = list[Op](), list[Op]()
    for op in body.ops:
        depends = not after.isdisjoint(op.operands)
        if op.target == PRODUCT:
            (last if depends else first).append(op)
        if depends or op.target == PRODUCT:
            after.update(op.results)
    if not first or not last:
        return
    before = _before(body.ops, last)

    def cut(op: Op, column: int) -> tuple[int, int]:
        """(place, dim) of the columns, or the rows, of a product's matrices."""
        matrix = op.operands[1]
        is_turned = matrix in turned
        return int(turned.get(matrix, matrix).removeprefix("experts")), 2 - column if is_turned else 1 + column

    inner = [cut(op, 0) for op in last]
    sizes = {experts[place].shape[dim] for place, dim in inner}
    size = min(sizes)
    outer = [cut(op, 1) for op in first]
    vectors = list(_vectors(body.ops, experts))
    inside = [(place, 1) for place, name in vectors if name in before]
    wide = [*outer, *inside]
    if len(sizes) > 1 or size % NUM_SLICES or any(experts[place].shape[dim] % size for place, dim in wide):
        return
    terms = tuple(place for place, name in vectors if name not in before)
    is_last = {name for op in last for name in op.results} | _behind(body.ops, last)
    made = {name for op in (*first, *last) for name in op.results} | _behind(body.ops, first)
    narrow = tuple(sorted((made - is_last) | {name for _, name in vectors if name in before}))
    ratios = {experts[place].shape[dim] // size for place, dim in wide}
    parts = max(ratios)
    if parts > _MOST_PARTS or ratios - {1, parts}:
        return
    moved = moved_bytes(body.ops, body.types, frozenset(narrow))
    rows = tuple((place, dim, 1) for place, dim in dict.fromkeys(inner))
    for each in dict.fromkeys((parts, 1)):  # parts one behind the other; or their columns take turns
        columns = ((place, dim, min(each, experts[place].shape[dim] // size)) for place, dim in dict.fromkeys(wide))
        yield InnerWidth(size, (*rows, *columns), terms, narrow, moved)


def _vectors(ops: Sequence[Op], experts: Sequence[TensorType]) -> Iterator[tuple[int, str]]:
    """What rows take of their expert as it is, as biases: (place, the value)."""
    for op in ops:
        if op.target == "aten.index.Tensor" and op.args[1] == (Ref(IDS),) and op.operands[0].startswith("experts"):
            place = int(op.operands[0].removeprefix("experts"))
            if len(experts[place].shape) == 2:
                yield place, op.results[0]


def _before(ops: Sequence[Op], ends: Sequence[Op]) -> set[str]:
    """What `ends` are computed from."""
    names = {name for op in ends for name in op.operands}
    for op in reversed(ops):
        if not names.isdisjoint(op.results):
            names.update(op.operands)
    return names


def _behind(ops: Sequence[Op], starts: Sequence[Op]) -> set[str]:
    """What is computed from the results of `starts`."""
    names = {name for op in starts for name in op.results}
    for op in ops:
        if not names.isdisjoint(op.operands):
            names.update(op.results)
    return names


def run_in_slices(
    width: InnerWidth,
    ids: Tensor,
    lists: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    num_experts: int,
    body: str,
) -> Tensor:
    """The sum of the results of all slices; `lists` are reads, experts and others."""
    reads, experts, others = lists
    total: Tensor | None = None
    for index in range(NUM_SLICES):
        own = list(experts)
        for place, dim, parts in width.cuts:
            halves = (part.chunk(NUM_SLICES, dim)[index] for part in own[place].chunk(parts, dim))
            own[place] = torch.cat(list(halves), dim)
        for place in width.terms if index else ():
            own[place] = torch.zeros_like(own[place])
        term = run_experts(ids, reads, own, others, torch.arange(num_experts), num_experts, body)
        total = term if total is None else total + term
    assert total is not None
    return total
