"""Which output of a model is the loss that training differentiates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.program import Program, Value
from autopar.trace.calls.structure import Leaf, Structure, walk
from autopar.trace.graph import Graph

__all__ = ["find_loss", "without_loss"]


def find_loss(structure: Structure, graph: Graph, values: Mapping[str, Value]) -> tuple[str, tuple[str, ...]]:
    """The scalar output that the caller's ``backward()`` begins with, as far as the model says so, else ""; and notes.

    It is the one called "loss"; the only one; or the one that is computed from all others, such as their sum.  Of
    several that are none of these (a dict of losses, as detectors return it) only the caller knows what they become.
    """
    scalars: dict[str, bool] = {}
    for end in walk(structure):
        if isinstance(end, Leaf) and values[graph.outputs[end.index]].can_be_loss:
            name = graph.outputs[end.index]
            scalars[name] = scalars.get(name, False) or end.path[-1:] == ("loss",)
    named = [name for name, is_named in scalars.items() if is_named]
    if named or len(scalars) < 2:
        return next(iter([*named, *scalars]), ""), ()
    total = next((name for name in scalars if scalars.keys() <= _computed_from(graph, [name])), "")
    note = (
        f"the model returns several losses ({', '.join(scalars)}), and none that is made of all the others, so that "
        "backward begins with yours: behind all forwards, with what they keep in memory. If forward returns their sum "
        "as 'loss', they may take turns in microbatches"
    )
    return total, () if total else (note,)


def _computed_from(graph: Graph, names: Iterable[str]) -> set[str]:
    """These values, and those that they are computed from."""
    found = set(names)
    for op in reversed(graph.ops):
        if not found.isdisjoint(op.results):
            found.update(op.operands)
    return found


def without_loss(program: Program) -> Program:
    """The same for callers who compute their loss from any of the outputs: all forwards end before a backward begins.

    Plans of the one are none of the other, so its fingerprint is another.
    """
    if not program.loss:
        return program
    own = hashlib.sha256(f"{program.fingerprint} differentiated from any output".encode()).hexdigest()[:16]
    return replace(program, loss="", fingerprint=own)
