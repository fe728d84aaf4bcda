"""A backward pass in two parts: first the gradients of a stage's inputs, later those of its parameters.

Zero-bubble schedules (arXiv 2401.10241) fill idle time with the second part.  The first part runs the nodes on the way
to the inputs and keeps the gradient that arrives at every node where the way to a parameter branches off (a product's
node computes both, but each only if it is asked for).  The second part starts at these nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autopar.lower.compat import before_backward, edge_of, gradients_of

__all__ = ["SplitBackward"]

Gradients = tuple[Tensor | None, ...]


class SplitBackward:
    """The backward of one microbatch of one stage.  Call `inputs`, then `parameters`, each once."""

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        """`roots` have the `gradients`; `inputs` and `parameters` are leaves that require gradients."""
        self._roots = list(roots)
        self._gradients = list(gradients)
        self._inputs = list(inputs)
        self._parameters = list(parameters)
        self._branches: list[_Branch] = []

    def inputs(self) -> list[Tensor | None]:
        """The gradients of the inputs, None where nothing flows."""
        graph = _Graph([root.node for root in self._roots])
        ends = {edge_of(x).node for x in self._inputs}
        trained = {edge_of(x).node: x for x in self._parameters}
        on_way = graph.ancestors(ends)
        self._branches = _find_branches(graph, on_way, trained)
        for root, gradient in zip(self._roots, self._gradients, strict=True):
            if root.node not in on_way and (leaves := graph.leaves_below([root.node], trained)):
                self._branches.append(_Branch([root.node], leaves, [{root.output_nr: gradient}]))
        active = [(r, g) for r, g in zip(self._roots, self._gradients, strict=True) if r.node in on_way]
        found: list[Tensor | None] = [None] * len(self._inputs)
        if active and self._inputs:
            handles = [handle for branch in self._branches for handle in branch.watch()]
            try:
                found = gradients_of([r for r, _ in active], [g for _, g in active], self._inputs)
            finally:
                for handle in handles:
                    handle.remove()
        self._roots, self._gradients, self._inputs = [], [], []
        return found

    def parameters(self) -> None:
        """Add the gradients of the parameters to their ``grad``."""
        for branch in self._branches:
            branch.run()
        self._branches, self._parameters = [], []


class _Branch:
    """Nodes on the way to the inputs from which parameters branch off, with what arrived there.

    There are several nodes where they share a parameter.
    """

    def __init__(
        self, nodes: list[Node], parameters: list[Tensor], arrived: list[dict[int, Tensor]] | None = None
    ) -> None:
        self.nodes = nodes
        self.parameters = parameters
        self.arrived: list[dict[int, Tensor]] = arrived or [{} for _ in nodes]

    def watch(self) -> list[Any]:
        return [before_backward(node, self._keeper(index)) for index, node in enumerate(self.nodes)]

    def _keeper(self, index: int) -> Any:
        def keep(gradients: Gradients) -> None:
            self.arrived[index] = {number: g for number, g in enumerate(gradients) if g is not None}

        return keep

    def run(self) -> None:
        """Run from these nodes to the parameters."""
        roots = [
            (GradientEdge(node, number), gradient)
            for node, arrived in zip(self.nodes, self.arrived, strict=True)
            for number, gradient in arrived.items()
        ]
        if not roots:
            return
        # A node below another one gets its gradient from there as well: what had arrived already is all of it.
        handles = [before_backward(n, _replacer(a)) for n, a in zip(self.nodes, self.arrived, strict=True)]
        try:
            found = gradients_of([edge for edge, _ in roots], [g for _, g in roots], self.parameters)
        finally:
            for handle in handles:
                handle.remove()
        for parameter, gradient in zip(self.parameters, found, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.nodes, self.arrived = [], []


def _replacer(arrived: dict[int, Tensor]) -> Any:
    def replace(gradients: Gradients) -> Gradients:
        return tuple(arrived.get(number) for number in range(len(gradients)))

    return replace


class _Graph:
    """The nodes below some roots, in the order of a walk."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self.children: dict[Node, list[Node]] = {}
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node not in self.children:
                self.children[node] = [child for child, _ in node.next_functions if child is not None]
                waiting.extend(self.children[node])

    def ancestors(self, ends: set[Node]) -> set[Node]:
        """The nodes from which one of `ends` can be reached, `ends` included."""
        parents: dict[Node, list[Node]] = {}
        for node, children in self.children.items():
            for child in children:
                parents.setdefault(child, []).append(node)
        found: set[Node] = set()
        waiting = [end for end in ends if end in self.children]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(parents.get(node, []))
        return found

    def leaves_below(self, nodes: Sequence[Node], leaves: dict[Node, Tensor]) -> list[Tensor]:
        """The values of `leaves` that can be reached from `nodes`."""
        seen: set[Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(self.children[node])
        return [x for leaf, x in leaves.items() if leaf in seen]


def _find_branches(graph: _Graph, on_way: set[Node], trained: dict[Node, Tensor]) -> list[_Branch]:
    """Nodes on the way with children off it that lead to parameters, joined where they share one."""
    found: list[_Branch] = []
    for node in graph.children:
        aside = [child for child in graph.children[node] if child not in on_way] if node in on_way else []
        leaves = graph.leaves_below(aside, trained) if aside else []
        if leaves:
            mine = {id(x) for x in leaves}
            sharing = [branch for branch in found if any(id(x) in mine for x in branch.parameters)]
            found = [branch for branch in found if branch not in sharing]
            nodes = [n for branch in sharing for n in branch.nodes] + [node]
            every = {id(x): x for x in (*(x for branch in sharing for x in branch.parameters), *leaves)}
            found.append(_Branch(nodes, list(every.values())))
    return found
