"""How much memory the forward and the backward of one call take besides what goes in, comes out and is kept: counted
while the call runs on tensors without memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from autopar.trace.annotations.backward_nodes import gradients_by_hand
from autopar.trace.compat import torch_internals

__all__ = ["AllocationCount", "Temporaries", "backward_temporaries"]


class Temporaries(NamedTuple):
    """The most bytes at any moment of a call's forward, and of its backward, that neither are results, saved nor
    gradients of its operands.
    """

    forward: int = 0
    backward: int = 0


class AllocationCount(torch_internals.DispatchMode):
    """Counts the storages that ops inside make, while they live.

    Under a mode torch replaces some writes in place by copies, so that it may count more than runs later, never less.

    Attributes:
        now: bytes that live.
        most: the most of them at any moment since `start`.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """`known` tensors are not counted."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self.know(known)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these."""
        for tensor in tensors:
            self._known[torch_internals.storage_key(tensor)] = weakref.ref(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count what it returns."""
        result: Any = func(*args, **(kwargs or {}))
        made = cast("Sequence[Any]", result) if isinstance(result, list | tuple) else (result,)
        for each in made:
            if isinstance(each, Tensor):
                self._add(each)
        return cast("Any", result)

    @contextmanager
    def counting(self) -> Generator[None]:
        """Inside, ops count; `most` begins with what lives now."""
        self.most = self.now
        with self:
            yield

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), torch_internals.storage_key(tensor)
        known = self._known.get(key)
        if known is None or known() is None:
            num_bytes = storage.nbytes()
            self._known[key] = weakref.ref(storage, lambda _: self._free(num_bytes))
            self.now += num_bytes
            self.most = max(self.most, self.now)

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def backward_temporaries(count: AllocationCount, operands: Sequence[Tensor], results: list[Tensor]) -> int:
    """Run the backward of `results`, which `count` has seen made of `operands`, and give up what it saved.

    `results` are emptied: whoever calls holds no others.

    Returns:
        The most bytes besides what was there before and the gradients of `operands`.
    """
    leaves = [x for x in operands if x.requires_grad]
    roots = [torch_internals.edge_of(x) for x in results if x.requires_grad]
    if not roots or not leaves:
        return 0
    arriving = [torch.empty_like(x) for x in results if x.requires_grad]
    held = [x.detach() for x in (*results, *arriving)]  # their memory, without the graph
    results.clear()
    count.know(arriving)
    passed = set(map(torch_internals.storage_key, arriving))
    before = count.now
    with count.counting():
        made = gradients_by_hand(roots, arriving, leaves)
    own = {torch_internals.storage_key(x): x.untyped_storage().nbytes() for x in made if x is not None}
    del held
    return max(0, count.most - before - sum(size for key, size in own.items() if key not in passed))
