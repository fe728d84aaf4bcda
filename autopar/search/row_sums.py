"""Which values of a program are sums over the rows of its batch: what each row would give by itself, added up.

Values are followed from the inputs, sliced by rows, through the options of ops, without any move between them: a value
is either made of no row (whole), or sliced along one dim, or a sum of terms.  This is stricter than running in
microbatches (`autopar.search.microbatches`), where a whole value may be added by the first of them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ops.halos import space_dim
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Placement, shard
from autopar.program import Op, Program

__all__ = ["sums_over_rows"]

_WHOLE = frozenset((REPLICATE, BROADCAST))


def sums_over_rows(program: Program) -> frozenset[str]:
    """The values that are sums over the rows of a batch; none if the batch has one row, of which nothing can be told.

    >>> sums_over_rows(program)  # doctest: +SKIP
    frozenset({'cross_entropy', 'cross_entropy_denominator'})
    """
    rows = program.batch_size
    if rows < 2:
        return frozenset()
    first = program.type_of(program.inputs[0]).shape[:2]
    placed = {name: frozenset(_of_input(program.type_of(name).shape, rows, first)) for name in program.inputs}
    for layer in program.layers:
        for op in layer.ops:
            found = frozenset(_results(op, placed))
            for place, name in enumerate(op.results):
                placed[name] = frozenset(results[place] for results in found)
    return frozenset(name for name, placements in placed.items() if PARTIAL in placements)


def _of_input(shape: tuple[int, ...], rows: int, first: tuple[int, ...]) -> Iterator[Placement]:
    if shape[:1] == (rows,):
        yield shard(0)
    elif len(shape) == 3 and shape[1:] == first:  # positions of several kinds
        yield shard(1)
    else:
        yield from _WHOLE


def _results(op: Op, placed: Mapping[str, frozenset[Placement]]) -> Iterator[tuple[Placement, ...]]:
    """The placements of an op's results by every option that fits those of its operands."""
    operands = [placed.get(name, _WHOLE) for name in op.operands]  # parameters, buffers and constants are whole
    is_whole = all(known & _WHOLE for known in operands)
    if is_whole:
        yield from ((each,) * len(op.results) for each in _WHOLE)
    for option in op.options:
        if option.kernel or option.collectives or space_dim(option.factor):
            continue
        if is_whole and PARTIAL in option.results:
            continue  # what is made of no row is there for every row, and would be added up
        if all(placement in known for placement, known in zip(option.operands, operands, strict=True)):
            yield option.results
