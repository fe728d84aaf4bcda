"""The search inside a layer: the cheapest strategy for every pair of boundary policies.

Variables: per op a combination of options, one per mesh axis (`op_states`); per value with several readers the layout
of its copy; the policies of the boundaries before and behind the layer.  A value with one reader is copied as that
reader needs it.  The objective is `LayerCost.total_s` of `layer_cost`, written as a sum of tables over one or two
variables:

* op: seconds forward (twice if recomputed) and backward, and the collectives of its special kernel;
* source -> copy, copy -> reader: the collectives of that reshard, forward, backward, recomputed;
* parameter's copy: gathers, gradient reductions, sums of gradients and the optimizer, for the storage that follows;

plus ``memory_weight_s_per_byte * bytes``, where bytes are the parameters' persistent bytes and, for
activations, each saving reader's share of the tensor that it reads (`_saved_shares`): exactly the saved bytes
if all readers find one layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.placement import Layout, tidy
from autopar.plan import LayerStrategy
from autopar.prediction import LayerCost
from autopar.search.boundary import Policy, arrival_layout
from autopar.search.elimination import minimise
from autopar.search.layer_tables import LayerProblem, variant_tables
from autopar.search.problem_building import build_problem
from autopar.search.storage import storage_layout
from autopar.step.layer_cost import placed_cost
from autopar.step.local_layer import PlacedLayer
from autopar.step.op_states import Allowed

__all__ = ["Allowed", "LayerProblem", "LayerSolutions", "build_problem", "solve_problem"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerSolutions:
    """The best strategy for each (policy before the layer, policy behind it), as indices into `policies`.

    `objective_s[i, j]` is the objective: `LayerCost.total_s` plus the weight of memory; infinite where
    nothing is allowed.  `lower_bound_s` equals it where `exact`.
    """

    problem: LayerProblem
    policies: tuple[Policy, ...]
    objective_s: Array
    lower_bound_s: Array
    exact: bool
    zero: int
    shard_axes: tuple[int, ...]
    recompute: str
    assignments: npt.NDArray[np.intp] = field(repr=False)
    _placed: dict[tuple[int, int], PlacedLayer] = field(
        default_factory=dict[tuple[int, int], PlacedLayer], repr=False, compare=False
    )

    def strategy(self, policy_in: int, policy_out: int) -> LayerStrategy:
        """The best strategy between these policies.

        Raises:
            ValueError: nothing is allowed between them.
        """
        placed = self.placed(policy_in, policy_out)
        return LayerStrategy(
            mesh=placed.mesh,
            assignments=tuple(state.factors for state in placed.states),
            time=self.problem.time,
            inputs=placed.arrivals,
            outputs=placed.departures,
            copies=tuple(placed.copies.items()),
            storage=placed.storage,
            zero=self.zero,
            recompute=self.recompute,
        )

    def cost(self, policy_in: int, policy_out: int) -> LayerCost:
        """`layer_cost` of that strategy.

        Raises:
            ValueError: nothing is allowed between these policies.
        """
        return placed_cost(self.placed(policy_in, policy_out), self.problem.prices, self.problem.training)

    def placed(self, policy_in: int, policy_out: int) -> PlacedLayer:
        """The layer with that strategy applied.

        Raises:
            ValueError: nothing is allowed between these policies.
        """
        where = (policy_in, policy_out)
        if not np.isfinite(self.objective_s[where]):
            raise ValueError(f"layer {self.problem.layer.name} has no allowed strategy on mesh {self.problem.mesh}")
        if where not in self._placed:
            self._placed[where] = _read_assignment(self, *where)
        return self._placed[where]


def _read_assignment(solutions: LayerSolutions, policy_in: int, policy_out: int) -> PlacedLayer:
    """The placed layer of one row of `assignments`."""
    problem = solutions.problem
    row: list[int] = solutions.assignments[policy_in, policy_out].tolist()
    states = tuple(each[row[index]] for index, each in enumerate(problem.states))
    before, behind = problem.policies[policy_in], problem.policies[policy_out]
    arrivals = tuple(_boundary(problem, name, before) for name in problem.layer.inputs)
    departures: list[Layout] = []
    copies: dict[str, Layout] = {}
    for name, flow in problem.flows.items():
        if not flow.num_readers:
            continue
        if name in problem.copy_variables:
            variable = problem.copy_variables[name]
            copies[name] = problem.copy_domains[name][row[variable]]
        elif flow.num_readers == 1 and flow.readers:
            op, mention = flow.readers[0]
            # The reader of a microbatch takes it from where the value is made: see `TimeView.taken`.
            is_made_whole = flow.source == "op" and problem.view.taken(flow)
            copies[name] = states[flow.producer].results[flow.result] if is_made_whole else states[op].operands[mention]
        elif flow.num_readers == 1 and name in problem.free_outputs:
            copies[name] = tidy(states[flow.producer].results[flow.result])
        elif flow.num_readers == 1:
            copies[name] = _boundary(problem, name, behind)
        else:
            copies[name] = problem.whole
    for name in problem.layer.outputs:
        free = name in problem.free_outputs
        departures.append(tidy(copies[name]) if free else _boundary(problem, name, behind))
    storage = tuple(
        storage_layout(copies[name], problem.flows[name].value.type, problem.mesh, solutions.shard_axes)
        if problem.flows[name].is_parameter and name in copies
        else problem.whole
        for name in problem.layer.held
    )
    return PlacedLayer(
        problem.program, problem.layer, problem.mesh, problem.flows, problem.view, states, copies, arrivals,
        tuple(departures), storage, solutions.zero, solutions.recompute, problem.shared_storage,
    )  # fmt: skip


def _boundary(problem: LayerProblem, name: str, policy: Policy) -> Layout:
    tensor = problem.view.value_type(problem.flows[name])
    return arrival_layout(problem.program, name, policy, problem.mesh, tensor)


def solve_problem(
    problem: LayerProblem,
    *,
    zero: int = 0,
    shard_axes: tuple[int, ...] = (),
    recompute: str = "none",
    memory_weight_s_per_byte: float = 0.0,
    in_flight: int = 1,
    hides: bool = False,
) -> LayerSolutions:
    """Solve one variant: ZeRO level `zero` sharding storage on the mesh axes `shard_axes`, with this
    recomputation, and so many microbatches in flight.  With `hides`, compute hides the collectives of parameters.
    """
    count = len(problem.policies)
    sizes = problem.sizes
    before, behind = len(sizes) - 2, len(sizes) - 1
    if min(sizes) == 0:
        nothing = np.full((count, count), np.inf)
        rows = np.zeros((count, count, len(sizes)), np.intp)
        return LayerSolutions(problem, problem.policies, nothing, nothing, True, zero, shard_axes, recompute, rows)
    tables = variant_tables(problem, zero, shard_axes, recompute, memory_weight_s_per_byte, in_flight, hides=hides)
    found = minimise(sizes, tables, keep=(before, behind))
    return LayerSolutions(
        problem, problem.policies, found.values, found.lower_bounds, found.exact, zero, shard_axes, recompute,
        found.assignments,
    )  # fmt: skip
