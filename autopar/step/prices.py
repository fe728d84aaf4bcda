"""The interface for prices, and the collectives that are priced, such as those of a reshard, forward and backward.

`autopar.cost` implements the interface; so do the tables of tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from autopar.cluster import HostLink, OpTime
from autopar.placement import LOCAL, Axis, Step
from autopar.program import Op, TensorType

__all__ = ["CollectiveCall", "OpTime", "PricedCollective", "Prices", "priced", "reshard_calls", "run_s"]


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
        """How many neighboring ranks share the fast links."""
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

    def peak_flops_per_s(self, dtype: str) -> float:
        """What a device does at most in this dtype, by its data sheet; 0: not known.  Utilization refers to it."""
        ...

    def interference(self, kind: str, axis: Axis) -> float:
        """Which part of its speed compute loses while such a collective overlaps with it: 0 to 1.

        At 1 nothing is hidden: compute stands still as long as the collective runs.
        """
        ...

    @property
    def host(self) -> HostLink:
        """How a device copies to its host's memory, and how much it may put there."""
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


class CollectiveCall(NamedTuple):
    """One collective of one microbatch.

    Args:
        kind: as in `autopar.placement.Step`.
        phase: ``"forward"`` or ``"backward"``.
        axis: on which.
        num_bytes: of the larger side of one device's buffer.
        overlap_parts: it overlaps with one of so many equal parts of its kernel's compute; 0: with nothing.
        pause: it overlaps with this pause of its kernel, if that runs in parts; 0: with none.
    """

    kind: str
    phase: str
    axis: Axis
    num_bytes: float
    overlap_parts: int = 0
    pause: int = 0


def reshard_calls(
    steps: Sequence[Step], num_bytes: float, *, gradient_bytes: float | None = None, has_gradient: bool
) -> tuple[CollectiveCall, ...]:
    """The collectives of a reshard: of the value, then of its gradient, both in the order of `steps`; backward runs its
    own from the last to the first.

    Args:
        steps: from `autopar.placement.reshard`.
        num_bytes: of the whole tensor.
        gradient_bytes: of its whole gradient; by default as many.
        has_gradient: whether there is one.
    """
    back = num_bytes if gradient_bytes is None else gradient_bytes
    kinds = [(step.forward, "forward", step, num_bytes) for step in steps]
    if has_gradient:
        kinds += [(step.backward, "backward", step, back) for step in steps]
    return tuple(
        CollectiveCall(kind, phase, step.axis, whole * step.fraction)
        for kind, phase, step, whole in kinds
        if kind not in LOCAL and whole * step.fraction
    )


@dataclass(frozen=True)
class PricedCollective:
    """One collective that runs `times` per step: of value `value`, on `axis`, a buffer of `num_bytes`.

    `phase` is ``"forward"``, ``"backward"`` or ``"recompute"``; `purpose` is ``"activation"``,
    ``"parameter"`` or ``"kernel"`` (inside a special kernel; `value` is then the op's name).  In a layer's forward it
    runs before the op of index `before` (behind the last one: their number), in its backward the other way round.  Of
    a piece of a larger one, `hidden_s` of its seconds overlap with compute (`autopar.step.costs.piece_seconds`).
    """

    value: str
    kind: str
    axis: Axis
    num_bytes: float
    times: int
    phase: str
    purpose: str
    before: int = field(default=0, compare=False)
    hidden_s: float = field(default=0.0, compare=False)


def run_s(run: PricedCollective, prices: Prices) -> float:
    """Seconds that one run of a collective adds to the compute that it overlaps with.

    Raises:
        MissingPriceError: this kind has no price.
    """
    return prices.collective_s(run.kind, run.axis, run.num_bytes) - run.hidden_s


def priced(call: CollectiveCall, value: str, times: int, purpose: str, before: int = 0) -> PricedCollective:
    """A call that runs so many times a step, of this value."""
    return PricedCollective(value, call.kind, call.axis, call.num_bytes, times, call.phase, purpose, before)
