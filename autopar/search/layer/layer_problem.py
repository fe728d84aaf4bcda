"""The search inside a layer as a problem of discrete optimization: one layer on one mesh.

Variables, each with finitely many states: per op a combination of options, one per mesh axis (`op_states`); per value
with several readers the layout of its copy; the policies of the boundaries before and behind the layer.  A value with
one reader is copied as that reader needs it.  The objective is a sum of tables over one or two variables each:

* op: seconds forward and backward, and the collectives of its special kernel (`OpTable`);
* source -> copy, copy -> reader: the collectives of that reshard (`ReshardTable`);
* copy of a parameter: gathers, gradient reductions and the optimizer, for the storage that follows (`ParameterCopy`).

A problem holds what all ZeRO levels and ways to recompute have in common; `layer_solutions` solves it for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.placement import BROADCAST, REPLICATE, Layout, Placement, tidy
from autopar.program import Layer, Op, Program, TensorType
from autopar.search.layer.layout_choices import Policy, arrival_layout, boundary_policies, has_whole_boundary
from autopar.search.layer.reshard_prices import CollectiveCounts, collective_counts, reshard_tables
from autopar.step.costs.optimizer_costs import OptimizerRate, optimizer_rate, updates
from autopar.step.layer.local_layer import SharedStorage
from autopar.step.layer.op_states import Allowed, OpState, kernel_calls, kernel_hidden_s, op_states
from autopar.step.layer.value_flows import Flow, TimeView, find_flows, time_view
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec, is_differentiable, own_training

__all__ = ["LayerProblem", "OpTable", "ParameterCopy", "ReshardTable", "StepSettings"]

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]


@dataclass(frozen=True)
class StepSettings:
    """What all layers of a step have in common.

    Args:
        program: the program.
        prices: what things cost.
        training: how the program is trained.
        num_microbatches: into how many the batch is cut.
        time: layer kind -> per op, the factor that microbatches split.
        shared: where parameters that several layers read, or that the caller keeps, are stored.
        memory_price_s_per_byte: a usual price of memory, to look for strategies that save it.
        in_flight: how many microbatches are usually between forward and backward; more than one in a pipeline, and
            where all forwards come first.
        op_shares: layer kind -> per op of a compiled layer, which part of its seconds alone it takes about, forward and
            backward: what kernels are made of differs between strategies, which are priced as they are once found.
        reruns: of a kind of layer, ways to keep activations that name the ops that run again.  They are looked for
            when they are asked for first: where a constraint says how activations are kept, nobody asks.
    """

    program: Program
    prices: Prices
    training: TrainingSpec
    num_microbatches: int
    time: dict[int, tuple[str, ...]]
    shared: SharedStorage
    memory_price_s_per_byte: float = 0.0
    in_flight: int = 1
    op_shares: Mapping[int, tuple[tuple[float, float], ...]] = field(
        default_factory=dict[int, tuple[tuple[float, float], ...]]
    )
    reruns: Callable[[int], tuple[str, ...]] = lambda _: ()


@dataclass(frozen=True)
class OpTable:
    """Per state of one op, for all microbatches: seconds of compute, and of the collectives inside its kernel."""

    forward_s: Array
    backward_s: Array
    kernel_forward_s: Array
    kernel_backward_s: Array


@dataclass(frozen=True)
class ReshardTable:
    """Seconds of a reshard for all microbatches, by the states of the variables in `scope`; backward is 0 where no
    gradient flows.
    """

    scope: tuple[int, ...]
    forward_s: Array
    backward_s: Array


@dataclass(frozen=True)
class ParameterCopy:
    """A parameter whose copy has the layout `layouts[state]` of variable `variable`."""

    flow: Flow
    variable: int
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """One layer (of a kind, the first) on one mesh.

    Variables are the ops, then the copies in `copy_variables`, then the policy before and the policy behind the layer;
    `sizes` are their numbers of states.  `allowed` restricts the options of ops; without it all that divide may be.
    `space` is a dim that boundaries may split in addition to the first two; 0 for none.
    """

    settings: StepSettings
    layer: Layer
    mesh: tuple[int, ...]
    allowed: Allowed | None = None
    space: int = 0

    @property
    def program(self) -> Program:
        """The program of the layer."""
        return self.settings.program

    @property
    def prices(self) -> Prices:
        """What things cost."""
        return self.settings.prices

    @cached_property
    def training(self) -> TrainingSpec:
        """How this layer is trained."""
        return own_training(self.program, self.layer, self.settings.training)

    @cached_property
    def flows(self) -> dict[str, Flow]:
        """Where every value of the layer comes from and goes."""
        return find_flows(self.program, self.layer)

    @cached_property
    def view(self) -> TimeView:
        """What one microbatch holds of every value."""
        time = self.settings.time[self.layer.kind]
        return time_view(self.layer, self.flows, time, self.settings.num_microbatches)

    @cached_property
    def states(self) -> tuple[tuple[OpState, ...], ...]:
        """Per op, the combinations of options that it may have."""
        return tuple(
            _without_cut_slices(self, op, op_states(self.program, op, index, self.mesh, self.view, self.allowed))
            for index, op in enumerate(self.layer.ops)
        )

    @cached_property
    def policies(self) -> tuple[Policy, ...]:
        """Those of the boundaries before and behind the layer.

        With a dim that is split in space, only the first of those that give all inputs and outputs the same layouts: a
        batch that divides over few devices leaves many alike.
        """
        every = boundary_policies(self.mesh, self.space)
        if not self.space:
            return every
        first: dict[tuple[Layout, ...], Policy] = {}
        for layouts, policy in zip(zip(*self._layouts_at_boundaries(every).values(), strict=True), every, strict=False):
            first.setdefault(layouts, policy)
        return tuple(first.values()) or every[:1]

    @cached_property
    def free_outputs(self) -> frozenset[str]:
        """Outputs of the model that no layer reads: they leave in whatever layout they have."""
        program = self.program
        read = {name for other in program.layers for name in other.inputs}
        given = (name for name in self.layer.outputs if name in program.outputs and name not in read)
        return frozenset(name for name in given if not has_whole_boundary(program, name))

    @cached_property
    def copy_domains(self) -> dict[str, tuple[Layout, ...]]:
        """The layouts that the copies may have whose layout is a choice."""
        return {name: _copy_domain(self, flow) for name, flow in self.flows.items() if _has_copy_variable(self, flow)}

    @cached_property
    def copy_variables(self) -> dict[str, int]:
        """The variables of these copies."""
        return {name: len(self.states) + index for index, name in enumerate(self.copy_domains)}

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Per variable the number of its states."""
        count = len(self.policies)
        return (*map(len, self.states), *map(len, self.copy_domains.values()), count, count)

    @property
    def policy_variables(self) -> tuple[int, int]:
        """Those of the policies before and behind the layer."""
        return len(self.sizes) - 2, len(self.sizes) - 1

    @cached_property
    def op_tables(self) -> tuple[OpTable, ...]:
        """What each op costs."""
        return tuple(_op_table(self, index) for index in range(len(self.states)))

    @cached_property
    def reshards(self) -> tuple[ReshardTable, ...]:
        """What each reshard costs, except those of parameters from their storage."""
        prices = _ReshardPrices(self)
        ends = [each for flow in self.flows.values() for each in _reshard_ends(self, flow, prices)]
        return tuple(_reshard_table(self, prices, *each) for each in ends)

    @cached_property
    def parameters(self) -> tuple[ParameterCopy, ...]:
        """The copies of parameters."""
        return tuple(_parameter_copies(self))

    @cached_property
    def optimizer_rates(self) -> dict[str, OptimizerRate]:
        """What the optimizer's step on a parameter takes, by dtype."""
        dtypes = {flow.value.type.dtype for flow in self.flows.values() if updates(flow, self.training)}
        devices = math.prod(self.mesh)
        return {d: optimizer_rate(self.program, d, devices, self.prices, self.training) for d in dtypes}

    @property
    def whole(self) -> Layout:
        """``R`` on every axis."""
        return (REPLICATE,) * len(self.mesh)

    def has_gradient(self, flow: Flow) -> bool:
        """Whether a gradient of the value flows back."""
        return self.training.is_training and flow.value.requires_grad

    @cached_property
    def boundary_layouts(self) -> dict[str, list[Layout]]:
        """The layouts in which inputs and outputs cross the boundary, per policy."""
        return self._layouts_at_boundaries(self.policies)

    def _layouts_at_boundaries(self, policies: tuple[Policy, ...]) -> dict[str, list[Layout]]:
        tensors = {n: self.view.value_type(self.flows[n]) for n in (*self.layer.inputs, *self.layer.outputs)}
        return {
            name: [arrival_layout(self.program, name, policy, self.mesh, tensor) for policy in policies]
            for name, tensor in tensors.items()
        }


def _without_cut_slices(problem: LayerProblem, op: Op, states: tuple[OpState, ...]) -> tuple[OpState, ...]:
    """Those whose results are whole in the dims in which readers take microbatches of them, and so with frozen
    parameters that the op takes microbatches of.

    Microbatch m of a shard is not the shard of microbatch m, so taking it would gather.
    """
    view, flows = problem.view, problem.flows
    made = [(i, time) for i, name in enumerate(op.results) for time in view.taken(flows[name])]
    read = [(i, t) for i, name in enumerate(op.operands) if flows[name].is_parameter for t in view.taken(flows[name])]
    if not made and not read:
        return states
    return tuple(
        state
        for state in states
        if not any(time in state.results[i] for i, time in made)
        and not any(time in state.operands[i] for i, time in read)
    )


def _has_copy_variable(problem: LayerProblem, flow: Flow) -> bool:
    """Whether the copy of this value is a choice: several readers, and another layout than ``R`` might be better."""
    return flow.num_readers > 1 and not _is_whole_everywhere(problem, flow)


def _is_whole_everywhere(problem: LayerProblem, flow: Flow) -> bool:
    """Whether every device has the value whole, and no gradient of it: each reader slices what it needs for free."""
    is_given = flow.source == "state" and not flow.is_parameter
    arrives_whole = flow.source == "input" and has_whole_boundary(problem.program, flow.value.name)
    return (is_given or arrives_whole) and not problem.has_gradient(flow)


def _copy_domain(problem: LayerProblem, flow: Flow) -> tuple[Layout, ...]:
    """The layouts that a copy may have: per axis what a reader needs, or what its source gives unless that is terms."""
    choices: list[dict[Placement, None]] = [{REPLICATE: None} for _ in problem.mesh]
    layouts = [state.operands[mention] for op, mention in flow.readers for state in problem.states[op]]
    if flow.source == "op":
        given = (state.results[flow.result] for state in problem.states[flow.producer])
        layouts += [tuple(REPLICATE if p.kind == "P" else p for p in layout) for layout in given]
    if flow.source == "input" or (flow.output >= 0 and flow.value.name not in problem.free_outputs):
        layouts += problem.boundary_layouts[flow.value.name]
    for layout in dict.fromkeys(layouts):
        for axis, placement in enumerate(layout):
            # Without a gradient, B is R.
            same = placement == BROADCAST and not problem.has_gradient(flow)
            choices[axis][REPLICATE if same else placement] = None
    tensor = problem.view.value_type(flow)
    in_time = problem.view.taken(flow)  # as in `_without_cut_slices`
    return tuple(
        layout
        for layout in itertools.product(*choices)
        if in_time.isdisjoint(layout) and _divides(tensor, layout, problem.mesh)
    )


def _divides(tensor: TensorType, layout: Layout, mesh: tuple[int, ...]) -> bool:
    sizes = list(tensor.shape)
    for placement, size in zip(layout, mesh, strict=True):
        if placement.is_shard:
            if sizes[placement.dim] % (size * placement.parts):
                return False
            sizes[placement.dim] //= size
    return True


def _op_table(problem: LayerProblem, index: int) -> OpTable:
    op, prices = problem.layer.ops[index], problem.prices
    differentiable = is_differentiable(problem.program, op, problem.training)
    known: dict[tuple[int, int], tuple[float, float]] = {}
    shares = problem.settings.op_shares.get(problem.layer.kind)
    ahead, back = shares[index] if shares else (1.0, 1.0)
    columns = np.zeros((4, len(problem.states[index])))
    for row, state in enumerate(problem.states[index]):
        types = id(state.work_types), id(state.result_types)  # equal ones are one object
        if types not in known:
            time = prices.op_s(op, state.work_types, state.result_types, differentiable)
            known[types] = (ahead * time.forward_s, back * time.backward_s)
        columns[:2, row] = known[types]
        calls = tuple(kernel_calls(state, problem.mesh)) if op.has_collectives else ()
        phase_s = {"forward": known[types][0], "backward": known[types][1]}
        for (run, times), hidden_s in zip(calls, kernel_hidden_s(calls, phase_s, prices), strict=True):
            backward = run.phase == "backward"
            if not backward or problem.training.is_training:
                exposed_s = prices.collective_s(run.kind, run.axis, run.num_bytes) - hidden_s
                columns[3 if backward else 2, row] += times * exposed_s
    return OpTable(*(problem.settings.num_microbatches * columns))


class _ReshardPrices:
    """Seconds of reshards between the layouts of one problem, cached by the tensor's bytes."""

    def __init__(self, problem: LayerProblem) -> None:
        self._problem = problem
        self._active = [axis for axis, size in enumerate(problem.mesh) if size > 1]
        self._ids: dict[Layout, int] = {}
        self._counts: CollectiveCounts | None = None
        self._tables: dict[float, tuple[Array, Array]] = {}

    def ids(self, layouts: list[Layout]) -> Ids:
        """Numbers of these layouts; call this before the first table is made."""
        active = self._active
        return np.array([self._ids.setdefault(tuple(x[axis] for axis in active), len(self._ids)) for x in layouts])

    def between(self, src: Ids, dst: Ids, num_bytes: float) -> tuple[Array, Array]:
        """Seconds (forward, backward) from each layout of `src` to each of `dst`."""
        if self._counts is None:
            self._counts = collective_counts(tuple(self._ids))
        if num_bytes not in self._tables:
            price = self._problem.prices.collective_s
            self._tables[num_bytes] = reshard_tables(self._counts, self._problem.mesh, num_bytes, price)
        forward, backward = self._tables[num_bytes]
        return forward[np.ix_(src, dst)], backward[np.ix_(src, dst)]


@dataclass(frozen=True)
class _ReshardEnd:
    """One end of a reshard: the layouts by state of a variable."""

    variable: int
    ids: Ids


def _reshard_ends(
    problem: LayerProblem, flow: Flow, prices: _ReshardPrices
) -> Iterator[tuple[Flow, _ReshardEnd, _ReshardEnd, float]]:
    """The reshards of one value: (value, from, to, bytes); those from a parameter's storage come elsewhere."""
    name = flow.value.name
    if not flow.num_readers:
        return
    num_bytes = problem.view.value_type(flow).num_bytes
    start = None if flow.source == "state" else _source_end(problem, flow, prices)
    if name in problem.copy_variables:
        copy = _ReshardEnd(problem.copy_variables[name], prices.ids(list(problem.copy_domains[name])))
        if start is not None:
            yield flow, start, copy, num_bytes
        start = copy
    elif start is None or _is_whole_everywhere(problem, flow):
        return
    for op, mention in flow.readers:
        layouts = [state.operands[mention] for state in problem.states[op]]
        read_bytes = problem.view.reader_type(flow, op, mention).num_bytes
        yield flow, start, _ReshardEnd(op, prices.ids(layouts)), read_bytes
    if flow.output >= 0:
        yield flow, start, _output_end(problem, flow, start, prices), num_bytes


def _source_end(problem: LayerProblem, flow: Flow, prices: _ReshardPrices) -> _ReshardEnd:
    if flow.source == "op":
        layouts = [state.results[flow.result] for state in problem.states[flow.producer]]
        return _ReshardEnd(flow.producer, prices.ids(layouts))
    return _ReshardEnd(problem.policy_variables[0], prices.ids(problem.boundary_layouts[flow.value.name]))


def _output_end(problem: LayerProblem, flow: Flow, start: _ReshardEnd, prices: _ReshardPrices) -> _ReshardEnd:
    """Where a value goes that leaves; a free output's layout follows from `start`, which the table then is about."""
    name = flow.value.name
    if name not in problem.free_outputs:
        return _ReshardEnd(problem.policy_variables[1], prices.ids(problem.boundary_layouts[name]))
    if name in problem.copy_domains:
        layouts = list(problem.copy_domains[name])
    else:
        layouts = [state.results[flow.result] for state in problem.states[flow.producer]]
    return _ReshardEnd(start.variable, prices.ids([tidy(layout) for layout in layouts]))


def _reshard_table(
    problem: LayerProblem, prices: _ReshardPrices, flow: Flow, start: _ReshardEnd, end: _ReshardEnd, num_bytes: float
) -> ReshardTable:
    forward, backward = prices.between(start.ids, end.ids, num_bytes)
    count = problem.settings.num_microbatches
    backward = backward * count if problem.has_gradient(flow) else np.zeros_like(backward)
    if start.variable == end.variable:
        return ReshardTable((start.variable,), count * np.diagonal(forward), np.diagonal(backward))
    return ReshardTable((start.variable, end.variable), count * forward, backward)


def _parameter_copies(problem: LayerProblem) -> Iterator[ParameterCopy]:
    for name, flow in problem.flows.items():
        if not flow.is_parameter or not flow.readers:
            continue
        if name in problem.copy_variables:
            yield ParameterCopy(flow, problem.copy_variables[name], problem.copy_domains[name])
        else:
            op, mention = flow.readers[0]
            yield ParameterCopy(flow, op, tuple(state.operands[mention] for state in problem.states[op]))
