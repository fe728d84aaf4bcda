"""What a search must be told: prices.  `autopar.cost` provides them; a test gives a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from autopar.placement import Axis
from autopar.program import Op, TensorType

__all__ = ["OpTime", "Prices"]


@dataclass(frozen=True)
class OpTime:
    """Seconds that one op takes on local tensors, forward and backward apart, and where the numbers come from.

    `source` is one of ``"profile"``, ``"measured"``, ``"published"``, ``"roofline"``.
    """

    forward_s: float
    backward_s: float
    source: str


class Prices(Protocol):
    """Prices on one kind of device in one cluster.  Every method is pure; equal arguments give equal prices."""

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
        """Seconds of one collective (`kind` as in `Step.forward`) on `axis`; `num_bytes` as `Step.fraction` counts.

        Raises:
            MissingPriceError: this kind has no price.
        """
        ...

    def optimizer_s(self, num_parameters: float, bytes_per_parameter: float) -> float:
        """Seconds of one optimizer step over `num_parameters` local elements that reads and writes so many bytes each."""
        ...

    def describe_collective(self, kind: str, axis: Axis) -> Mapping[str, float]:
        """`{"latency_s": ..., "bytes_per_s": ...}` of this collective, for explanations."""
        ...
