"""Building one layer's problem: states of ops, domains of copies, and the price of every reshard between
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.placement import BROADCAST, REPLICATE, Layout, Placement, tidy
from autopar.program import Layer, Op, Program, TensorType
from autopar.search.boundary import Policy, arrival_layout, boundary_policies, has_whole_boundary
from autopar.search.layer_tables import LayerProblem, OpTable, ParameterChoice, ReshardTable
from autopar.search.reshard_tables import MoveTable, move_table, reshard_tables
from autopar.step.layer_cost import is_differentiable, optimizer_s_per_element, own_training, updates
from autopar.step.local_layer import SharedStorage
from autopar.step.op_states import Allowed, OpState, kernel_runs, op_states
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec
from autopar.step.value_flows import Flow, TimeView, find_flows, time_view

__all__ = ["build_problem"]

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]


def build_problem(  # noqa: PLR0913  (a keyword for each thing that a problem depends on)
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
    """The layer's states and cost tables on `mesh`.

    Args:
        program: the layer's program.
        layer: the layer (of a kind, the first).
        mesh: sizes of the mesh axes.
        prices: what things cost.
        training: how the program is trained.
        num_microbatches: M; all prices are for the M microbatches of one step.
        time: per op the factor that microbatches split; ``()`` if M is 1.
        allowed: restricts the options of ops; without it all that divide are.
        shared_storage: parameters that are stored elsewhere.
    """
    training = own_training(program, layer, training)
    flows = find_flows(program, layer)
    view = time_view(layer, flows, time, num_microbatches)
    states = tuple(
        _without_cut_slices(op_states(program, op, index, mesh, view, allowed), op, flows, view)
        for index, op in enumerate(layer.ops)
    )
    policies = boundary_policies(mesh)
    later = {name for other in program.layers for name in other.inputs}
    free = frozenset(
        name for name in layer.outputs
        if name in program.outputs and name not in later and not has_whole_boundary(program, name)
    )  # fmt: skip
    scene = _Scene(program, layer, mesh, policies, training, prices, flows, view, states, free, shared_storage or {})
    domains = {name: _copy_domain(scene, flow) for name, flow in flows.items() if _has_copy_variable(scene, flow)}
    copy_variables = {name: len(states) + index for index, name in enumerate(domains)}
    sizes = (*map(len, states), *map(len, domains.values()), len(policies), len(policies))
    op_tables: tuple[OpTable, ...] = ()
    reshards: tuple[ReshardTable, ...] = ()
    if min(sizes):
        op_tables = tuple(_op_table(scene, index) for index in range(len(states)))
        reshards = _reshard_tables(scene, copy_variables, domains)
    rates = {
        dtype: optimizer_s_per_element(program, dtype, math.prod(mesh), prices, training)
        for dtype in {flow.value.type.dtype for flow in flows.values() if updates(flow, training)}
    }
    return LayerProblem(
        program, layer, mesh, policies, num_microbatches, time, prices, training, scene.shared, flows, view,
        states, copy_variables, domains, free, sizes, op_tables, reshards,
        tuple(_parameter_choices(scene, copy_variables, domains)), rates,
    )  # fmt: skip


def _without_cut_slices(
    states: tuple[OpState, ...], op: Op, flows: Mapping[str, Flow], view: TimeView
) -> tuple[OpState, ...]:
    """Those whose results are whole in the dims in which readers take microbatches of them.

    Microbatch m of a shard is not the shard of microbatch m, so taking it would gather.
    """
    taken = [(result, time) for result, name in enumerate(op.results) for time in view.taken(flows[name])]
    return tuple(s for s in states if not any(time in s.results[result] for result, time in taken)) if taken else states


@dataclass(frozen=True)
class _Scene:
    """What the functions below share while a problem is built."""

    program: Program
    layer: Layer
    mesh: tuple[int, ...]
    policies: tuple[Policy, ...]
    training: TrainingSpec
    prices: Prices
    flows: dict[str, Flow]
    view: TimeView
    states: tuple[tuple[OpState, ...], ...]
    free_outputs: frozenset[str]
    shared: SharedStorage

    def has_gradient(self, flow: Flow) -> bool:
        return self.training.is_training and flow.value.requires_grad

    def boundary(self, flow: Flow) -> list[Layout]:
        """The layouts in which a value crosses the boundary, per policy."""
        tensor = self.view.value_type(flow)
        return [arrival_layout(self.program, flow.value.name, p, self.mesh, tensor) for p in self.policies]


def _has_copy_variable(scene: _Scene, flow: Flow) -> bool:
    """Whether the copy of this value is a choice: several readers, and another layout than ``R`` might be
    better.
    """
    if flow.num_readers < 2:
        return False
    return not _is_whole_everywhere(scene, flow)


def _is_whole_everywhere(scene: _Scene, flow: Flow) -> bool:
    """Whether every device has the value whole, and no gradient of it: each reader takes what it needs for
    nothing.
    """
    is_given = flow.source == "held" and not flow.is_parameter
    arrives_whole = flow.source == "input" and has_whole_boundary(scene.program, flow.value.name)
    return (is_given or arrives_whole) and not scene.has_gradient(flow)


def _copy_domain(scene: _Scene, flow: Flow) -> tuple[Layout, ...]:
    """The layouts that a copy may have: per axis what a reader wants, or what its source gives unless that is
    terms.
    """
    axes = range(len(scene.mesh))
    wanted: list[dict[Placement, None]] = [{REPLICATE: None} for _ in axes]
    layouts = [state.operands[mention] for op, mention in flow.readers for state in scene.states[op]]
    if flow.source == "op":
        given = (state.results[flow.result] for state in scene.states[flow.producer])
        layouts += [tuple(REPLICATE if p.kind == "P" else p for p in layout) for layout in given]
    if flow.source == "input" or (flow.output >= 0 and flow.value.name not in scene.free_outputs):
        layouts += scene.boundary(flow)
    for layout in dict.fromkeys(layouts):
        for axis in axes:
            # Without a gradient, B is R.
            same = layout[axis] == BROADCAST and not scene.has_gradient(flow)
            wanted[axis][REPLICATE if same else layout[axis]] = None
    tensor = scene.view.value_type(flow)
    in_time = scene.view.taken(flow)  # as in `_without_cut_slices`
    return tuple(
        layout
        for layout in itertools.product(*wanted)
        if in_time.isdisjoint(layout) and _divides(tensor, layout, scene.mesh)
    )


def _divides(tensor: TensorType, layout: Layout, mesh: tuple[int, ...]) -> bool:
    sizes = list(tensor.shape)
    for placement, size in zip(layout, mesh, strict=True):
        if placement.is_shard:
            whole, rest = divmod(sizes[placement.dim], size)
            if rest:
                return False
            sizes[placement.dim] = whole
    return True


def _op_table(scene: _Scene, index: int) -> OpTable:
    op = scene.layer.ops[index]
    count = scene.view.num_microbatches
    differentiable = is_differentiable(scene.program, op, scene.training)
    known: dict[tuple[int, int], tuple[float, float]] = {}
    columns = np.zeros((4, len(scene.states[index])))
    has_kernels = any(option.collectives for option in op.options)
    for row, state in enumerate(scene.states[index]):
        types = id(state.operand_types), id(state.result_types)  # equal ones are one object
        if types not in known:
            time = scene.prices.op_s(op, state.operand_types, state.result_types, differentiable)
            known[types] = (time.forward_s, time.backward_s)
        columns[:2, row] = known[types]
        for run in kernel_runs(state, scene.mesh) if has_kernels else ():
            backward = run.phase == "backward"
            if not backward or scene.training.is_training:
                columns[3 if backward else 2, row] += scene.prices.collective_s(run.kind, run.axis, run.num_bytes)
    return OpTable(*(count * columns))


class _Pricer:
    """Reshard tables between the layouts of one problem, cached by the tensor's bytes."""

    def __init__(self, scene: _Scene) -> None:
        self._scene = scene
        self._active = [axis for axis, size in enumerate(scene.mesh) if size > 1]
        self._ids: dict[Layout, int] = {}
        self._table: MoveTable | None = None
        self._tables: dict[float, tuple[Array, Array]] = {}

    def ids(self, layouts: list[Layout]) -> Ids:
        """Numbers of these layouts; to be asked for before the first table is."""
        strip = self._active
        return np.array([self._ids.setdefault(tuple(x[axis] for axis in strip), len(self._ids)) for x in layouts])

    def between(self, src: Ids, dst: Ids, num_bytes: float) -> tuple[Array, Array]:
        """Seconds (forward, backward) from each layout of `src` to each of `dst`."""
        if self._table is None:
            self._table = move_table(tuple(self._ids))
        if num_bytes not in self._tables:
            price = self._scene.prices.collective_s
            self._tables[num_bytes] = reshard_tables(self._table, self._scene.mesh, num_bytes, price)
        forward, backward = self._tables[num_bytes]
        return forward[np.ix_(src, dst)], backward[np.ix_(src, dst)]


@dataclass(frozen=True)
class _End:
    """One end of a reshard: the layouts by state of a variable (-1: one layout, no variable)."""

    variable: int
    ids: Ids


def _reshard_tables(
    scene: _Scene, copy_variables: dict[str, int], domains: dict[str, tuple[Layout, ...]]
) -> tuple[ReshardTable, ...]:
    pricer = _Pricer(scene)
    links = [link for flow in scene.flows.values() for link in _links(scene, flow, copy_variables, domains, pricer)]
    return tuple(_reshard_table(scene, pricer, *link) for link in links)


_Link = tuple[Flow, _End, _End, float]


def _links(
    scene: _Scene,
    flow: Flow,
    copy_variables: dict[str, int],
    domains: dict[str, tuple[Layout, ...]],
    pricer: _Pricer,
) -> Iterator[_Link]:
    """The reshards of one value: (value, from, to, bytes); those from a parameter's storage come
    elsewhere.
    """
    name = flow.value.name
    if not flow.num_readers:
        return
    first = scene.view.value_type(flow).num_bytes
    start = None if flow.source == "held" else _source_end(scene, flow, pricer)
    if name in copy_variables:
        copy = _End(copy_variables[name], pricer.ids(list(domains[name])))
        if start is not None:
            yield flow, start, copy, first
        start = copy
    elif start is None or _is_whole_everywhere(scene, flow):
        return
    for op, mention in flow.readers:
        layouts = [state.operands[mention] for state in scene.states[op]]
        num_bytes = scene.view.reader_type(flow, op, mention).num_bytes
        yield flow, start, _End(op, pricer.ids(layouts)), num_bytes
    if flow.output >= 0:
        yield flow, start, _output_end(scene, flow, start, domains, pricer), first


def _source_end(scene: _Scene, flow: Flow, pricer: _Pricer) -> _End:
    if flow.source == "op":
        layouts = [state.results[flow.result] for state in scene.states[flow.producer]]
        return _End(flow.producer, pricer.ids(layouts))
    before = len(scene.states) + sum(_has_copy_variable(scene, other) for other in scene.flows.values())
    return _End(before, pricer.ids(scene.boundary(flow)))


def _output_end(
    scene: _Scene, flow: Flow, start: _End, domains: dict[str, tuple[Layout, ...]], pricer: _Pricer
) -> _End:
    """Where a value goes that leaves; a free output's layout follows from `start`, which the table then is
    about.
    """
    if flow.value.name in scene.free_outputs:
        layouts = (
            list(domains[flow.value.name]) if flow.value.name in domains
            else [state.results[flow.result] for state in scene.states[flow.producer]]
        )  # fmt: skip
        return _End(start.variable, pricer.ids([tidy(layout) for layout in layouts]))
    behind = len(scene.states) + sum(_has_copy_variable(scene, other) for other in scene.flows.values()) + 1
    return _End(behind, pricer.ids(scene.boundary(flow)))


def _reshard_table(
    scene: _Scene, pricer: _Pricer, flow: Flow, start: _End, end: _End, num_bytes: float
) -> ReshardTable:
    forward, backward = pricer.between(start.ids, end.ids, num_bytes)
    count = scene.view.num_microbatches
    backward = backward * count if scene.has_gradient(flow) else np.zeros_like(backward)
    if start.variable == end.variable:
        return ReshardTable((start.variable,), count * np.diagonal(forward), np.diagonal(backward))
    return ReshardTable((start.variable, end.variable), count * forward, backward)


def _parameter_choices(
    scene: _Scene, copy_variables: dict[str, int], domains: dict[str, tuple[Layout, ...]]
) -> Iterator[ParameterChoice]:
    for name, flow in scene.flows.items():
        if not flow.is_parameter or not flow.readers:
            continue
        if name in copy_variables:
            yield ParameterChoice(flow, copy_variables[name], domains[name])
        else:
            op, mention = flow.readers[0]
            yield ParameterChoice(flow, op, tuple(state.operands[mention] for state in scene.states[op]))
