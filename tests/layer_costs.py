"""The cost and the collectives of a layer, given a strategy."""

from __future__ import annotations

from autopar.plan import LayerStrategy
from autopar.plan.prediction import LayerCost
from autopar.program import Layer, Program
from autopar.step.costs.layer_cost import placed_collectives, placed_cost
from autopar.step.layer.local_layer import SharedStorage, place
from autopar.step.prices import PricedCollective, Prices
from autopar.step.training import TrainingSpec


def layer_collectives(
    program: Program, layer: Layer, strategy: LayerStrategy, count: int = 1, training: TrainingSpec | None = None
) -> tuple[PricedCollective, ...]:
    return placed_collectives(place(program, layer, strategy, count), training or TrainingSpec())


def layer_cost(
    program: Program, layer: Layer, strategy: LayerStrategy, count: int, prices: Prices, training: TrainingSpec,
    shared: SharedStorage | None = None,
) -> LayerCost:  # fmt: skip
    return placed_cost(place(program, layer, strategy, count, shared), prices, training)
