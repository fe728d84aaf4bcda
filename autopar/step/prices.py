"""What a search must be told: prices.  `autopar.cost` provides them; a test gives a table."""

from __future__ import annotations

from typing import Protocol

from autopar.cluster import OpTime
from autopar.placement import Axis
from autopar.program import Op, TensorType

__all__ = ["OpTime", "Prices"]


class Prices(Protocol):
    """Prices on one kind of device in one cluster.  Pure: equal arguments give equal prices."""

    @property
    def device(self) -> str:
        """The device's name, for the plan."""
        ...

    @property
    def memory_bytes(self) -> float:
        """Bytes of one device that a program may use."""
        ...

    @property
    def devices_per_node(self) -> int:
        """How many neighbouring ranks share the fast links."""
        ...

    def op_s(
        self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], differentiable: bool
    ) -> OpTime:
        """Seconds of `op` on tensors of these local types; backward is 0.0 if not `differentiable`.

        Raises:
            MissingPriceError: nothing is known about this op or dtype.
        """
        ...

    def collective_s(self, kind: str, axis: Axis, num_bytes: float) -> float:
        """Seconds of one collective on `axis`: `kind` as in `Step.forward`, `num_bytes` as `Step.fraction` counts.

        Raises:
            MissingPriceError: this kind has no price.
        """
        ...

    def optimizer_s(self, num_parameters: float, bytes_per_parameter: float) -> float:
        """Seconds of one optimizer step over local elements, reading and writing so many bytes of each."""
        ...

    @property
    def optimizer_tensor_s(self) -> float:
        """Seconds of an optimizer step for each parameter, in addition to those for its elements."""
        ...

    def interference(self, kind: str, axis: Axis) -> float:
        """Which part of its speed compute loses while such a collective overlaps with it: 0 to 1.

        At 1 nothing is hidden: compute stands still as long as the collective runs.
        """
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan by these prices tells the user about them."""
        ...

    def collective_source(self, kind: str, axis: Axis) -> str:
        """What `collective_s` rests on, in the words of `OpTime.source`."""
        ...

    @property
    def optimizer_source(self) -> str:
        """What `optimizer_s` rests on, in the same words."""
        ...
