"""Which values of a program are sums over the rows of its batch: what each row would give by itself, added up.

Values are followed from the inputs, sliced by rows, through the options of ops, without any move between them: a value
is either made of no row (whole), or sliced along one dim, or a sum of terms.  This is stricter than running in
microbatches (`microbatches.time_assignment`), where a whole value may be added by the first of them alone.

Rows may have pieces, such as images in text: inputs that are followed sliced by pieces, each of any row, until
``masked_scatter`` puts what became of them in places of the rows, in order.  A row can then be computed with its own
pieces alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ops.halos import space_dim
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Placement, shard
from autopar.program import Op, Program

__all__ = ["RowPieces", "row_pieces", "sums_over_rows"]

_PUT = "aten.masked_scatter.default"
_ROWS, _PIECES, _ONE = "rows", "pieces", "piece "
_WHOLE = frozenset((("", REPLICATE), ("", BROADCAST)))

_Place = tuple[str, Placement]  # what is sliced or added up, "" for neither, and how


@dataclass(frozen=True)
class RowPieces:
    """The inputs of a program that are pieces of rows.

    Args:
        inputs: their names; dim 0 is of pieces.
        places: how many places of a row each piece takes.
    """

    inputs: tuple[str, ...]
    places: int

    def most(self, tokens: int) -> int:
        """How many pieces a row of so many tokens can hold, at least one."""
        return max(1, tokens // self.places)


def row_pieces(program: Program) -> RowPieces | None:
    """The inputs whose features ``masked_scatter`` puts in the rows; None: there are none, or they are rows as well."""
    made_by = {result: op for layer in program.layers for op in layer.ops for result in op.results}
    puts = [op for layer in program.layers for op in layer.ops if op.target == _PUT]
    found: dict[str, None] = {}
    seen: set[str] = set()
    pending = [op.operands[2] for op in puts]
    features = {program.type_of(name).shape[0] for name in pending}
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in program.inputs:
            found[name] = None
        elif name in made_by:
            pending += made_by[name].operands
    counts = {program.type_of(name).shape[:1] for name in found}
    sizes = {shape[0] for shape in counts if shape}
    if len(counts) != 1 or len(sizes) != 1 or len(features) != 1 or sizes == {program.batch_size}:
        return None
    places, more = divmod(features.pop(), sizes.pop())
    return RowPieces(tuple(name for name in program.inputs if name in found), places) if places and not more else None


def sums_over_rows(program: Program) -> frozenset[str]:
    """The values that are sums over the rows of a batch; none if the batch has one row, of which nothing can be told.

    >>> sums_over_rows(program)  # doctest: +SKIP
    frozenset({'cross_entropy', 'cross_entropy_denominator'})
    """
    rows = program.batch_size
    if rows < 2:
        return frozenset()
    pieces = row_pieces(program)
    first = program.type_of(program.inputs[0]).shape[:2]
    placed = {name: frozenset(_of_input(program.type_of(name).shape, rows, first)) for name in program.inputs}
    if pieces is not None:
        placed |= dict.fromkeys(pieces.inputs, frozenset({(_PIECES, shard(0))}))
    for layer in program.layers:
        for op in layer.ops:
            found = frozenset(_results(op, placed))
            for place, name in enumerate(op.results):
                placed[name] = frozenset(results[place] for results in found)
    return frozenset(name for name, places in placed.items() if (_ROWS, PARTIAL) in places)


def _of_input(shape: tuple[int, ...], rows: int, first: tuple[int, ...]) -> Iterator[_Place]:
    if shape[:1] == (rows,):
        yield _ROWS, shard(0)
    elif len(shape) == 3 and shape[1:] == first:  # positions of several kinds
        yield _ROWS, shard(1)
    else:
        yield from _WHOLE


def _results(op: Op, placed: Mapping[str, frozenset[_Place]]) -> Iterator[tuple[_Place, ...]]:
    """The placements of an op's results by every option that fits those of its operands."""
    operands = [placed.get(name, _WHOLE) for name in op.operands]  # parameters, buffers and constants are whole
    if not all(operands):
        return
    sliced = {of for known in operands for of, _ in known if of}
    if len(sliced) > 1 or any(of.startswith(_ONE) for of in sliced):
        yield from _joined(op, placed)
        return
    if not sliced:
        yield from ((place,) * len(op.results) for place in _WHOLE)
    if op.target == "aten.unbind.int" and (_PIECES, shard(0)) in operands[0] and _dim_of(op) == 0:
        count = len(op.results)
        yield tuple((f"{_ONE}{number} of {count} of {op.name}", REPLICATE) for number in range(count))
    of = next(iter(sliced), "")
    for option in op.options:
        if option.kernel or option.collectives or space_dim(option.factor):
            continue
        if not sliced and PARTIAL in option.results:
            continue  # what is made of no row is there for every row, and would be added up
        pairs = zip(option.operands, operands, strict=True)
        if all((of, placement) in known or ("", placement) in known for placement, known in pairs):
            yield tuple((of if placement.kind in "SP" else "", placement) for placement in option.results)


def _joined(op: Op, placed: Mapping[str, frozenset[_Place]]) -> Iterator[tuple[_Place, ...]]:
    """The same where rows meet their pieces, or pieces that were taken apart are joined again."""
    operands = [placed.get(name, _WHOLE) for name in op.operands]
    if op.target == _PUT and all(
        (of, shard(0)) in known for of, known in zip((_ROWS, _ROWS, _PIECES), operands, strict=True)
    ):
        yield ((_ROWS, shard(0)),)
    if op.target == "aten.cat.default" and _dim_of(op) == 0:
        tags = [of for known in operands for of, _ in known]
        name = tags[0].rpartition(" of ")[2]
        if tags == [f"{_ONE}{number} of {len(tags)} of {name}" for number in range(len(tags))]:  # all, in their order
            yield ((_PIECES, shard(0)),)


def _dim_of(op: Op) -> object:
    return op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)
