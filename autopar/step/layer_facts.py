"""What was worked out of layers under strategies, kept for other plans of the same search.

A search predicts the steps of many plans, which differ in a few layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from autopar.plan import LayerStrategy
from autopar.program import Layer, Program
from autopar.step.local_layer import PlacedLayer, SharedStorage, place

__all__ = ["LayerFacts"]

Fact = TypeVar("Fact")


class LayerFacts:
    """Facts that follow from a layer, its strategy, the number of microbatches and where shared parameters are stored.

    All of one search: of one program, with the same prices, trained in the same way.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._placed: dict[tuple[object, ...], PlacedLayer] = {}
        self._known: dict[tuple[str, int], Any] = {}

    def place(
        self, program: Program, layer: Layer, strategy: LayerStrategy, num_microbatches: int, shared: SharedStorage
    ) -> PlacedLayer:
        """The layer with the strategy applied."""
        key = (layer.name, strategy, num_microbatches, tuple(shared.get(name) for name in layer.state))
        if key not in self._placed:
            self._placed[key] = place(program, layer, strategy, num_microbatches, shared)
        return self._placed[key]

    def find(self, what: str, placed: PlacedLayer, make: Callable[[PlacedLayer], Fact]) -> Fact:
        """What `make` gives for a layer that `place` returned; `what` says which fact that is."""
        key = (what, id(placed))
        if key not in self._known:
            self._known[key] = make(placed)
        return self._known[key]
