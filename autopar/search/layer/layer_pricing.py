"""What is worked out about one layer once, whatever constraints demand of its candidates.

Demands say which options, ZeRO levels and ways to keep activations candidates may have.  What an option costs, or a
strategy, does not depend on them, so searches under other constraints look it up here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import cached_property
from typing import TypeVar

from autopar.placement import Layout
from autopar.plan import LayerStrategy
from autopar.plan.prediction import LayerCost
from autopar.program import Layer
from autopar.search.layer.layer_problem import LayerProblem, StepSettings
from autopar.search.layer.layer_solutions import LayerSolutions, SolvedVariant, solve_problem
from autopar.search.settings.constraints import LayerDemands
from autopar.search.settings.degree_roles import AxisRoles, allowed_options
from autopar.search.settings.space_splits import space_on_mesh
from autopar.step.costs.layer_cost import computing_runs, running_costs, storage_cost, stored_collectives
from autopar.step.costs.overlap_estimate import ComputingRuns, ParameterTransfer, parameter_transfers
from autopar.step.costs.piece_seconds import best_pieces, demanded_pieces
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.training import own_training

__all__ = ["LayerPricing", "Pieces", "StoredVariant", "StrategyCosts"]

_Made = TypeVar("_Made")

Pieces = tuple[tuple[str, int], ...]
"""Collectives that run in pieces, by the value that they move, and in how many."""


@dataclass(frozen=True)
class StoredVariant:
    """One way to store a layer's parameters, and the part of the cost that depends on it."""

    zero: int
    storage: tuple[Layout, ...]
    cost: LayerCost
    transfers: tuple[ParameterTransfer, ParameterTransfer]


@dataclass(eq=False)
class LayerPricing:
    """The problems of one layer, by mesh and by which options are allowed, and the costs of its strategies."""

    settings: StepSettings
    layer: Layer
    _problems: dict[tuple[object, ...], LayerProblem] = field(
        default_factory=dict[tuple[object, ...], LayerProblem], repr=False
    )
    _solutions: dict[tuple[int, SolvedVariant], LayerSolutions] = field(
        default_factory=dict[tuple[int, SolvedVariant], LayerSolutions], repr=False
    )
    _costs: dict[tuple[object, ...], StrategyCosts] = field(
        default_factory=dict[tuple[object, ...], "StrategyCosts"], repr=False
    )
    _stored: dict[tuple[object, ...], StoredVariant] = field(
        default_factory=dict[tuple[object, ...], StoredVariant], repr=False
    )

    def problem(
        self, mesh: tuple[int, ...], roles: AxisRoles, demands: LayerDemands, whole: frozenset[str]
    ) -> LayerProblem:
        """The layer on this mesh with the options that the demands leave; `whole` as in `allowed_options`."""
        key = (mesh, roles, demands.degrees, demands.whole, demands.space)
        if key not in self._problems:
            program, layer = self.settings.program, self.layer
            own = changed(demands, space=space_on_mesh(program, layer, mesh, demands))
            allowed = allowed_options(program, layer, mesh, own, roles, whole)
            self._problems[key] = LayerProblem(self.settings, layer, mesh, allowed, own.space)
        return self._problems[key]

    def solved(self, problem: LayerProblem, variant: SolvedVariant) -> LayerSolutions:
        """The solutions of a problem that this gave."""
        key = (id(problem), variant)
        if key not in self._solutions:
            self._solutions[key] = solve_problem(problem, variant)
        return self._solutions[key]

    def costs(self, placed: PlacedLayer, strategy: LayerStrategy) -> StrategyCosts:
        """What runs under a strategy, which `placed` has applied; its storage and recomputation do not matter."""
        key = (strategy.mesh, strategy.assignments, strategy.inputs, strategy.outputs, strategy.copies)
        if key not in self._costs:
            self._costs[key] = StrategyCosts(self.settings, placed)
        return self._costs[key]

    def stored(self, base: PlacedLayer, zero: int, storage: tuple[Layout, ...]) -> StoredVariant:
        """The layer's parameters stored so; what it costs depends on that, the mesh and their copies alone."""
        key = (base.mesh, *(base.copies.get(name) for name in base.layer.state), zero, storage)
        if key not in self._stored:
            settings, placed = self.settings, changed(base, storage=storage, zero=zero)
            training = own_training(settings.program, base.layer, settings.training)
            runs = tuple(stored_collectives(placed, training))
            cost = storage_cost(placed, runs, settings.prices, settings.training)
            transfers = parameter_transfers(placed, runs, settings.prices, training)
            self._stored[key] = StoredVariant(zero, storage, cost, transfers)
        return self._stored[key]


@dataclass(eq=False)
class StrategyCosts:
    """What a layer costs under one strategy, storage apart, for each way to keep activations that is asked for."""

    settings: StepSettings
    placed: PlacedLayer
    _best_pieces: dict[str, Pieces] = field(default_factory=dict[str, Pieces])
    _costs: dict[Pieces, dict[str, LayerCost]] = field(default_factory=dict[Pieces, dict[str, LayerCost]])

    @cached_property
    def runs(self) -> tuple[ComputingRuns, ComputingRuns]:
        """What it computes between collectives, forward and backward."""
        return computing_runs(self.placed, self.settings.prices, self.settings.training)

    def pieces(self, hows: Sequence[str], demanded: int = 0) -> dict[str, Pieces]:
        """Collectives in pieces for each way: those that are faster so, or all that can be cut in so many."""
        if demanded:
            return {how: demanded_pieces(self.placed, demanded, how) for how in hows}
        prices, training = self.settings.prices, self.settings.training
        return _looked_up(self._best_pieces, hows, lambda missing: best_pieces(self.placed, missing, prices, training))

    def running(self, pieces: Pieces, hows: Sequence[str]) -> dict[str, LayerCost]:
        """The cost of each way with these collectives in pieces."""
        placed = changed(self.placed, pieces=pieces) if pieces else self.placed
        prices, training, known = self.settings.prices, self.settings.training, self._costs.setdefault(pieces, {})
        return _looked_up(known, hows, lambda missing: running_costs(placed, missing, prices, training))


def _looked_up(
    known: dict[str, _Made], keys: Sequence[str], make: Callable[[Sequence[str]], dict[str, _Made]]
) -> dict[str, _Made]:
    missing = [key for key in keys if key not in known]
    if missing:
        known.update(make(missing))
    return {key: known[key] for key in keys}
