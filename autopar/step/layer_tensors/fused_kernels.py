"""Which tasks of a compiled layer become one kernel: `join_tasks`.

A task is an op, a move inside a device or a part of a backward.  Tasks that run over equally many elements are joined
where one reads what the other makes or both read the same tensor, unless something else has to run between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.step.layer_tensors.tensor_graph import TensorGraph, TensorKey

__all__ = ["FusedKernel", "JoinedTasks", "Key", "Task", "join_tasks"]

Key = tuple[object, ...]
"""Of a tensor, or of a term of a gradient."""


class FusedKernel(NamedTuple):
    """A kernel made of ops of these indices in the layer: the bytes that it reads and writes."""

    ops: tuple[int, ...]
    read_bytes: float
    write_bytes: float


@dataclass
class Task:
    """Something that runs: an op, a move or a part of a backward.

    Args:
        node: number of the node that it belongs to; -1 of none.
        fuses: whether it can be a part of a kernel.
        elements: over how many elements it runs; other ways through as many have another sign.
        reads: bytes by tensor.
        makes: bytes and elements by tensor.
        piece: as in `TensorNode`.
        passes: likewise.
    """

    node: int
    fuses: bool
    elements: int
    reads: Mapping[Key, float]
    makes: Mapping[Key, tuple[float, int]]
    piece: int
    passes: int = 1


@dataclass
class JoinedTasks:
    """Kernels made of nodes of these numbers, and what only the kernels that make it read."""

    kernels: tuple[FusedKernel, ...]
    inside: frozenset[Key]

    def of_ops(self, graph: TensorGraph) -> tuple[FusedKernel, ...]:
        """The kernels made of the ops of those nodes."""
        named = (k._replace(ops=tuple(graph.nodes[n].op_index for n in k.ops)) for k in self.kernels)
        kernels = (k._replace(ops=tuple(op for op in k.ops if op >= 0)) for k in named)
        return tuple(kernel for kernel in kernels if kernel.ops)  # moves inside a device cost nothing


def join_tasks(tasks: Sequence[Task], leaving: Iterable[Key], sizes: Mapping[TensorKey, float]) -> JoinedTasks:
    """Join tasks, which are in order, into kernels; what is `leaving` is written whoever reads it."""
    kept = frozenset(leaving)
    maker = {key: number for number, task in enumerate(tasks) for key in task.makes}
    readers: dict[Key, list[int]] = {}
    for number, task in enumerate(tasks):
        for key in task.reads:
            readers.setdefault(key, []).append(number)
    _share_loops(tasks, maker, readers, kept)
    group_of = _groups(tasks, maker)
    members: dict[int, list[int]] = {}
    for number, group in group_of.items():
        members.setdefault(group, []).append(number)
    kernels: list[FusedKernel] = []
    inside: set[Key] = set()
    for group, numbers in members.items():
        nodes = tuple(dict.fromkeys(tasks[number].node for number in numbers if tasks[number].node >= 0))
        written = 0.0
        for number in numbers:
            for key, (num_bytes, _) in tasks[number].makes.items():
                if key in kept or any(group_of.get(reader) != group for reader in readers.get(key, ())):
                    written += num_bytes
                else:
                    inside.add(key)
        kernels.append(FusedKernel(nodes, _read_bytes([tasks[n] for n in numbers], sizes), written))
    return JoinedTasks(tuple(kernels), frozenset(inside))


def _read_bytes(tasks: Sequence[Task], sizes: Mapping[TensorKey, float]) -> float:
    """Of what is made elsewhere, each tensor once; parts that are read of one add up to no more than the whole."""
    made = {key for task in tasks for key in task.makes}
    reads: dict[Key, list[float]] = {}
    for task in tasks:
        for key, num_bytes in task.reads.items():
            if key not in made:
                reads.setdefault(key, []).append(num_bytes)
    known: dict[Key, float] = {**sizes}
    once = sum(min(sum(each), known.get(key, max(each))) for key, each in reads.items())
    return once * max(task.passes for task in tasks)


def _share_loops(
    tasks: Sequence[Task], maker: Mapping[Key, int], readers: Mapping[Key, list[int]], kept: frozenset[Key]
) -> None:
    """What is computed of a statistic belongs to the loop that it was taken in; what one larger loop alone reads is
    computed in that loop, broadcast.
    """
    for task in tasks:
        for key in task.reads if task.fuses else ():
            number = maker.get(key)
            if number is None or not tasks[number].fuses or tasks[number].elements <= task.elements:
                continue
            if tasks[number].makes[key][1] == task.elements and tasks[number].piece == task.piece:
                task.elements = tasks[number].elements
    for number in range(len(tasks) - 1, -1, -1):
        task = tasks[number]
        reading = {reader for key in task.makes for reader in readers.get(key, ())}
        if not task.fuses or len(reading) != 1 or not kept.isdisjoint(task.makes):
            continue
        reader = tasks[reading.pop()]
        is_elementwise = task.elements == max(elements for _, elements in task.makes.values())
        if reader.fuses and is_elementwise and reader.elements > task.elements and reader.piece == task.piece:
            task.elements = reader.elements


def _groups(tasks: Sequence[Task], maker: Mapping[Key, int]) -> dict[int, int]:
    """Of the tasks that are in kernels, the first one of theirs.

    A task's level counts what has to be done before it starts; tasks of one level never wait for each other but
    through tasks of their kernel.
    """
    level = [0] * len(tasks)
    parent = {number: number for number, task in enumerate(tasks) if task.fuses}

    def first(number: int) -> int:
        while parent[number] != number:
            number = parent[number]
        return number

    seen: dict[tuple[object, ...], int] = {}
    for number, task in enumerate(tasks):
        for key in task.reads:
            before = maker.get(key)
            if before is not None and before < number:
                joins = task.fuses and tasks[before].fuses and _loop(task) == _loop(tasks[before])
                level[number] = max(level[number], level[before] + (not joins))
        if not task.fuses:
            continue
        for key in (*task.reads, *task.makes):
            place = (level[number], *_loop(task), key)
            one, other = sorted((first(number), first(seen.setdefault(place, number))))
            parent[other] = one
    return {number: first(number) for number in parent}


def _loop(task: Task) -> tuple[int, int]:
    return task.elements, task.piece
