"""One layer's problem as data, and the tables of its variants: what `elimination.minimise` gets.

See `layer_problem` for the objective and `problem_building` for how a problem is put together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.ops import is_cheap
from autopar.placement import LOCAL, REPLICATE, Axis, Layout, local_shape
from autopar.program import Layer, Op, Program
from autopar.search.boundary import Policy, arrival_layout
from autopar.search.elimination import Table
from autopar.search.storage import storage_layout
from autopar.step.gradient_sums import gradient_sum_s
from autopar.step.layer_cost import is_rerun, parameter_times, updates
from autopar.step.layer_memory import parameter_memory
from autopar.step.local_layer import SharedStorage, stored_steps
from autopar.step.op_states import OpState
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec
from autopar.step.value_flows import Flow, TimeView, is_alias

__all__ = ["LayerProblem", "OpTable", "ParameterChoice", "ReshardTable", "variant_tables"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OpTable:
    """Per state of one op, for all microbatches: seconds of computing and of the collectives inside its
    kernel.
    """

    forward_s: Array
    backward_s: Array
    kernel_forward_s: Array
    kernel_backward_s: Array


@dataclass(frozen=True)
class ReshardTable:
    """Seconds of a reshard for all microbatches, by the states of `scope`; backward is 0 where no gradient
    flows.
    """

    scope: tuple[int, ...]
    forward_s: Array
    backward_s: Array


@dataclass(frozen=True)
class ParameterChoice:
    """A parameter whose copy layout is `copies[state]` of variable `variable`."""

    flow: Flow
    variable: int
    copies: tuple[Layout, ...]


@dataclass(frozen=True)
class LayerProblem:
    """One layer on one mesh with one number of microbatches: states and prices, ready for any ZeRO level and
    recompute.

    Build it once with `build_problem`, solve variants of it with `solve_problem`.  Variables are the ops,
    then the copies in `copy_variables`, then the policy before and the policy behind the layer; `sizes` are
    their numbers of states.
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
    flows: dict[str, Flow] = field(repr=False)
    view: TimeView = field(repr=False)
    states: tuple[tuple[OpState, ...], ...] = field(repr=False)
    copy_variables: dict[str, int] = field(repr=False)
    copy_domains: dict[str, tuple[Layout, ...]] = field(repr=False)
    free_outputs: frozenset[str]
    sizes: tuple[int, ...] = field(repr=False)
    op_tables: tuple[OpTable, ...] = field(repr=False)
    reshards: tuple[ReshardTable, ...] = field(repr=False)
    parameters: tuple[ParameterChoice, ...] = field(repr=False)
    optimizer_s_per_element: dict[str, float]

    @property
    def whole(self) -> Layout:
        """``R`` on every axis."""
        return (REPLICATE,) * len(self.mesh)


def variant_tables(
    problem: LayerProblem,
    zero: int,
    shard_axes: tuple[int, ...],
    recompute: str,
    weight: float,
    in_flight: int = 1,
    *,
    hides: bool = False,
) -> list[Table]:
    """The tables whose sum is the objective of one variant; `weight` is in seconds per byte.

    Of what is saved for backward there are `in_flight` microbatches at once.  With `hides`, collectives of parameters
    run beside compute and cost only what they take from it.
    """
    tables: list[Table] = []
    training = problem.training
    again = 2.0 if training.is_training and training.reruns and recompute == "full" else 1.0
    for index, (op, each) in enumerate(zip(problem.layer.ops, problem.op_tables, strict=True)):
        runs = 2.0 if is_rerun(op, recompute, problem.training) else 1.0
        kernels = again * each.kernel_forward_s + each.kernel_backward_s
        tables.append(((index,), runs * each.forward_s + each.backward_s + kernels))
    tables += [(each.scope, again * each.forward_s + each.backward_s) for each in problem.reshards]
    tables += [((choice.variable,), _parameter_table(problem, choice, zero, shard_axes, weight, hides))
               for choice in problem.parameters]  # fmt: skip
    if weight and problem.training.is_training:
        tables += [(scope, weight * in_flight * num_bytes) for scope, num_bytes in _saved_shares(problem, recompute)]
    return tables


def _parameter_table(
    problem: LayerProblem, choice: ParameterChoice, zero: int, shard_axes: tuple[int, ...], weight: float, hides: bool
) -> Array:
    """Seconds per step of gathering, reducing and updating a parameter, by the state that fixes its copy."""
    known: dict[Layout, float] = {}
    for copy in choice.copies:
        if copy not in known:
            known[copy] = _parameter_seconds(problem, choice.flow, copy, zero, shard_axes, weight, hides)
    return np.array([known[copy] for copy in choice.copies])


def _parameter_seconds(
    problem: LayerProblem,
    flow: Flow,
    copy: Layout,
    zero: int,
    shard_axes: tuple[int, ...],
    weight: float,
    hides: bool,
) -> float:
    tensor, training, name = flow.value.type, problem.training, flow.value.name
    trains = updates(flow, training)
    stored = storage_layout(copy, tensor, problem.mesh, shard_axes)
    gathers, reduces = parameter_times(zero, problem.num_microbatches, training)
    gradient_bytes = tensor.num_elements * training.gradient_itemsize(tensor.dtype)
    prices = problem.prices

    def price(kind: str, axis: Axis, num_bytes: float) -> float:
        return prices.collective_s(kind, axis, num_bytes) * (prices.interference(kind, axis) if hides else 1.0)

    seconds = 0.0
    for step in stored_steps(name, stored, copy, problem.mesh, problem.shared_storage):
        seconds += _price(price, step.forward, step.axis, tensor.num_bytes * step.fraction, gathers)
        seconds += _price(price, step.backward, step.axis, gradient_bytes * step.fraction, reduces if trains else 0)
    if trains:
        where = problem.shared_storage.get(name, (problem.mesh, stored))
        read, count = (problem.mesh, copy), problem.num_microbatches
        seconds += gradient_sum_s(flow.value, read, where, zero, count, prices, training)
    if name in problem.shared_storage:
        return seconds
    elements = math.prod(local_shape(tensor.shape, stored, problem.mesh))
    copied = math.prod(local_shape(tensor.shape, copy, problem.mesh))
    memory = parameter_memory(tensor.dtype, elements, copied, zero, flow.value.requires_grad, training)
    if trains:
        seconds += elements * problem.optimizer_s_per_element[tensor.dtype] + prices.optimizer_tensor_s
    return seconds + weight * memory.persistent_bytes


def _price(
    collective_s: Callable[[str, Axis, float], float], kind: str, axis: Axis, num_bytes: float, times: int
) -> float:
    if kind in LOCAL or not times or not num_bytes:
        return 0.0
    return times * collective_s(kind, axis, num_bytes)


def _saved_shares(problem: LayerProblem, recompute: str) -> Iterator[Table]:
    """Saved bytes as a sum over variables: a tensor's bytes are shared equally by the mentions that save
    it.
    """
    if recompute == "full":
        for name in problem.layer.inputs:
            if name not in problem.program.inputs:
                flow = problem.flows[name]
                tensor = problem.view.value_type(flow)
                layouts = [arrival_layout(problem.program, name, p, problem.mesh, tensor) for p in problem.policies]
                local = [math.prod(local_shape(tensor.shape, layout, problem.mesh)) for layout in layouts]
                itemsize = tensor.num_bytes / max(1, tensor.num_elements)
                yield (len(problem.sizes) - 2,), itemsize * np.array(local, dtype=float)
        return
    savers: dict[str, list[tuple[int, int]]] = {}
    for index, op in enumerate(problem.layer.ops):
        for position, name in _kept(op, recompute):
            root = _viewed(problem, name)
            if problem.flows[root].source != "held":
                savers.setdefault(root, []).append((index, position))
    for mentions in savers.values():
        for index, position in mentions:
            bytes_by_state = [(*s.operand_types, *s.result_types)[position].num_bytes for s in problem.states[index]]
            yield (index,), np.array(bytes_by_state, dtype=float) / len(mentions)


def _kept(op: Op, recompute: str) -> Iterator[tuple[int, str]]:
    """The tensors that one op keeps, as indices into operands, then results."""
    names = (*op.operands, *op.results)
    results = () if is_cheap(op) else range(len(op.operands), len(names))
    positions = results if recompute == "selective" else op.saves
    return ((position, names[position]) for position in positions)


def _viewed(problem: LayerProblem, name: str) -> str:
    """The value whose memory this one shares."""
    flow = problem.flows[name]
    while flow.source == "op" and is_alias(problem.layer, problem.flows, problem.layer.ops[flow.producer]):
        flow = problem.flows[problem.layer.ops[flow.producer].operands[0]]
    return flow.value.name
