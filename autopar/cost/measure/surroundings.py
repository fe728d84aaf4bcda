"""What surrounds an op in a step: other ops, which take its place in the caches of a processor."""

from __future__ import annotations

import itertools
import statistics
import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Entry", "Surroundings", "backward_node_s"]

_ATEN: Any = torch.ops.aten
_NODES = 64
_TRIALS = 25


class Surroundings:
    """Other ops on tiny tensors, to run between calls that are timed.

    In a step hardly any op runs twice in a row, so a processor finds the code of an op in a farther cache, and its
    branches mispredicted: on a CPU small ops take up to twice as long in a program as in a loop.  They are called as a
    lowered program calls its ops, which has code of its own.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate their operands."""
        self._x = torch.randn(4, 16, device=device).requires_grad_()
        self._weight = torch.randn(16, device=device)
        self._square = torch.randn(16, 16, device=device)
        self._groups = (self._project, self._normalise, self._activate, self._join, self._scale)
        self._next = itertools.cycle(self._groups)
        self._memory: dict[int, Tensor] = {}

    def run_next(self) -> Tensor:
        """A few of them, others each time: what lies between two calls of an op that a layer uses several times."""
        return next(self._next)(self._x)

    def run(self) -> list[Tensor]:
        """All of them, forward."""
        return [run(self._x) for run in self._groups]

    def run_with_backward(self) -> None:
        """All of them, forward and backward."""
        results = self.run()
        torch.autograd.grad(results, self._x, [torch.ones_like(y) for y in results])

    def evict(self, num_bytes: int) -> None:
        """Read and write so many bytes, which then are in the caches instead of what was there."""
        if num_bytes not in self._memory:
            self._memory[num_bytes] = torch.ones(num_bytes // 4, device=self._x.device)
        self._memory[num_bytes].add_(1.0)

    def _project(self, x: Tensor) -> Tensor:
        y = _ATEN.layer_norm.default(x, [16], self._weight, None, 1e-5)
        return _ATEN.linear.default(y, self._square)

    def _normalise(self, x: Tensor) -> Tensor:
        return _ATEN.softmax.int(_ATEN.transpose.int(_ATEN.reshape.default(x, [2, 2, 16]), 0, 1), -1)

    def _activate(self, x: Tensor) -> Tensor:
        return _ATEN.add.Tensor(_ATEN.mul.Tensor(_ATEN.silu.default(x), x), x)

    def _join(self, x: Tensor) -> Tensor:
        y = _ATEN.cat.default([x, _ATEN.sum.dim_IntList(x, [-1], True)], -1)
        return _ATEN.unsqueeze.default(_ATEN.permute.default(_ATEN.slice.Tensor(y, -1, 0, 8), [1, 0]), 0)

    def _scale(self, x: Tensor) -> Tensor:
        return _ATEN.pow.Tensor_Scalar(_ATEN.div.Tensor(_ATEN.expand.default(x, [2, 4, 16]), 3.0), 2)


class Entry:
    """A view to go backward through: what entering autograd takes, and `backward_node_s`."""

    def __init__(self, device: torch.device) -> None:
        """Make the view."""
        self._leaf = torch.ones(1, device=device).requires_grad_()
        self._root = self._leaf.view_as(self._leaf)
        self._gradient = torch.ones_like(self._leaf)

    def enter(self) -> None:
        """Go through it."""
        torch.autograd.grad(self._root, self._leaf, self._gradient, retain_graph=True)


@lru_cache(maxsize=1)
def backward_node_s() -> float:
    """Seconds that a view's backward takes as one of many in one backward pass, on this CPU."""
    x = torch.ones(2, 2).requires_grad_()

    def taken_s(num_nodes: int) -> float:
        y = x
        for _ in range(num_nodes):
            y = y.transpose(0, 1)
        started = time.perf_counter()
        torch.autograd.grad(y, x, torch.ones_like(y))
        return time.perf_counter() - started

    many, one = ([taken_s(count) for _ in range(_TRIALS)] for count in (_NODES + 1, 1))
    return max(0.0, statistics.median(many) - statistics.median(one)) / _NODES
