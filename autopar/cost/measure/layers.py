"""Times a whole layer, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch
from torch import Tensor

from autopar.cost.measure.timing import Sample, elapsed_s, median_of
from autopar.cost.profile import LayerTime

__all__ = ["time_layer"]

_ROUNDS = 3, 100
_SHORT_S = 2e-4


def time_layer(
    forward: Callable[[], Sequence[Tensor]],
    backward: Callable[[Sequence[Tensor]], object] | None,
    device: torch.device,
    budget_s: float,
) -> LayerTime:
    """Median seconds of `forward` and of `backward` on what it gives, after one round to warm up.

    On a CPU it is this thread's own time, less what a call of autograd costs by itself.

    Args:
        forward: gives the layer's outputs.
        backward: differentiates them; None: there is nothing to differentiate.
        device: where it runs.
        budget_s: seconds to spend, about; three rounds are run even if that takes longer.
    """
    x = torch.ones(1, device=device).requires_grad_()
    gradient = torch.ones_like(x)
    ahead: list[float] = []
    back: list[float] = []
    entering: list[float] = []
    is_short = False
    stop = time.perf_counter() + budget_s
    while len(ahead) <= _ROUNDS[0] or (time.perf_counter() < stop and len(ahead) < _ROUNDS[1]):
        outputs: list[Sequence[Tensor]] = []
        ahead.append(_seconds(lambda: outputs.append(forward()), device, is_short))  # noqa: B023  (called at once)
        if backward is not None:
            back.append(_seconds(lambda: backward(outputs[0]), device, is_short))  # noqa: B023
            entering.append(_seconds(lambda: torch.autograd.grad(x, x, gradient), device, is_short))
        is_short = ahead[-1] < _SHORT_S
    forward_s = median_of(ahead[1:])
    backward_s = median_of(back[1:]) if back else Sample(0.0, 0.0)
    entry_s = median_of(entering[1:]).seconds if entering and device.type != "cuda" else 0.0
    now = datetime.now(UTC).isoformat(timespec="seconds")
    spread = max(forward_s.spread, backward_s.spread)
    return LayerTime(forward_s.seconds, max(0.0, backward_s.seconds - entry_s), round(spread, 4), now)


def _seconds(run: Callable[[], object], device: torch.device, is_short: bool) -> float:
    """For short runs by the usual clock: asking for the thread's own takes time, and others seldom come between."""
    if device.type == "cuda" or is_short:
        return elapsed_s(run, device)
    started = time.thread_time()
    run()
    return time.thread_time() - started
