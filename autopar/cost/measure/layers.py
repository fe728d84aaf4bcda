"""Times a whole layer, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch
from torch import Tensor

from autopar.cost.measure.surroundings import Entry, backward_node_s
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
    """Median seconds of the forward and of the backward of each layer, which run as in a step: all forward, one after
    the other, then backward from the last to the first.

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
            timer.run_forward()
        for timer in reversed(timers):
            timer.run_backward()
        num_rounds += 1
    return [timer.found() for timer in timers]


class _Timer:
    """Times one layer again and again."""

    def __init__(self, forward: Forward, backward: Backward | None, device: torch.device) -> None:
        self.forward, self.backward, self.device = forward, backward, device
        self.entry = Entry(device)
        self.outputs: Sequence[Tensor] = ()
        self.ahead: list[float] = []
        self.back: list[float] = []
        self.entering: list[float] = []

    def run_forward(self) -> None:
        """Forward, once; keeps the outputs."""
        outputs: list[Sequence[Tensor]] = []
        self.ahead.append(_seconds(lambda: outputs.append(self.forward()), self.device, self._is_short))
        self.outputs = outputs[0]

    def run_backward(self) -> None:
        """Backward of what `run_forward` kept.

        In a step autograd is entered once, and its code is at hand when a layer's turn comes: so it is entered before,
        and what that takes by then is subtracted.
        """
        backward, outputs, self.outputs = self.backward, self.outputs, ()
        if backward is None:
            return
        self.entry.enter()
        self.entering.append(_seconds(self.entry.enter, self.device, self._is_short))
        self.back.append(_seconds(lambda: backward(outputs), self.device, self._is_short))

    @property
    def _is_short(self) -> bool:
        return bool(self.ahead) and self.ahead[-1] < _SHORT_S

    def found(self) -> LayerTime:
        """The medians."""
        forward_s = median_of(self.ahead[1:])
        backward_s = median_of(self.back[1:]) if self.back else Sample(0.0, 0.0)
        entry_s = 0.0
        if self.entering and self.device.type != "cuda":
            entry_s = max(0.0, median_of(self.entering[1:]).seconds - backward_node_s())
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
