"""The tail of a program: ops behind all layers, which run once a step on sums over the whole batch.

A loss that multiplies two means over all tokens, as balance losses of experts do, is no sum of what microbatches
give: each of them has a term of either mean only.  But it is a function of few sums.  `with_tail` moves the ops from
where sums meet on behind the layers: microbatches add up what layers put out, every device runs the tail on the
totals, and their gradients are what the backward of every microbatch begins with.  So all forwards come before the
first backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autopar.errors import PlanMismatchError
from autopar.program import Layer, Op, Program

__all__ = ["with_tail"]


def with_tail(program: Program, names: Collection[str]) -> Program:
    """`program` with the ops of these names in its tail; as it is without names.

    Raises:
        PlanMismatchError: there are no such ops, or they can't run behind all layers.
    """
    if not names:
        return program
    tail = tuple(op for layer in program.layers for op in layer.ops if op.name in names)
    problem = next(_problems(program, tail, names), "")
    if problem:
        raise PlanMismatchError(f"the ops {', '.join(sorted(names))} can't run behind all layers: {problem}")
    moved = replace(program, tail=tail)
    return replace(moved, layers=tuple(_layers_without(moved, frozenset(names))))


def _problems(program: Program, tail: Sequence[Op], names: Collection[str]) -> Iterator[str]:
    missing = sorted(set(names) - {op.name for op in tail})
    if missing:
        yield f"the program has no op {missing[0]!r}"
    made = {name for op in tail for name in op.results}
    for op in (op for layer in program.layers for op in layer.ops):
        own = op.name in names
        if own and (op.is_random or op.has_collectives):
            yield f"{op.name} draws random numbers or communicates"
        if own and any(program.values[name].role == "parameter" for name in op.operands):
            yield f"{op.name} reads a parameter"
        if not own and not made.isdisjoint(op.operands):
            yield f"{op.name} reads what they make"
    for kind in program.kinds:
        same_kind = [layer for layer in program.layers if layer.kind == kind.kind]
        for ops in zip(*(layer.ops for layer in same_kind), strict=True):
            if len({op.name in names for op in ops}) > 1:
                yield f"{', '.join(op.name for op in ops)} are the same op of layers of one kind, but not all are named"


def _layers_without(program: Program, names: frozenset[str]) -> Iterator[Layer]:
    """The layers without the ops of these names, putting out what the tail reads; those without any op are gone."""
    kept = {index: tuple(op for op in layer.ops if op.name not in names) for index, layer in enumerate(program.layers)}
    places = _output_places(program, kept)
    kinds: dict[int, int] = {}
    for index, layer in enumerate(program.layers):
        ops = kept[index]
        if not ops:
            continue
        read = {name for op in ops for name in op.operands}
        yield replace(
            layer,
            kind=kinds.setdefault(layer.kind, len(kinds)),
            ops=ops,
            inputs=tuple(name for name in layer.inputs if name in read),
            state=tuple(name for name in layer.state if name in read),
            outputs=tuple(ops[place].results[result] for place, result in places[layer.kind]),
        )


def _output_places(program: Program, kept: dict[int, tuple[Op, ...]]) -> dict[int, list[tuple[int, int]]]:
    """By kind, (index of an op that is kept, index of a result) of each output; layers of a kind put out the same."""
    read = {name for ops in kept.values() for op in ops for name in op.operands}
    needed = {*program.tail_reads, *program.outputs, *program.updates.values()}
    places: dict[int, dict[tuple[int, int], None]] = {}
    for index, layer in enumerate(program.layers):
        made = {name: (at, n) for at, op in enumerate(kept[index]) for n, name in enumerate(op.results)}
        leaving = [name for name in layer.outputs if name in made and (name in read or name in needed)]
        leaving += [name for name in made if name in needed and name not in layer.outputs]
        places.setdefault(layer.kind, {}).update(dict.fromkeys(made[name] for name in leaving))
    return {kind: list(pairs) for kind, pairs in places.items()}
