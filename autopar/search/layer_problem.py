"""The search inside a layer: the cheapest strategy for every pair of boundary policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.plan import LayerCost, LayerStrategy
from autopar.program import Layer, Op, Option, Program
from autopar.search.boundary import Policy
from autopar.search.layer_cost import SharedStorage, TrainingSpec
from autopar.search.prices import Prices

__all__ = ["Allowed", "LayerProblem", "LayerSolutions", "build_problem", "solve_layer", "solve_problem"]

# Whether an op may use an option on the mesh axis of this index.
Allowed = Callable[[Op, int, Option], bool]


@dataclass(frozen=True)
class LayerProblem:
    """One layer on one mesh with one number of microbatches: states and prices, ready for any ZeRO level and recompute.

    Build it once with `build_problem`, solve variants of it with `solve_problem`.
    """

    program: Program
    layer: Layer
    mesh: tuple[int, ...]
    policies: tuple[Policy, ...]
    num_microbatches: int
    time: tuple[str, ...]
    prices: Prices
    training: TrainingSpec
    shared_storage: SharedStorage


@dataclass(frozen=True)
class LayerSolutions:
    """The best strategy for each (policy before the layer, policy behind it), as indices into `policies`.

    `objective_s[i, j]` is the objective: `LayerCost.total_s` plus the weight of memory; infinite where nothing is
    allowed.  `lower_bound_s` equals it where `exact`.
    """

    problem: LayerProblem
    policies: tuple[Policy, ...]
    objective_s: npt.NDArray[np.float64]
    lower_bound_s: npt.NDArray[np.float64]
    exact: bool

    def strategy(self, policy_in: int, policy_out: int) -> LayerStrategy:
        """The best strategy between these policies."""
        raise NotImplementedError

    def cost(self, policy_in: int, policy_out: int) -> LayerCost:
        """`layer_cost` of that strategy."""
        raise NotImplementedError


def build_problem(
    program: Program,
    layer: Layer,
    mesh: tuple[int, ...],
    *,
    prices: Prices,
    training: TrainingSpec,
    num_microbatches: int = 1,
    time: tuple[str, ...] = (),
    allowed: Allowed | None = None,
    shared_storage: SharedStorage | None = None,
) -> LayerProblem:
    """The layer's states and cost tables on `mesh`."""
    raise NotImplementedError


def solve_problem(
    problem: LayerProblem,
    *,
    zero: int = 0,
    shard_axes: tuple[int, ...] = (),
    recompute: str = "none",
    memory_weight_s_per_byte: float = 0.0,
) -> LayerSolutions:
    """Solve one variant: ZeRO level `zero` sharding storage on the mesh axes `shard_axes`, with this recomputation."""
    raise NotImplementedError


def solve_layer(
    program: Program,
    layer: Layer,
    mesh: tuple[int, ...],
    *,
    prices: Prices,
    training: TrainingSpec,
    num_microbatches: int = 1,
    time: tuple[str, ...] = (),
    zero: int = 0,
    shard_axes: tuple[int, ...] = (),
    recompute: str = "none",
    allowed: Allowed | None = None,
    shared_storage: SharedStorage | None = None,
    memory_weight_s_per_byte: float = 0.0,
) -> LayerSolutions:
    """`build_problem`, then `solve_problem`."""
    problem = build_problem(
        program, layer, mesh, prices=prices, training=training, num_microbatches=num_microbatches, time=time,
        allowed=allowed, shared_storage=shared_storage,
    )  # fmt: skip
    return solve_problem(
        problem, zero=zero, shard_axes=shard_axes, recompute=recompute,
        memory_weight_s_per_byte=memory_weight_s_per_byte,
    )  # fmt: skip
