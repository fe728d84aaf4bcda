"""Times a whole layer, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch
from torch import Tensor

from autopar.cost.measure.timing import busy_s, median_of
from autopar.cost.profile import LayerTime

__all__ = ["time_layer"]

_ROUNDS = 3, 100  # the minimum for a median with quartiles, and a bound for short layers; one more warms up


def time_layer(
    forward: Callable[[], Sequence[Tensor]],
    backward: Callable[[Sequence[Tensor]], object] | None,
    device: torch.device,
    budget_s: float,
) -> LayerTime:
    """Measure the median seconds of the forward and of the backward of a layer, which alternate.

    Args:
        forward: returns the layer's outputs.
        backward: differentiates them; None if there is nothing to differentiate.
        device: the device on which it runs.
        budget_s: approximate seconds to spend; three rounds run even if they take longer.
    """
    forward_times_s: list[float] = []
    backward_times_s: list[float] = []
    outputs: Sequence[Tensor] = ()

    def run_forward() -> None:
        nonlocal outputs
        outputs = forward()

    stop = time.perf_counter() + budget_s
    while len(forward_times_s) <= _ROUNDS[0] or (time.perf_counter() < stop and len(forward_times_s) <= _ROUNDS[1]):
        forward_times_s.append(busy_s(run_forward, device))
        backward_times_s.append(busy_s(lambda: backward(outputs), device) if backward else 0.0)
    forward_s, backward_s = median_of(forward_times_s[1:]), median_of(backward_times_s[1:])
    spread = round(max(forward_s.spread, backward_s.spread if backward else 0.0), 4)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return LayerTime(forward_s.seconds, backward_s.seconds if backward else 0.0, spread, now)
