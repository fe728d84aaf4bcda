"""Times layers on all ranks at the same time, as they run: on a CPU ranks share memory, caches, and perhaps cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.cost.profile import LayerTime
from autopar.lower.program.single_layer import LoneLayer
from autopar.plan import LayerStrategy
from autopar.planning.timed_layers import LayerTimer, Measure
from autopar.program import Layer

__all__ = ["AskedLayer", "LayerAnswers", "asking_all"]


@dataclass(frozen=True)
class AskedLayer:
    """A layer to get ready; then, as ``index=-1``, to time."""

    index: int
    strategy: LayerStrategy | None = None
    num_microbatches: int = 1


@dataclass
class LayerAnswers:
    """What each rank answers with: its own `timer`, and the layer that is ready."""

    timer: LayerTimer
    _ready: list[LoneLayer] = field(default_factory=list[LoneLayer])

    def __call__(self, asked: AskedLayer) -> LayerTime | None:
        """The layer's time; while it is only to be got ready, one of 0 s, or None if it doesn't run here."""
        if asked.strategy is not None:
            layer = self.timer.program.layers[asked.index]
            lone = self.timer.lower(layer, asked.strategy, asked.num_microbatches)
            self._ready = [] if lone is None else [lone]
            return None if lone is None else LayerTime(0.0, 0.0)
        return self.timer.run(self._ready.pop())


def asking_all(ask: Callable[[AskedLayer], Sequence[LayerTime | None]], timer: LayerTimer) -> Measure:
    """Times a layer on all ranks; the slowest counts.  None if it doesn't run on one of them.

    Args:
        ask: has all ranks answer by their `LayerAnswers`.
        timer: of this rank.
    """
    layers = timer.program.layers

    def measure(layer: Layer, strategy: LayerStrategy, num_microbatches: int) -> LayerTime | None:
        ready = ask(AskedLayer(layers.index(layer), strategy, num_microbatches))
        if None in ready:
            return None
        found = [time for time in ask(AskedLayer(-1)) if time is not None]
        if len(found) < len(ready):
            return None
        forward_s, backward_s = (max(getattr(time, name) for time in found) for name in ("forward_s", "backward_s"))
        return LayerTime(forward_s, backward_s, max(time.spread for time in found), found[0].date)

    return measure
