"""Minimum cuts of a directed graph, for many capacities of the same edges.

Dinic's algorithm: breadth-first levels from the source, then augmenting paths that only go from a level to the next,
until no path is left (Dinitz, "Algorithm for solution of a problem of maximum flow in networks with power estimation",
1970).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

__all__ = ["FlowNetwork"]

N = TypeVar("N", bound=Hashable)


class FlowNetwork(Generic[N]):
    """A directed graph from `source` to `sink`; an edge that is added twice is there once."""

    def __init__(self, source: N, sink: N) -> None:
        self.nodes: list[N] = [source, sink]
        self._numbers: dict[N, int] = {source: 0, sink: 1}
        self._edges: dict[tuple[int, int], int] = {}
        # Arc 2 e is edge e, arc 2 e + 1 the way back over it; by node, the arcs that leave it, and by arc, its head.
        self._arcs: list[list[int]] = [[], []]
        self._heads: list[int] = []

    def add_edge(self, tail: N, head: N) -> int:
        """The number of the edge from `tail` to `head`; nodes are added as they are named."""
        pair = (self._number(tail), self._number(head))
        if pair not in self._edges:
            self._edges[pair] = len(self._edges)
            for arc_tail, arc_head in (pair, pair[::-1]):
                self._arcs[arc_tail].append(len(self._heads))
                self._heads.append(arc_head)
        return self._edges[pair]

    def source_side(self, capacities: Sequence[float]) -> set[N]:
        """The source's side of a minimum cut: of several minimum cuts the one with the largest source's side.

        Args:
            capacities: by number of edge; ``math.inf`` where an edge is never cut.
        """
        free = [each for capacity in capacities for each in (capacity, 0.0)]
        while (levels := self._levels(free))[1] >= 0:
            self._saturate(free, levels)
        before_sink = self._nodes_before_sink(free)
        return {node for number, node in enumerate(self.nodes) if number not in before_sink}

    def _number(self, node: N) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
            self._arcs.append([])
        return self._numbers[node]

    def _levels(self, free: Sequence[float]) -> list[int]:
        """By node, how many arcs it is from the source; -1 where no arcs with free capacity lead to it."""
        levels = [-1] * len(self.nodes)
        levels[0] = 0
        queue = deque[int]((0,))
        while queue and levels[1] < 0:
            node = queue.popleft()
            for arc in self._arcs[node]:
                head = self._heads[arc]
                if levels[head] < 0 and free[arc] > 0:
                    levels[head] = levels[node] + 1
                    queue.append(head)
        return levels

    def _saturate(self, free: list[float], levels: Sequence[int]) -> None:
        """Send all that fits from level to level; `free` changes."""
        tried = [0] * len(self.nodes)  # arcs of a node before this one lead nowhere
        path: list[int] = []
        node = 0
        while True:
            if node == 1:
                sent = min(free[arc] for arc in path)
                for arc in path:
                    free[arc] -= sent
                    free[arc ^ 1] += sent
                path, node = [], 0
                continue
            arcs = self._arcs[node]
            while tried[node] < len(arcs):
                arc = arcs[tried[node]]
                if free[arc] > 0 and levels[self._heads[arc]] == levels[node] + 1:
                    break
                tried[node] += 1
            else:
                if not path:
                    return
                node = self._heads[path.pop() ^ 1]
                tried[node] += 1
                continue
            path.append(arc)
            node = self._heads[arc]

    def _nodes_before_sink(self, free: Sequence[float]) -> set[int]:
        """The nodes from which arcs with free capacity lead to the sink, itself among them."""
        seen, queue = {1}, [1]
        while queue:
            for arc in self._arcs[queue.pop()]:
                tail = self._heads[arc]
                if free[arc ^ 1] > 0 and tail not in seen:
                    seen.add(tail)
                    queue.append(tail)
        return seen
