"""What parameters take on one device group besides their storage, as its actions run: copies to compute with, buffers
of collectives, gradients.

A layer's gradients are in one of these states:

- *unreduced*: gradients of the copies, until ``REDUCE``;
- *summed*: gradients of the copies that several microbatches add up (ZeRO-0 and 1), until ``REDUCE``;
- *reducing*: in the buffers of a reduction, until ``WAIT_REDUCE``;
- *reduced*: as the optimizer reads them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autopar.step.byte_tally import ByteTally
from autopar.step.layer_bytes import LayerBytes

__all__ = ["ParameterMemory"]


class ParameterMemory:
    """Copies and gradients of the layers' parameters.

    ``gradients`` has what is summed and what is reduced: both are kept until the end of the step.
    """

    def __init__(
        self, sizes: Sequence[LayerBytes], shared: Sequence[Mapping[str, float]], sums: Sequence[bool], *, adds: bool
    ) -> None:
        """All per layer: its bytes; the gradients of the parameters that it shares with other layers; whether
        microbatches add up gradients of its copies.

        `adds`: layers that share a parameter add their gradients as soon as they are reduced; else each has its own
        until the end of the step.
        """
        self._sizes, self._shared, self._sums, self._adds = sizes, shared, sums, adds
        self._copies = ByteTally[int]()
        self._unsharding = ByteTally[int]()
        self._gradients = ByteTally[Hashable]()
        self._unreduced = ByteTally[int]()
        self._reducing = ByteTally[int]()

    @property
    def gathered_bytes(self) -> float:
        """Copies, and what is on its way to become one."""
        return self._copies.total_bytes + self._unsharding.total_bytes

    @property
    def gradient_bytes(self) -> float:
        """Gradients that stay until the end of the step."""
        return self._gradients.total_bytes

    @property
    def transient_bytes(self) -> float:
        """Gradients that wait for their reduction, and what reductions take while they are under way."""
        return self._unreduced.total_bytes + self._reducing.total_bytes

    def unshard(self, index: int) -> None:
        """Start to gather a layer's parameters."""
        self._unsharding.allocate(index, self._sizes[index].coming_bytes)

    def wait_unshard(self, index: int) -> float:
        """The copies are there; returns the bytes of the buffers that they were copied out of."""
        if index not in self._unsharding:
            return 0.0
        self._unsharding.free(index)
        self._copies.allocate(index, self._sizes[index].copied_bytes)
        return self._sizes[index].taken_apart_bytes

    def reshard(self, index: int) -> None:
        """Free the copies."""
        self._copies.free(index)

    def has_final_gradients(self, index: int) -> bool:
        """Whether a layer's next backward makes gradients as the optimizer reads them: nothing reduces or adds them."""
        return not self._sizes[index].reduced_bytes and index not in self._gradients

    def add_gradients(self, index: int) -> None:
        """A layer's backward has made gradients of its copies."""
        if self._sums[index]:
            self._gradients.allocate(index, self._sizes[index].sum_bytes)
        elif self._sizes[index].reduced_bytes:
            self._unreduced.allocate(index, self._sizes[index].copy_gradient_bytes)
        else:
            self._finish(index)

    def reduced_bytes(self, index: int) -> tuple[float, float]:
        """What starting to reduce a layer's gradients takes at once: of buffers, and of gradients that stay."""
        sizes = self._sizes[index]
        if not sizes.reduced_bytes:
            return 0.0, 0.0
        term = self._term_bytes(index)
        return sizes.packed_bytes + term, sizes.arriving_bytes - term

    def reduce(self, index: int) -> None:
        """A layer's gradients have been handed to their reduction."""
        sizes = self._sizes[index]
        if sizes.reduced_bytes:
            self._reducing.allocate(index, sizes.scattered_bytes + self._term_bytes(index))
            self._unreduced.free(index)
            if self._sums[index]:
                self._gradients.free(index)
                self._gradients.allocate(index, sizes.arriving_bytes)
            else:
                self._finish(index)

    def wait_reduce(self, index: int) -> None:
        """The reduced gradients are there."""
        self._reducing.free(index)

    def sums(self, index: int) -> bool:
        """Whether microbatches add up the gradients of a layer's copies."""
        return self._sums[index]

    def finish(self, num_bytes: float) -> None:
        """Gradients are complete: so many bytes."""
        self._gradients.clear()
        self._gradients.allocate("complete", num_bytes)

    def _term_bytes(self, index: int) -> float:
        """The part of what a reduction brings that is added to a gradient that is there, and freed."""
        if self._sums[index]:
            return 0.0
        if index in self._gradients:
            return self._sizes[index].arriving_bytes
        return sum(num_bytes for name, num_bytes in self._shared[index].items() if name in self._gradients)

    def _finish(self, index: int) -> None:
        self._gradients.allocate(index, self._sizes[index].gradient_bytes)
        for name, num_bytes in self._shared[index].items():
            self._gradients.allocate(name if self._adds else (name, index), num_bytes)
