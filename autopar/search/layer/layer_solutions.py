"""The cheapest strategy of a layer for every pair of boundary policies: one `LayerProblem`, solved for a ZeRO level.

The objective is `LayerCost.total_s` of `layer_cost`, written as a sum of tables over one or two variables::

    seconds of ops (twice if recomputed), kernels and reshards
    + seconds to gather, reduce and update parameters
    + memory_weight_s_per_byte * bytes

where bytes are the parameters' persistent bytes and, for activations, each saving reader's share of the tensor that it
reads (`_saved_shares`): exactly the saved bytes if all readers find one layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.placement import LOCAL, Axis, Layout, local_shape, tidy
from autopar.plan import LayerStrategy
from autopar.plan.prediction import LayerCost
from autopar.program import Op
from autopar.search.layer.layer_problem import LayerProblem, ParameterCopy
from autopar.search.layer.layout_choices import storage_layout
from autopar.search.layer.variable_elimination import Table, minimize
from autopar.step.activation_policies import ActivationPolicy, activation_policy
from autopar.step.costs.layer_cost import is_layer_rerun, is_rerun, parameter_times, placed_cost
from autopar.step.costs.optimizer_costs import host_copy_s, parameter_step_s, updates
from autopar.step.costs.parameter_costs import gradient_sum_s, parameter_bytes
from autopar.step.layer.local_layer import PlacedLayer, stored_steps
from autopar.step.layer.op_states import OpState
from autopar.step.layer.value_flows import is_alias

__all__ = ["LayerSolutions", "SolvedVariant", "solve_problem"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SolvedVariant:
    """What a problem is solved for.

    Args:
        zero: the ZeRO level.
        shard_axes: the mesh axes on which ZeRO shards storage.
        recompute: how to recompute.
        memory_weight_s_per_byte: the price of memory.
        overlaps: whether collectives of parameters overlap with compute, and then cost only what they slow it down.
    """

    zero: int = 0
    shard_axes: tuple[int, ...] = ()
    recompute: str = "none"
    memory_weight_s_per_byte: float = 0.0
    overlaps: bool = False


@dataclass(frozen=True, eq=False)
class LayerSolutions:
    """The best strategy for each (policy before the layer, policy behind it), as indices into the problem's policies.

    `objective_s[i, j]` is the objective, infinite where nothing is allowed.  `lower_bound_s` equals it where `exact`.
    """

    problem: LayerProblem
    variant: SolvedVariant
    objective_s: Array
    lower_bound_s: Array
    exact: bool
    assignments: npt.NDArray[np.intp] = field(repr=False)
    _placed: dict[tuple[int, int], PlacedLayer] = field(default_factory=dict[tuple[int, int], PlacedLayer], repr=False)

    def strategy(self, policy_in: int, policy_out: int) -> LayerStrategy:
        """The best strategy between these policies.

        Raises:
            ValueError: nothing is allowed between them.
        """
        placed = self.placed(policy_in, policy_out)
        return LayerStrategy(
            mesh=placed.mesh,
            assignments=tuple(state.factors for state in placed.states),
            time=self.problem.settings.time[self.problem.layer.kind],
            inputs=placed.arrivals,
            outputs=placed.departures,
            copies=tuple(placed.copies.items()),
            storage=placed.storage,
            zero=placed.zero,
            recompute=placed.recompute,
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
        pair = (policy_in, policy_out)
        if not np.isfinite(self.objective_s[pair]):
            raise ValueError(f"layer {self.problem.layer.name} has no allowed strategy on mesh {self.problem.mesh}")
        if pair not in self._placed:
            self._placed[pair] = _read_assignment(self, *pair)
        return self._placed[pair]


def solve_problem(problem: LayerProblem, variant: SolvedVariant | None = None) -> LayerSolutions:
    """Solve `problem` for one variant, by variable elimination."""
    variant = variant or SolvedVariant()
    if min(problem.sizes) == 0:
        count = len(problem.policies)
        nothing, rows = np.full((count, count), np.inf), np.zeros((count, count, len(problem.sizes)), np.intp)
        return LayerSolutions(problem, variant, nothing, nothing, True, rows)
    best = minimize(problem.sizes, _objective(problem, variant), keep=problem.policy_variables)
    return LayerSolutions(problem, variant, best.values, best.lower_bounds, best.exact, best.assignments)


def _objective(problem: LayerProblem, variant: SolvedVariant) -> list[Table]:
    """The tables whose sum is the objective."""
    tables: list[Table] = []
    training, recompute = problem.training, variant.recompute
    again = 2.0 if is_layer_rerun(recompute, training) else 1.0
    for index, (op, each) in enumerate(zip(problem.layer.ops, problem.op_tables, strict=True)):
        states = problem.states[index]
        times = {k: 2.0 if is_rerun(op, s, recompute, training) else 1.0 for k, s in _by_kernel(states).items()}
        runs = np.array([times[state.has_kernel] for state in states])
        kernels = again * each.kernel_forward_s + each.kernel_backward_s
        tables.append(((index,), runs * each.forward_s + each.backward_s + kernels))
    tables += [(each.scope, again * each.forward_s + each.backward_s) for each in problem.reshards]
    tables += [((each.variable,), _parameter_table(problem, each, variant)) for each in problem.parameters]
    weight = variant.memory_weight_s_per_byte * problem.settings.in_flight
    if weight and training.is_training:
        tables += [(scope, weight * num_bytes) for scope, num_bytes in _saved_shares(problem, recompute)]
    return tables


def _by_kernel(states: Iterable[OpState]) -> dict[bool, OpState]:
    """A state with a special kernel, and one without, of those that there are."""
    return {state.has_kernel: state for state in states}


def _parameter_table(problem: LayerProblem, parameter: ParameterCopy, variant: SolvedVariant) -> Array:
    """Seconds per step of gathering, reducing and updating a parameter, by the state that fixes its copy."""
    known = {layout: _parameter_seconds(problem, parameter, layout, variant) for layout in set(parameter.layouts)}
    return np.array([known[layout] for layout in parameter.layouts])


def _parameter_seconds(problem: LayerProblem, parameter: ParameterCopy, copy: Layout, variant: SolvedVariant) -> float:
    value, training, prices, zero = parameter.flow.value, problem.training, problem.prices, variant.zero
    tensor, shared, count = value.type, problem.settings.shared, problem.settings.num_microbatches
    trains = updates(parameter.flow, training)
    stored = storage_layout(copy, tensor, problem.mesh, variant.shard_axes)
    gathers, reduces = parameter_times(zero, count, training)
    gradient_bytes = tensor.num_elements * training.sum_itemsize(tensor.dtype)

    def price(kind: str, axis: Axis, num_bytes: float, times: int) -> float:
        if kind in LOCAL or not times or not num_bytes:
            return 0.0
        taken = prices.interference(kind, axis) if variant.overlaps else 1.0
        return times * taken * prices.collective_s(kind, axis, num_bytes)

    seconds = 0.0
    steps = stored_steps(value.name, stored, copy, problem.mesh, shared)
    for step in steps:
        seconds += price(step.forward, step.axis, tensor.num_bytes * step.fraction, gathers)
        seconds += price(step.backward, step.axis, gradient_bytes * step.fraction, reduces if trains else 0)
    if training.host_storage:
        mesh, own_layout = shared.get(value.name, (problem.mesh, stored))
        brought = math.prod(local_shape(tensor.shape, own_layout, mesh)) * training.storage_itemsize(tensor.dtype)
        taken = prices.host.taken if variant.overlaps else 1.0
        seconds += gathers * taken * host_copy_s(brought, prices, training)
    if trains:
        storage = shared.get(value.name, (problem.mesh, stored))
        seconds += gradient_sum_s(value, (problem.mesh, copy), storage, zero, count, prices, training)
    if value.name in shared:
        return seconds
    elements, copied = (math.prod(local_shape(tensor.shape, layout, problem.mesh)) for layout in (stored, copy))
    counted = parameter_bytes(tensor.dtype, elements, copied, steps, trains=trains, training=training).counted_at(zero)
    if trains:
        rate = problem.optimizer_rates[tensor.dtype]
        seconds += parameter_step_s(value, problem.mesh, stored, rate, prices, training)
    return seconds + variant.memory_weight_s_per_byte * counted.static_bytes


def _saved_shares(problem: LayerProblem, recompute: str) -> Iterator[Table]:
    """Saved bytes as a sum over variables: a tensor's bytes are shared equally by the mentions that save it."""
    policy = activation_policy(recompute)
    if policy.keeps_inputs_only:
        for name in problem.layer.inputs:
            if name not in problem.program.inputs:
                tensor = problem.view.value_type(problem.flows[name])
                layouts = problem.boundary_layouts[name]
                local = [math.prod(local_shape(tensor.shape, layout, problem.mesh)) for layout in layouts]
                itemsize = tensor.num_bytes / max(1, tensor.num_elements)
                yield problem.policy_variables[:1], itemsize * np.array(local, dtype=float)
        return
    savers: dict[str, list[tuple[int, int]]] = {}
    for index, op in enumerate(problem.layer.ops):
        for position, name in _kept(op, policy):
            root = _viewed(problem, name)
            if problem.flows[root].source != "state":
                savers.setdefault(root, []).append((index, position))
    for mentions in savers.values():
        for index, position in mentions:
            bytes_by_state = [(*s.operand_types, *s.result_types)[position].num_bytes for s in problem.states[index]]
            yield (index,), np.array(bytes_by_state, dtype=float) / len(mentions)


def _kept(op: Op, policy: ActivationPolicy) -> Iterator[tuple[int, str]]:
    """The tensors that one op keeps, as indices into operands, then results."""
    names = (*op.operands, *op.results)
    results = () if policy.is_rerun(op) else range(len(op.operands), len(names))
    positions = op.saves if policy.reruns is None else results
    return ((position, names[position]) for position in positions)


def _viewed(problem: LayerProblem, name: str) -> str:
    """The value whose memory this one shares."""
    flow = problem.flows[name]
    while flow.source == "op" and is_alias(problem.layer, problem.flows, problem.layer.ops[flow.producer]):
        flow = problem.flows[problem.layer.ops[flow.producer].operands[0]]
    return flow.value.name


def _read_assignment(solutions: LayerSolutions, policy_in: int, policy_out: int) -> PlacedLayer:
    """The placed layer of one row of `assignments`."""
    problem, variant = solutions.problem, solutions.variant
    row: list[int] = solutions.assignments[policy_in, policy_out].tolist()
    states = tuple(each[row[index]] for index, each in enumerate(problem.states))
    copies: dict[str, Layout] = {}
    for name, flow in problem.flows.items():
        if not flow.num_readers:
            continue
        if name in problem.copy_variables:
            copies[name] = problem.copy_domains[name][row[problem.copy_variables[name]]]
        elif flow.num_readers > 1:
            copies[name] = problem.whole
        elif flow.readers:
            op, mention = flow.readers[0]
            # The reader of a microbatch takes it from where the value is made: see `TimeView.taken`.
            is_made_whole = flow.source == "op" and problem.view.taken(flow)
            copies[name] = states[flow.producer].results[flow.result] if is_made_whole else states[op].operands[mention]
        elif name in problem.free_outputs:
            copies[name] = tidy(states[flow.producer].results[flow.result])
        else:
            copies[name] = problem.boundary_layouts[name][policy_out]
    carried = problem.program.carried & copies.keys() & {*problem.program.inputs}
    arrivals = tuple(
        copies[name] if name in carried else problem.boundary_layouts[name][policy_in] for name in problem.layer.inputs
    )
    departures = tuple(
        tidy(copies[name]) if name in problem.free_outputs else problem.boundary_layouts[name][policy_out]
        for name in problem.layer.outputs
    )
    storage = tuple(
        storage_layout(copies[name], problem.flows[name].value.type, problem.mesh, variant.shard_axes)
        if problem.flows[name].is_parameter and name in copies
        else problem.whole
        for name in problem.layer.state
    )
    return PlacedLayer(
        problem.program, problem.layer, problem.mesh, problem.flows, problem.view, states, copies,
        arrivals, departures, storage,
        variant.zero, variant.recompute, problem.settings.shared,
    )  # fmt: skip
