"""The collectives that a reshard calls, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.placement import LOCAL, Axis, Step

__all__ = ["CollectiveCall", "reshard_calls"]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective of one microbatch.

    Args:
        kind: as in `autopar.placement.Step`.
        phase: ``"forward"`` or ``"backward"``.
        axis: on which.
        num_bytes: of the larger side of one device's buffer.
    """

    kind: str
    phase: str
    axis: Axis
    num_bytes: float


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
    calls = [CollectiveCall(step.forward, "forward", step.axis, num_bytes * step.fraction) for step in steps]
    if has_gradient:
        calls += [CollectiveCall(step.backward, "backward", step.axis, back * step.fraction) for step in steps]
    return tuple(call for call in calls if call.kind not in LOCAL and call.num_bytes)
