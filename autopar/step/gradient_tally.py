"""The gradients of a layer's tensors during its backward: which are there at once, and which share memory."""

from __future__ import annotations

from autopar.step.tensor_graph import GradientTarget, TensorKey, TensorNode

__all__ = ["GradientTally"]


class GradientTally:
    """The gradients that wait at some moment of a backward; several tensors may have the same one.

    Attributes:
        pending: by tensor, the number of its gradient.
        now: bytes at this moment, those of parameters apart.
        first: bytes when something that was saved is first read (for the caller to note).
        most: the most bytes at any moment, those of parameters apart.
        most_with_weights: the same, with those of parameters.
        branches: bytes of the gradients from which both a parameter's and another one's are computed.
    """

    def __init__(self, leaves: frozenset[TensorKey] = frozenset()) -> None:
        """No gradient is there.  At `leaves` autograd keeps no slice of a larger gradient, but copies it."""
        self._leaves = leaves
        self.first = self.branches = 0.0
        self._branched: set[int] = set()
        self.pending: dict[TensorKey, int] = {}
        self.size: list[float] = []
        self.users: list[int] = []
        self.is_weight: list[bool] = []
        self.now = self.weights = 0.0
        self.most = self.most_with_weights = 0.0

    def make(self, num_bytes: float) -> int:
        """Allocate a gradient; its number."""
        self.size.append(num_bytes)
        self.users.append(0)
        self.is_weight.append(False)
        self.now += num_bytes
        return len(self.size) - 1

    def give(self, target: GradientTarget, gradient: int) -> None:
        """The gradient of this number arrives at a tensor, and is added to the one that is there."""
        self.users[gradient] += 1
        before = self.pending.get(target.key)
        if before is None:
            self.pending[target.key] = gradient
            if target.is_parameter and self.users[gradient] == 1:
                self.is_weight[gradient] = True
                self.now -= self.size[gradient]
                self.weights += self.size[gradient]
            return
        if self.users[before] > 1:  # what others read can't be added to
            total = self.make(self.size[before])
            self.users[total] = 1
            self._drop(before)
            self.pending[target.key] = total
        self._drop(gradient)

    def run(self, node: TensorNode, freed: float) -> None:
        """The backward of one node; `freed` bytes of what was saved are free by now."""
        arrived = [self.pending.pop(target.key) for target in node.targets if target.key in self.pending]
        if len({target.is_parameter for target in node.sources}) > 1 and not self._branched.issuperset(arrived):
            self.branches += sum(self.size[gradient] for gradient in arrived if gradient not in self._branched)
            self._branched.update(arrived)
        made = [
            (target, arrived[0] if self._shares(node, target, arrived[0]) else self.make(target.num_bytes))
            for target in node.sources
        ]
        self._note(node.backward_extra - freed)
        for target, gradient in made:
            self.give(target, gradient)
            self._note(-freed)
        for gradient in arrived:
            self._drop(gradient)

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

    def _note(self, extra_bytes: float) -> None:
        self.most = max(self.most, self.now + extra_bytes)
        self.most_with_weights = max(self.most_with_weights, self.now + self.weights + extra_bytes)
