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
from autopar.trace.passes.constants import is_repeatable

__all__ = ["order_by_readers"]

_FOUND_BY_READERS = ("constant", "buffer")  # the order of parameters is that of optimizers, and a model's own


def order_by_readers(graph: Graph) -> Graph:
    """Put neighboring ops that follow from inputs, constants and buffers alone, hoisted ops, constants and buffers in
    the order in which the ops behind them read them.
    """
    apart = _without_parameters(graph)
    read = [*graph.outputs, *graph.updates.values()]
    runs = [(is_apart, list(run)) for is_apart, run in groupby(graph.ops, lambda op: op.name in apart)]
    ordered: list[list[Op]] = []
    for is_apart, run in reversed(runs):
        ordered.append(_ordered(run, read) if is_apart else run)
        read = [*(name for op in ordered[-1] for name in op.operands), *read]
    hoisted = _ordered(graph.hoisted, read)
    read = [*(name for op in hoisted for name in op.operands), *read]
    roles = {name: role for name, role in graph.roles.items() if role not in _FOUND_BY_READERS}
    roles |= {name: graph.roles[name] for name in (*read, *graph.roles) if graph.roles.get(name) in _FOUND_BY_READERS}
    return replace(
        graph,
        ops=tuple(op for run in reversed(ordered) for op in run),
        hoisted=tuple(hoisted),
        roles=roles,
        parameters={name: graph.parameters[name] for name in roles if name in graph.parameters},
        constants={name: graph.constants[name] for name in roles if name in graph.constants},
    )


def _without_parameters(graph: Graph) -> set[str]:
    """The names of the ops that read no parameter, nor what was computed of one, and draw no random numbers."""
    known = {name for name, role in graph.roles.items() if role != "parameter"}
    names: set[str] = set()
    for op in graph.ops:
        if known.issuperset(op.operands) and is_repeatable(op):
            known.update(op.results)
            names.add(op.name)
    return names


def _ordered(ops: Sequence[Op], read: Iterable[str]) -> list[Op]:
    """Each op behind those whose results it reads, as `read`, the operands of later ops in order, come to them."""
    producers = {name: op for op in ops for name in op.results}
    ordered: dict[str, Op] = {}
    for name in (*read, *producers):
        waiting = [producers[name]] if name in producers else []
        while waiting:
            op = waiting[-1]
            missing = [producers[x] for x in op.operands if x in producers and producers[x].name not in ordered]
            if missing:
                waiting.append(missing[0])
            else:
                ordered.setdefault(op.name, waiting.pop())
    return [*ordered.values(), *(op for op in ops if op.name not in ordered)]
