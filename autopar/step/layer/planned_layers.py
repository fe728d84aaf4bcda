"""A plan's decisions applied to the program: each layer under its strategy, and the values between layers.

A search predicts the steps of many plans, which differ in a few layers: `LayerFacts` keeps what was worked out of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from autopar.plan import Decisions, LayerStrategy
from autopar.program import Layer, Program
from autopar.step.activation_policies import renamed_policy
from autopar.step.layer.boundary_values import BoundaryValue, boundary_values
from autopar.step.layer.local_layer import PlacedLayer, SharedStorage, place

__all__ = ["LayerFacts", "PlannedLayers", "own_strategy"]


Fact = TypeVar("Fact")


class LayerFacts:
    """Facts that follow from a layer, its strategy, the number of microbatches and where shared parameters are stored,
    and what crosses between layers.

    All of one search: of one program, with the same prices, trained in the same way.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._placed: dict[tuple[object, ...], PlacedLayer] = {}
        self._known: dict[tuple[str, int], Any] = {}
        self._crossings: dict[tuple[object, ...], tuple[BoundaryValue, ...]] = {}

    def place(
        self, program: Program, layer: Layer, strategy: LayerStrategy, num_microbatches: int, shared: SharedStorage
    ) -> PlacedLayer:
        """The layer with the strategy applied."""
        key = (layer.name, strategy, num_microbatches, tuple(shared.get(name) for name in layer.state))
        if key not in self._placed:
            self._placed[key] = place(program, layer, strategy, num_microbatches, shared)
        return self._placed[key]

    def crossings(
        self, program: Program, time: dict[int, tuple[str, ...]], num_microbatches: int
    ) -> tuple[BoundaryValue, ...]:
        """`boundary_values` of these arguments."""
        key = (num_microbatches, *time.items())
        if key not in self._crossings:
            self._crossings[key] = boundary_values(program, time, num_microbatches)
        return self._crossings[key]

    def find(self, what: str, placed: PlacedLayer, make: Callable[[PlacedLayer], Fact]) -> Fact:
        """What `make` gives for a layer that `place` returned; `what` says which fact that is."""
        key = (what, id(placed))
        if key not in self._known:
            self._known[key] = make(placed)
        return self._known[key]


@dataclass(eq=False)
class PlannedLayers:
    """The layers of a program as a plan decides them.

    `facts` are those of a search, where many plans share most of their layers.
    """

    program: Program
    decisions: Decisions
    facts: LayerFacts = field(default_factory=LayerFacts)

    @cached_property
    def strategies(self) -> tuple[LayerStrategy, ...]:
        """Per layer; values in them are those of the first layer of the kind."""
        return self.decisions.layer_strategies

    @cached_property
    def shared(self) -> SharedStorage:
        """The mesh and layout of each parameter in shared storage."""
        values = {name: value for value, name in self.program.parameters.items()}
        mesh = self.decisions.shared_mesh
        return {values[name]: (mesh, layout) for name, layout in self.decisions.shared_storage}

    @cached_property
    def time(self) -> dict[int, tuple[str, ...]]:
        """Per kind of layers, the factor of each op that microbatches split."""
        return {layer.kind: each.time for layer, each in zip(self.program.layers, self.strategies, strict=True)}

    @cached_property
    def crossings(self) -> tuple[BoundaryValue, ...]:
        """What crosses from layer to layer."""
        return self.facts.crossings(self.program, self.time, self.decisions.num_microbatches)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Per layer, the device group that runs it."""
        stages = zip(self.decisions.ranges, self.decisions.groups, strict=True)
        return tuple(group for layers, group in stages for _ in layers)

    @cached_property
    def placed(self) -> tuple[PlacedLayer, ...]:
        """Per layer, one like it with its strategy applied; layers that run the same have the same one."""
        known: dict[tuple[object, ...], PlacedLayer] = {}
        placed: list[PlacedLayer] = []
        for layer, planned in zip(self.program.layers, self.decisions.layers, strict=True):
            key = (layer.kind, planned.strategy, *(self.shared.get(name) for name in layer.state))
            if key not in known:
                own = own_strategy(self.program, layer, self.decisions.strategies[planned.strategy])
                count = self.decisions.num_microbatches
                known[key] = self.facts.place(self.program, layer, own, count, self.shared)
            placed.append(known[key])
        return tuple(placed)

    def names(self, index: int) -> dict[str, str]:
        """From the values and ops of the layer in `placed` to those of the layer of this index."""
        return _renamed(self.placed[index].layer, self.program.layers[index])

    def find(self, what: str, make: Callable[[PlacedLayer], Fact]) -> list[Fact]:
        """What `make` gives, for every layer; `what` says which fact that is."""
        return [self.facts.find(what, placed, make) for placed in self.placed]

    def first_readers(self, name: str) -> dict[int, int]:
        """Device group -> its first layer that reads the parameter `name`."""
        readers: dict[int, int] = {}
        for index, layer in enumerate(self.program.layers):
            if name in layer.state:
                readers.setdefault(self.group_of[index], index)
        return readers


def own_strategy(program: Program, layer: Layer, strategy: LayerStrategy) -> LayerStrategy:
    """A plan's strategy, which names values of the first layer of its kind, with the names of `layer`."""
    names = _renamed(program.kinds[layer.kind], layer)
    copies = tuple((names.get(name, name), layout) for name, layout in strategy.copies)
    pieces = tuple((names.get(name, name), count) for name, count in strategy.pieces)
    return replace(strategy, copies=copies, pieces=pieces, recompute=renamed_policy(strategy.recompute, names))


def _renamed(layer: Layer, other: Layer) -> dict[str, str]:
    """From the values and ops of a layer to those of another one of its kind."""
    return {} if layer is other else dict(zip(_names(layer), _names(other), strict=True))


def _names(layer: Layer) -> tuple[str, ...]:
    made = (name for op in layer.ops for name in (op.name, *op.results))
    return (*layer.inputs, *layer.state, *made)
