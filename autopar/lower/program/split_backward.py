"""A backward pass in two parts: first the gradients of a stage's inputs, later those of its parameters.

Zero-bubble schedules (arXiv 2401.10241) fill idle time with the second part.  The first part runs the nodes on the way
to the inputs and keeps the gradient that arrives at every node where the way to a parameter branches off (a product's
node computes both, but each only if it is asked for).  The second part starts at these nodes.

No node on the way runs twice, apart from those: the gradient of a parameter that branches off at several places, or at
a node that computes all at once (a custom function, which may communicate), belongs to the first part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autopar.lower.autograd import before_backward, edge_of, gradients_of, is_custom_node, run_backward_from

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
        self._roots = list(zip(roots, gradients, strict=True))
        self._inputs = list(inputs)
        self._parameters = list(parameters)
        self._branches: list[_ParameterPaths] = []
        self._parameter_gradients: list[Tensor | None] = []

    def inputs(self) -> list[Tensor | None]:
        """The gradients of the inputs, None where nothing flows."""
        graph = _NodesBelow([root.node for root, _ in self._roots])
        trained = {edge_of(x).node: x for x in self._parameters}
        on_way = graph.above([edge_of(x).node for x in self._inputs])
        aside = [(root, gradient) for root, gradient in self._roots if root.node not in on_way]
        off_path = _ParameterPaths(graph.below([root.node for root, _ in aside], trained), aside)
        branches = {
            node: _ParameterPaths(graph.below(_without(graph.children[node], on_way), trained)) for node in on_way
        }
        at_once = {id(x): x for x in _at_once(branches, off_path)}
        later = {node: b for node, b in branches.items() if b.leaves and id(b.leaves[0]) not in at_once}
        self._branches = [*later.values(), off_path]
        self._parameters = list(at_once.values())
        active = [(root, gradient) for root, gradient in self._roots if root.node in on_way]
        gradients: list[Tensor | None] = [None] * len(self._inputs)
        if active:
            watches = [before_backward(node, branch.keep(node)) for node, branch in later.items()]
            try:
                both = _gradients(active, [*self._inputs, *self._parameters])
            finally:
                for watch in watches:
                    watch.remove()
            gradients, self._parameter_gradients = both[: len(gradients)], both[len(gradients) :]
        self._roots, self._inputs = [], []
        return gradients

    def parameters(self) -> None:
        """Add the gradients of the parameters to their ``grad``."""
        for parameter, gradient in zip(self._parameters, self._parameter_gradients, strict=False):
            _add(parameter, gradient)
        for branch in self._branches:
            branch.run()
        self._branches, self._parameter_gradients, self._parameters = [], [], []


def _add(parameter: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _gradients(roots: Sequence[tuple[GradientEdge, Tensor]], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    return gradients_of([root for root, _ in roots], [gradient for _, gradient in roots], leaves)


class _ParameterPaths:
    """Ways to parameters that lead to no input: the parameters, and where they begin with what gradients."""

    def __init__(self, leaves: list[Tensor], begin: Sequence[tuple[GradientEdge, Tensor]] = ()) -> None:
        self.leaves = leaves
        self._begin = begin

    def keep(self, node: Node) -> Callable[[Gradients], None]:
        """Begin with what arrives at `node`."""

        def keep(gradients: Gradients) -> None:
            self._begin = [(GradientEdge(node, number), g) for number, g in enumerate(gradients) if g is not None]

        return keep

    def run(self) -> None:
        """Add the gradients of the leaves to their ``grad``."""
        if self._begin and self.leaves:
            run_backward_from([root for root, _ in self._begin], [gradient for _, gradient in self._begin], self.leaves)


def _at_once(branches: Mapping[Node, _ParameterPaths], off_path: _ParameterPaths) -> list[Tensor]:
    """The leaves of `branches` that belong to the first part, each branch wholly or not at all."""
    users: dict[int, list[_ParameterPaths]] = {}
    for branch in (*branches.values(), off_path):
        for leaf in branch.leaves:
            users.setdefault(id(leaf), []).append(branch)
    leaves: dict[int, Tensor] = {}
    waiting = [
        b for node, b in branches.items() if is_custom_node(node) or any(len(users[id(x)]) > 1 for x in b.leaves)
    ]
    while waiting:
        for leaf in waiting.pop().leaves:
            if id(leaf) not in leaves:
                leaves[id(leaf)] = leaf
                waiting.extend(user for user in users[id(leaf)] if user is not off_path)
    return list(leaves.values())


def _without(nodes: Sequence[Node], left_out: Set[Node]) -> list[Node]:
    return [node for node in nodes if node not in left_out]


class _NodesBelow:
    """The nodes below some roots."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self.children: dict[Node, list[Node]] = {}
        self._parents: dict[Node, list[Node]] = {}
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node not in self.children:
                self.children[node] = [child for child, _ in node.next_functions if child is not None]
                for child in self.children[node]:
                    self._parents.setdefault(child, []).append(node)
                waiting.extend(self.children[node])

    def above(self, ends: Sequence[Node]) -> Set[Node]:
        """The nodes from which one of `ends` can be reached, `ends` included, in an order that all ranks agree on."""
        waiting = [end for end in ends if end in self.children]
        return _walk(waiting, self._parents)

    def below(self, starts: Sequence[Node], leaves: Mapping[Node, Tensor]) -> list[Tensor]:
        """The values of `leaves` that can be reached from `starts`."""
        seen = _walk(list(starts), self.children)
        return [x for leaf, x in leaves.items() if leaf in seen]


def _walk(waiting: list[Node], following: Mapping[Node, list[Node]]) -> Set[Node]:
    seen: dict[Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting.extend(following.get(node, []))
    return seen.keys()
