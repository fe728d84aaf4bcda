"""The graph between capture and layers: a list of ops over named values, passed from one normalizing pass to
the next.

A pass is a function from a `Graph` to a `Graph`.  Nothing here is changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from autopar.program import Arg, Op, Ref, TensorType

__all__ = ["Graph", "Names", "call_by", "check", "number_names", "rename"]

_V = TypeVar("_V")
_NUMBER = re.compile(r"(?<=.)_\d+(?=_|$)")


@dataclass(frozen=True)
class Graph:
    """A flat program.

    Args:
        ops: in execution order.
        types: of every value.
        roles: of every value that no op computes; see `Value.role`.
        inputs: the model's tensor arguments, in order.
        outputs: what the model returns, in order; repeats allowed.
        updates: buffer -> the value that replaces it after a forward.
        parameters: value -> module name, for parameters and buffers.
        trainable: the values that want a gradient of their own: parameters that aren't frozen, inputs that
        ask for it.
        constants: the tensors that are known: lifted from the code, or folded.
        strided: values whose memory is not in row-major order.
        hoisted: the ops that run once a step; see `Program.hoisted`.
        notes: what the user should know.
    """

    ops: tuple[Op, ...]
    types: Mapping[str, TensorType]
    roles: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: Mapping[str, str]
    parameters: Mapping[str, str]
    trainable: frozenset[str]
    constants: Mapping[str, Tensor]
    strided: frozenset[str] = frozenset()
    hoisted: tuple[Op, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def producers(self) -> Mapping[str, Op]:
        """The op that computes each computed value."""
        return {name: op for op in self.ops for name in op.results}

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where each op is in `ops`, by name."""
        return {op.name: place for place, op in enumerate(self.ops)}

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """Where the ops are that read each value, in order."""
        readers: dict[str, list[int]] = {}
        for place, op in enumerate(self.ops):
            for name in dict.fromkeys(op.operands):
                readers.setdefault(name, []).append(place)
        return readers

    @property
    def read_at_end(self) -> frozenset[str]:
        """The values that leave the program: outputs and new contents of buffers."""
        return frozenset((*self.outputs, *self.updates.values()))

    def count_readers(self) -> dict[str, int]:
        """How often each value is read, the program's end included."""
        counts = dict.fromkeys(self.types, 0)
        for name in [*(n for op in self.ops for n in op.operands), *self.outputs, *self.updates.values()]:
            counts[name] += 1
        return counts

    def rewrite(self, step: Callable[[Op], Iterable[Op] | None]) -> Graph:
        """Replace each op by what `step` returns for it (None: keep it)."""
        ops: list[Op] = []
        is_same = True
        for op in self.ops:
            made = step(op)
            is_same = is_same and made is None
            ops.extend((op,) if made is None else made)
        return self if is_same else replace(self, ops=tuple(ops))

    def with_types(self, types: Mapping[str, TensorType]) -> Graph:
        """The same with more values known."""
        return replace(self, types={**self.types, **types})


class Names:
    """Fresh names, which differ from those of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._taken = {*graph.types, *(op.name for op in graph.ops)}

    def fresh(self, stem: str) -> str:
        """`stem`, or `stem` with a number, not taken yet."""
        name, count = stem, 0
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name


def rename(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Let the readers of each key of `names` read its value instead; chains are followed."""
    if not names:
        return graph

    def last(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    final = {name: last(name) for name in names}
    return replace(
        graph,
        ops=tuple(op.reading(final) for op in graph.ops),
        hoisted=tuple(op.reading(final) for op in graph.hoisted),
        outputs=tuple(final.get(name, name) for name in graph.outputs),
        updates={buffer: final.get(name, name) for buffer, name in graph.updates.items()},
    )


def call_by(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The graph with ``names[n]`` as the name of each value and op n that is a key; where it is defined, and read.

    Raises AssertionError where two values would get one name.
    """

    def new(name: str) -> str:
        return names.get(name, name)

    def moved(values: Mapping[str, _V]) -> dict[str, _V]:
        renamed = {new(name): value for name, value in values.items()}
        assert len(renamed) == len(values), f"two of {sorted(values)} get one name"
        return renamed

    def read(arg: Arg) -> Arg:
        return Ref(new(arg.name)) if isinstance(arg, Ref) else arg

    def named(op: Op) -> Op:
        if names.keys().isdisjoint((op.name, *op.results, *op.operands)):
            return op
        return op.map_args(read, name=new(op.name), results=tuple(map(new, op.results)))

    return replace(
        graph,
        ops=tuple(map(named, graph.ops)),
        hoisted=tuple(map(named, graph.hoisted)),
        types=moved(graph.types),
        roles=moved(graph.roles),
        inputs=tuple(map(new, graph.inputs)),
        outputs=tuple(map(new, graph.outputs)),
        updates={new(buffer): new(name) for buffer, name in graph.updates.items()},
        parameters=moved(graph.parameters),
        trainable=frozenset(map(new, graph.trainable)),
        constants=moved(graph.constants),
        strided=frozenset(map(new, graph.strided)),
    )


def number_names(graph: Graph) -> Graph:
    """Number constants, ops and values of one stem in order: ``mul``, ``mul_1``, ...

    Ops that were dropped leave gaps, by which a program would have other names where the model makes a cache of keys
    and values that nothing reads, and a plan, which goes by names, would not fit.  Inputs, parameters and buffers keep
    their names, which are those of the call and of the module.
    """
    fixed = {*graph.inputs, *graph.parameters}
    defined = [*graph.roles, *(name for op in (*graph.hoisted, *graph.ops) for name in (op.name, *op.results))]
    counts: dict[str, int] = {}
    names: dict[str, str] = {}
    for old in dict.fromkeys(defined):
        if old in fixed:
            continue
        stem, name = _NUMBER.sub("", old), ""
        while not name or name in fixed:
            count = counts[stem] = counts.get(stem, -1) + 1
            name = f"{stem}_{count}" if count else stem
        names[old] = name
    known = {*names, *fixed}
    names = {old: name for old, name in names.items() if old != name}
    # Types of values that were dropped may stay behind, and have names that others get now.
    return call_by(replace(graph, types={name: kind for name, kind in graph.types.items() if name in known}), names)


def check(graph: Graph) -> None:
    """Each value is defined once, before it is read, and has a type; raises AssertionError otherwise."""
    defined = set(graph.roles)
    for op in graph.ops:
        for name in op.operands:
            assert name in defined, f"{op.name} reads {name}, which nothing defines before it"
        for name in op.results:
            assert name not in defined, f"{op.name} defines {name} a second time"
            assert name in graph.types, f"{name} has no type"
            defined.add(name)
    missing = (graph.read_at_end | set(graph.inputs)) - defined
    assert not missing, f"the program's end reads {sorted(missing)}, which nothing defines"
