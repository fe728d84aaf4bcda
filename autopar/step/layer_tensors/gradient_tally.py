"""The gradients of a layer's tensors in its backward, as autograd makes, shares, adds up and frees them."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.step.layer_tensors.tensor_graph import GradientTarget, TensorKey, TensorNode

__all__ = ["GradientTally"]

_ELEMENT_BYTES = 8


class GradientTally:
    """The gradients that wait at some moment of a backward; several tensors may have the same one.

    Attributes:
        pending: by tensor, the number of its gradient.
        now: bytes at this moment, those of parameters apart.
        moments: by node that ran, in order: bytes before it, and whenever it has made something, those of parameters
            apart and included; and what else it has allocated by then.
        branches: bytes of the gradients from which both a parameter's and another one's are computed.
    """

    def __init__(self, leaves: frozenset[TensorKey] = frozenset(), *, is_compiled: bool = False) -> None:
        """No gradient is there.  At `leaves` autograd keeps no slice of a larger gradient, but copies it.

        `is_compiled`: a compiler writes sums into what it no longer needs, views or not.
        """
        self._leaves = leaves
        self._is_compiled = is_compiled
        self._views: set[TensorKey] = set()  # where the gradient that is pending is a view
        self.branches = 0.0
        self._branched: set[int] = set()
        self.pending: dict[TensorKey, int] = {}
        self.size: list[float] = []
        self.users: list[int] = []
        self.is_weight: list[bool] = []
        self._expanded: set[int] = set()  # gradients that are views of smaller tensors
        self.now = self.weights = 0.0
        self.moments: list[tuple[int, list[tuple[float, float, float]]]] = []

    def make(self, num_bytes: float) -> int:
        """Allocate a gradient; its number."""
        self.size.append(num_bytes)
        self.users.append(0)
        self.is_weight.append(False)
        self.now += num_bytes
        return len(self.size) - 1

    def give(self, target: GradientTarget, gradient: int, *, is_view: bool = False) -> None:
        """The gradient of this number arrives at a tensor, and is added to the one that is there.

        Autograd adds in place, but not to a view, as the gradient of a linear layer's weight is.
        """
        if gradient in self._expanded and (target.is_parameter or target.key in self._leaves):
            gradient = self._dense(target, gradient)  # a leaf keeps no such view
        self.users[gradient] += 1
        before = self.pending.get(target.key)
        if before is None:
            self.pending[target.key] = gradient
            if is_view and not self._is_compiled:
                self._views.add(target.key)
            if target.is_parameter and self.users[gradient] == 1:
                self._count_as_weight(gradient)
            return
        if self.users[before] > 1 or before in self._expanded or target.key in self._views:
            total = self.make(target.num_bytes if before in self._expanded else self.size[before])
            if self.moments:
                self.moments[-1][1].append(self._moment())
            self.users[total] = 1
            if target.is_parameter:
                self._count_as_weight(total)
            self._drop(before)
            self.pending[target.key] = total
            self._views.discard(target.key)
        self._drop(gradient)

    def _count_as_weight(self, gradient: int) -> None:
        self.is_weight[gradient] = True
        self.now -= self.size[gradient]
        self.weights += self.size[gradient]

    def run(self, number: int, node: TensorNode) -> None:
        """The backward of one node, of this number."""
        moments = [self._moment()]
        self.moments.append((number, moments))
        came = [target for target in node.targets if target.key in self.pending]
        arrived = [self.pending.pop(target.key) for target in came]
        are_views = any(target.key in self._views for target in came)
        self._views.difference_update(target.key for target in came)
        if len({target.is_parameter for target in node.sources}) > 1 and not self._branched.issuperset(arrived):
            self.branches += sum(self.size[gradient] for gradient in arrived if gradient not in self._branched)
            self._branched.update(arrived)
        made = [(target, self._made(node, target, came[0], arrived[0])) for target in node.sources]
        moments.append(self._moment(node.backward_extra + self._copied_bytes(node, came, arrived)))
        for target, gradient in made:
            passes_view = gradient in arrived and (are_views or _is_view(node))
            self.give(target, gradient, is_view=passes_view or target.key in node.view_gradients)
            moments.append(self._moment())
        for gradient in arrived:
            self._drop(gradient)

    def _made(self, node: TensorNode, target: GradientTarget, came: GradientTarget, gradient: int) -> int:
        """What `node` gives to `target`, of the gradient that arrived at `came`: its number."""
        is_expanded = gradient in self._expanded
        if is_expanded and self._stays_expanded(node, target, came, gradient):
            return gradient
        if node.expands_gradient and target.num_bytes > self.size[gradient]:
            view = self.make(self.size[gradient])
            self._expanded.add(view)
            return view
        shares = not is_expanded and self._shares(node, target, gradient)
        return gradient if shares else self.make(target.num_bytes)

    def _stays_expanded(self, node: TensorNode, target: GradientTarget, came: GradientTarget, gradient: int) -> bool:
        """A view of an expanded tensor may be a copy, unless it is a single element."""
        is_element = self.size[gradient] <= _ELEMENT_BYTES
        return node.passes_gradient and target.num_bytes == came.num_bytes and (is_element or not _is_view(node))

    def _copied_bytes(self, node: TensorNode, came: Sequence[GradientTarget], arrived: Sequence[int]) -> float:
        """Of gradients that arrive expanded, the copies that the backward of `node` makes."""
        pairs = zip(came, arrived, strict=True) if node.copies_expanded else ()
        return sum(target.num_bytes for target, gradient in pairs if gradient in self._expanded)

    def _dense(self, target: GradientTarget, gradient: int) -> int:
        copy = self.make(target.num_bytes)
        self.users[gradient] += 1
        self._drop(gradient)
        return copy

    def _shares(self, node: TensorNode, target: GradientTarget, gradient: int) -> bool:
        """Whether what `node` gives to `target` is the gradient that it got, or a slice of it."""
        is_whole = target.num_bytes == self.size[gradient]
        return node.passes_gradient and (is_whole or (node.splits_gradient and target.key not in self._leaves))

    def _drop(self, gradient: int) -> None:
        self.users[gradient] -= 1
        if self.users[gradient] <= 0:
            if self.is_weight[gradient]:
                self.weights -= self.size[gradient]
            else:
                self.now -= self.size[gradient]

    def _moment(self, extra_bytes: float = 0.0) -> tuple[float, float, float]:
        return self.now, self.now + self.weights, extra_bytes


def _is_view(node: TensorNode) -> bool:
    return node.op is not None and node.op.is_view
