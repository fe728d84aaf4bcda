"""Times a whole layer, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch
from torch import Tensor

from autopar.cost.measure.timing import Sample, elapsed_s, median_of
from autopar.cost.profile import LayerTime

__all__ = ["time_in_turn", "time_layer"]

Forward = Callable[[], Sequence[Tensor]]
"""Gives the layer's outputs."""
Backward = Callable[[Sequence[Tensor]], object]
"""Differentiates them."""

_ROUNDS = 3, 100
_SHORT_S = 2e-4


def time_layer(forward: Forward, backward: Backward | None, device: torch.device, budget_s: float) -> LayerTime:
    """`time_in_turn` of a single layer."""
    return time_in_turn([(forward, backward)], device, budget_s)[0]


def time_in_turn(
    layers: Sequence[tuple[Forward, Backward | None]], device: torch.device, budget_s: float
) -> list[LayerTime]:
    """Median seconds of the forward and of the backward of each layer, which run one after the other as in a step.

    On a CPU it is this thread's own time, less what a call of autograd costs by itself.  The first round doesn't count.

    Args:
        layers: each with its backward; None where there is nothing to differentiate.
        device: where they run.
        budget_s: seconds to spend, about; three rounds are run even if that takes longer.
    """
    timers = [_Timer(forward, backward, device) for forward, backward in layers]
    stop = time.perf_counter() + budget_s
    num_rounds = 0
    while num_rounds <= _ROUNDS[0] or (time.perf_counter() < stop and num_rounds < _ROUNDS[1]):
        for timer in timers:
            timer.run()
        num_rounds += 1
    return [timer.found() for timer in timers]


class _Timer:
    """Times one layer again and again."""

    def __init__(self, forward: Forward, backward: Backward | None, device: torch.device) -> None:
        self.forward, self.backward, self.device = forward, backward, device
        self.leaf = torch.ones(1, device=device).requires_grad_()
        self.gradient = torch.ones_like(self.leaf)
        self.ahead: list[float] = []
        self.back: list[float] = []
        self.entering: list[float] = []

    def run(self) -> None:
        """Forward and backward, once each."""
        outputs: list[Sequence[Tensor]] = []
        is_short = bool(self.ahead) and self.ahead[-1] < _SHORT_S
        self.ahead.append(_seconds(lambda: outputs.append(self.forward()), self.device, is_short))
        backward = self.backward
        if backward is not None:
            self.back.append(_seconds(lambda: backward(outputs[0]), self.device, is_short))
            self.entering.append(
                _seconds(lambda: torch.autograd.grad(self.leaf, self.leaf, self.gradient), self.device, is_short)
            )

    def found(self) -> LayerTime:
        """The medians."""
        forward_s = median_of(self.ahead[1:])
        backward_s = median_of(self.back[1:]) if self.back else Sample(0.0, 0.0)
        entry_s = median_of(self.entering[1:]).seconds if self.entering and self.device.type != "cuda" else 0.0
        now = datetime.now(UTC).isoformat(timespec="seconds")
        spread = round(max(forward_s.spread, backward_s.spread), 4)
        return LayerTime(forward_s.seconds, max(0.0, backward_s.seconds - entry_s), spread, now)


def _seconds(run: Callable[[], object], device: torch.device, is_short: bool) -> float:
    """For short runs by the usual clock: asking for the thread's own takes time, and others seldom come between."""
    if device.type == "cuda" or is_short:
        return elapsed_s(run, device)
    started = time.thread_time()
    run()
    return time.thread_time() - started
