"""An order of what a model computes besides its layers that is the same in each process.

Models that make a table, a mask or a buffer for each of a set of names (``for kind in set(config.layer_types)``) go
through the set in the order of hashes of strings, which differ between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from autopar.program import Op
from autopar.trace.graph import Graph
from autopar.trace.passes.cleanup import is_repeatable

__all__ = ["order_by_readers"]

_FOUND_BY_READERS = ("constant", "buffer")  # the order of parameters is that of optimizers, and a model's own


def order_by_readers(graph: Graph) -> Graph:
    """Put neighboring ops that follow from inputs, constants and buffers alone, hoisted ops, constants and buffers in
    the order in which the ops behind them read them.
    """
    apart = _without_parameters(graph)
    read = _Reads()
    read.come_before([*graph.outputs, *graph.updates.values()])
    runs = [(is_apart, list(run)) for is_apart, run in groupby(graph.ops, lambda op: op.name in apart)]
    ordered: list[list[Op]] = []
    for is_apart, run in reversed(runs):
        ordered.append(_ordered(run, read) if is_apart else run)
        read.come_before([name for op in ordered[-1] for name in op.operands])
    hoisted = _ordered(graph.hoisted, read)
    read.come_before([name for op in hoisted for name in op.operands])
    roles = {name: role for name, role in graph.roles.items() if role not in _FOUND_BY_READERS}
    found = {name: role for name, role in graph.roles.items() if role in _FOUND_BY_READERS}
    roles |= {name: found[name] for name in (*read.in_order(found), *found)}
    return replace(
        graph,
        ops=tuple(op for run in reversed(ordered) for op in run),
        hoisted=tuple(hoisted),
        roles=roles,
        parameters={name: graph.parameters[name] for name in roles if name in graph.parameters},
        constants={name: graph.constants[name] for name in roles if name in graph.constants},
    )


class _Reads:
    """Where values are first read, noted from the end of a program on."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._first = 0

    def come_before(self, names: Sequence[str]) -> None:
        """These are read, in order, before all that were noted so far."""
        for name in reversed(names):
            self._first -= 1
            self._places[name] = self._first

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are read, in the order in which they first are."""
        return sorted((name for name in names if name in self._places), key=self._places.__getitem__)


def _without_parameters(graph: Graph) -> set[str]:
    """The names of the ops that read no parameter, nor what was computed of one, and draw no random numbers."""
    known = {name for name, role in graph.roles.items() if role != "parameter"}
    names: set[str] = set()
    for op in graph.ops:
        if known.issuperset(op.operands) and is_repeatable(op):
            known.update(op.results)
            names.add(op.name)
    return names


def _ordered(ops: Sequence[Op], read: _Reads) -> list[Op]:
    """Each op behind those whose results it reads, in the order in which later ops come to them."""
    producers = {name: op for op in ops for name in op.results}
    ordered: dict[str, Op] = {}
    for name in (*read.in_order(producers), *producers):
        waiting = [producers[name]]
        while waiting:
            op = waiting[-1]
            missing = [producers[x] for x in op.operands if x in producers and producers[x].name not in ordered]
            if missing:
                waiting.append(missing[0])
            else:
                ordered.setdefault(op.name, waiting.pop())
    return [*ordered.values(), *(op for op in ops if op.name not in ordered)]
