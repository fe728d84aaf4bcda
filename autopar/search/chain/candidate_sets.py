"""The candidates of all layers for one number of microbatches and storage of shared parameters, and their costs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError
from autopar.ops import family_of
from autopar.placement import local_shape
from autopar.plan import Decisions, LayerStrategy, PlannedLayer, Stage
from autopar.program import Layer, Op, Program, TensorType, itemsize_bytes
from autopar.search.chain.cost_tables import CostTables, LayerCosts, PipelineSend, TiedParameter, Transfer
from autopar.search.layer.layer_candidates import LayerCandidate, layer_candidates
from autopar.search.layer.layer_pricing import LayerPricing
from autopar.search.layer.layer_problem import StepSettings
from autopar.search.layer.layout_choices import Policy, arrival_layout
from autopar.search.search_context import SearchContext, input_rows
from autopar.search.settings.constraints import LayerDemands
from autopar.search.settings.labels import axis_labels
from autopar.step.activation_policies import renamed_policy, splits_backward
from autopar.step.costs.overlap_estimate import Hideable, hideable_s
from autopar.step.costs.parameter_costs import SharedCost, shared_costs
from autopar.step.costs.plan_collectives import broadcast_s
from autopar.step.costs.stage_costs import CostColumns
from autopar.step.layer.boundary_values import BoundaryValue, MeshLayout, boundary_values, transfer_matrices
from autopar.step.layer.local_layer import SharedStorage
from autopar.step.training import own_training

__all__ = ["CandidateSet", "least_returned_bytes", "make_candidate_set"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
# So many layers of a class are a run of equal layers: of fewer, what suits their neighbors may matter more.
_REPEATED = 4
BoundaryState = tuple[tuple[int, ...], Policy]


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """The candidates of all layers.

    `by_class` has those of each class of layers by its first layer, `crossings` all values that cross from layer to
    layer, `states` numbers the boundary states, `shared_costs` has the cost of each shared parameter.
    """

    context: SearchContext
    settings: StepSettings
    by_class: dict[int, tuple[LayerCandidate, ...]]
    crossings: tuple[BoundaryValue, ...]
    states: dict[BoundaryState, int]
    shared_costs: dict[str, SharedCost]
    _named: dict[int, LayerStrategy] = field(default_factory=dict[int, LayerStrategy], repr=False)
    _hideable: dict[int, tuple[Hideable, ...]] = field(default_factory=dict[int, "tuple[Hideable, ...]"], repr=False)

    @property
    def candidates(self) -> tuple[tuple[LayerCandidate, ...], ...]:
        """The candidates of every layer."""
        return tuple(self.by_class[first] for first in self.context.classes)

    def along(self, path: Sequence[int]) -> tuple[LayerCandidate, ...]:
        """The candidates of these indices, one per layer."""
        return tuple(each[index] for each, index in zip(self.candidates, path, strict=True))

    def decisions(self, path: Sequence[int], stages: tuple[Stage, ...] = (), schedule: str = "") -> Decisions:
        """Those of a plan with the candidates of these indices; stages and schedule as in `Decisions`."""
        context, settings, program = self.context, self.settings, self.context.program
        entries: dict[tuple[int, LayerStrategy], int] = {}
        planned: list[PlannedLayer] = []
        for layer, candidate in zip(program.layers, self.along(path), strict=True):
            index = entries.setdefault((layer.kind, self._named_strategy(candidate)), len(entries))
            planned.append(PlannedLayer(layer.name, layer.kind, index))
        return Decisions(
            fingerprint=program.fingerprint,
            world_size=context.num_devices * context.num_groups,
            num_microbatches=settings.num_microbatches,
            layers=tuple(planned),
            strategies=tuple(strategy for _, strategy in entries),
            shared_mesh=context.shared_mesh,
            shared_storage=tuple((program.parameters[n], layout) for n, (_, layout) in settings.shared.items()),
            stages=stages,
            schedule=schedule,
            compiled=settings.training.compiled,
            gradients=settings.training.gradient_dtype,
            host_storage=settings.training.host_storage,
            piece_tokens=program.piece_tokens,
            late_ops=tuple(op.name for op in program.tail),
            statistics=program.statistics,
        )

    def _named_strategy(self, candidate: LayerCandidate) -> LayerStrategy:
        """The candidate's strategy with its axes' labels, naming values of the first layer of the kind."""
        if id(candidate) not in self._named:
            program, layer, strategy = self.context.program, candidate.layer, candidate.strategy
            names = dict(zip(_value_names(layer), _value_names(program.kinds[layer.kind]), strict=True))
            copies = tuple((names[name], layout) for name, layout in strategy.copies)
            labels = axis_labels(program, layer, strategy)
            ops = {op.name: first.name for op, first in zip(layer.ops, program.kinds[layer.kind].ops, strict=True)}
            recompute = renamed_policy(strategy.recompute, ops)
            pieces = tuple((names[name], count) for name, count in strategy.pieces)
            self._named[id(candidate)] = replace(
                strategy, copies=copies, recompute=recompute, labels=labels, pieces=pieces
            )
        return self._named[id(candidate)]

    @cached_property
    def least_tables(self) -> CostTables:
        """What all candidates cost at least, however much of it is overlapped."""
        count, layers = self.settings.num_microbatches, self.tables.layers
        known = {id(costs): (first, costs) for first, costs in zip(self.context.classes, layers, strict=True)}
        least = {key: _least_costs(costs, self.hideable(first), count) for key, (first, costs) in known.items()}
        return replace(self.tables, layers=tuple(least[id(costs)] for costs in layers))

    def hideable(self, first: int) -> tuple[Hideable, ...]:
        """What of the candidates of a class of layers may not show."""
        if first not in self._hideable:
            settings, layer = self.settings, self.context.program.layers[first]
            own, taken = own_training(self.context.program, layer, settings.training), settings.prices.host.taken
            self._hideable[first] = tuple(
                hideable_s(
                    each.cost, *each.transfers, each.strategy.zero, settings.num_microbatches, own, taken,
                    has_stages=self.context.num_groups > 1,
                )
                for each in self.by_class[first]
            )  # fmt: skip
        return self._hideable[first]

    @cached_property
    def tables(self) -> CostTables:
        """What all candidates cost."""
        context, classes = self.context, self.context.classes
        layers = {first: _layer_costs(self, first) for first in self.by_class}
        between = _transfers(self, layers)
        is_pipeline = context.num_groups > 1
        in_plan = _with_returned(self, layers) if is_pipeline else tuple(layers[first] for first in classes)
        return CostTables(
            self.settings.num_microbatches,
            len(self.states),
            in_plan,
            tuple(between.get((index, index + 1)) for index in range(len(classes) - 1)),
            tuple(each for (producer, reader), each in between.items() if reader > producer + 1),
            tuple(_sends(self, layers)) if is_pipeline else (),
            tuple(_tied_parameters(self)),
            broadcast_s(context.program, context.prices, context.pipeline_axis) if is_pipeline else 0.0,
            host_limit_bytes=context.prices.host.memory_bytes,
        )


def _value_names(layer: Layer) -> tuple[str, ...]:
    return (*layer.inputs, *layer.state, *(name for op in layer.ops for name in op.results))


def make_candidate_set(
    context: SearchContext, count: int, factors: dict[int, tuple[str, ...]], shared: SharedStorage
) -> CandidateSet | None:
    """The candidates with `count` microbatches, or None if some layer has none that meets what is settled."""
    in_flight = count if context.program.is_loss_late else min(count, context.num_groups)
    settings = StepSettings(
        context.program, context.prices, context.request.training, count, factors, shared,
        context.memory_price_s_per_byte, in_flight, context.op_shares, context.reruns,
    )  # fmt: skip
    by_class = {first: _class_candidates(context, settings, first) for first in dict.fromkeys(context.classes)}
    if not all(by_class.values()):
        return None
    states: dict[BoundaryState, int] = {}
    for each in itertools.chain.from_iterable(by_class.values()):
        for policy in (each.policy_in, each.policy_out):
            states.setdefault((each.strategy.mesh, policy), len(states))
    own = shared_costs(
        context.program, shared, context.prices, settings.training, context.num_devices, context.num_groups
    )
    return CandidateSet(context, settings, by_class, boundary_values(context.program, factors, count), states, own)


def _class_candidates(context: SearchContext, settings: StepSettings, first: int) -> tuple[LayerCandidate, ...]:
    """All candidates of a class of layers; demands that no mesh can meet are given up, with a note.

    Empty if what was settled on for fewer microbatches can't be met with these.
    """
    settled = context.settled.get(first)
    if settled is None:
        return _settle_demands(context, settings, first)
    return _known_candidates(context, settings, first, settled)


def _known_candidates(
    context: SearchContext, settings: StepSettings, first: int, demands: LayerDemands
) -> tuple[LayerCandidate, ...]:
    """Those of `layer_candidates`, made once for all that they depend on."""
    layer, known = context.program.layers[first], context.request.known
    same, meshes = (layer, context.prices), context.meshes_of(layer)
    is_repeated = context.classes.count(first) >= _REPEATED
    facts = (
        context.boundary_facts(first), settings.training, settings.num_microbatches, settings.in_flight,
        settings.time[layer.kind], settings.memory_price_s_per_byte,
        sum(each.kind == layer.kind for each in context.program.layers),
        *(settings.shared.get(name) for name in layer.state),
    )  # fmt: skip

    def make() -> tuple[LayerCandidate, ...]:
        context.request.check_time()
        work = known.get(same, ("work", facts), lambda: LayerPricing(settings, layer))
        return layer_candidates(work, meshes, demands, is_repeated=is_repeated)

    return known.get(same, ("candidates", facts, demands, meshes, is_repeated), make)


def _settle_demands(context: SearchContext, settings: StepSettings, first: int) -> tuple[LayerCandidate, ...]:
    layer, demands = context.program.layers[first], context.demands[first]
    for kept in _relaxed(demands):
        candidates = _known_candidates(context, settings, first, kept)
        if not candidates:
            continue
        missed = [each for each in demands.degrees if each not in kept.degrees]
        if missed:
            if not context.request.any_batch:
                _check_batch(context.program, dict(missed).get("data", 1), settings.num_microbatches)
                _check_tokens(context.program, dict(missed).get("context", 1))
            given_up = ", ".join(f"{name}={degree}" for name, degree in missed)
            context.notes.append(f"layers like {layer.name} can't use {given_up}: ignored for these layers")
        context.settled[first] = kept
        return candidates
    raise ConstraintError(f"no strategy for layer {layer.name} meets the constraints: relax those that match it")


def _check_batch(program: Program, degree: int, num_microbatches: int) -> None:
    """Raise `ConstraintError` if the rows of no input divide over a data degree."""
    pieces = degree * num_microbatches
    if degree == 1 or any(rows % pieces == 0 for rows in input_rows(program)):
        return
    count = program.batch_size // num_microbatches
    where = f" in each of {num_microbatches} microbatches" if num_microbatches > 1 else ""
    raise ConstraintError(
        f"constraint 'data={degree}': a batch of {count} row{'s' * (count != 1)}{where} does not divide over {degree} "
        f"devices. Pass a batch that is a multiple of {pieces} (DataLoader(drop_last=True) leaves out a smaller last "
        "one), or another degree"
    )


def _check_tokens(program: Program, degree: int) -> None:
    """Raise `ConstraintError` if a context degree divides the tokens of no attention."""
    token_dims = [
        (program.type_of(op.operands[0]).shape[-2], _unit_of_rows(program, op))
        for layer in program.kinds
        for op in layer.ops
        if family_of(op.target).is_attention
    ]
    token_dims = [(rows, unit) for rows, unit in token_dims if unit]
    if degree == 1 or not token_dims or any(rows % (unit * degree) == 0 for rows, unit in token_dims):
        return
    rows, unit = token_dims[0]
    padded = -(-rows // (unit * degree)) * unit * degree
    halves = ", each of which has two halves as attention is causal" if unit > 1 else ""
    raise ConstraintError(
        f"constraint 'context={degree}': rows of {rows} tokens do not divide over {degree} devices{halves}. Pad rows "
        f"to {padded} tokens (with labels of -100, which cross entropy leaves out), or take another degree"
    )


def _unit_of_rows(program: Program, op: Op) -> int:
    """What the number of rows that a device has must be a multiple of; 0: they can't be cut, however many there are."""
    shape = program.type_of(op.results[0]).shape
    cuts = [o.extent for o in op.options if o.results[0].is_shard and o.results[0].dim == len(shape) - 2]
    if cuts:
        return shape[-2] // max(cuts)
    units = {kernel.unit for kernel in family_of(op.target).kernels.values()}
    return max(units, default=0) if shape[-2] % 2 and not op.is_random else 0


def _relaxed(demands: LayerDemands) -> Iterator[LayerDemands]:
    """The demands, then with fewer degrees."""
    for count in range(len(demands.degrees), -1, -1):
        for degrees in itertools.combinations(demands.degrees, count):
            yield replace(demands, degrees=degrees)


def _least_costs(costs: LayerCosts, hideable: Sequence[Hideable], num_microbatches: int) -> LayerCosts:
    """The costs less what may not show."""
    forward_s, backward_s, begin_s, end_s, weight_s, _ = np.array(hideable).T
    return replace(
        costs,
        forward_s=costs.forward_s - forward_s / num_microbatches,
        backward_s=costs.backward_s - backward_s / num_microbatches,
        weight_s=np.maximum(0.0, costs.weight_s - weight_s / num_microbatches),
        step_s=costs.step_s - begin_s - end_s,
        leave_s=np.zeros_like(costs.leave_s),
        return_s=np.zeros_like(costs.return_s),
    )


def _layer_costs(candidates: CandidateSet, first: int) -> LayerCosts:
    states, own = candidates.states, candidates.by_class[first]
    splits = [splits_backward(each.strategy, compiled=candidates.settings.training.compiled) for each in own]
    count = candidates.settings.num_microbatches
    costs = CostColumns.of([each.cost for each in own], splits, count)
    begin_s = np.array([each.begins_s for each in candidates.hideable(first)])
    return LayerCosts(
        **(vars(costs) | {"step_s": costs.step_s - begin_s}),
        state_in=np.array([states[each.strategy.mesh, each.policy_in] for each in own], dtype=np.intp),
        state_out=np.array([states[each.strategy.mesh, each.policy_out] for each in own], dtype=np.intp),
        leave_s=np.array([each.cost.copies_s - each.cost.leave_s for each in own]) / count,
        return_s=np.array([each.cost.copies_s - each.cost.return_s for each in own]) / count,
        begin_s=begin_s,
        host_bytes=np.array([each.cost.host_bytes for each in own]),
    )


def _with_returned(candidates: CandidateSet, layers: dict[int, LayerCosts]) -> tuple[LayerCosts, ...]:
    """The costs of every layer of a pipeline, with the bytes of what it puts out for the caller: all microbatches of it
    are kept until the end of the step, when they are joined.
    """
    context, known = candidates.context, dict[tuple[object, ...], LayerCosts]()
    program = context.program

    def with_bytes(layer: Layer, first: int) -> LayerCosts:
        returned = _returned(program, layer)
        places, types = tuple(returned), tuple(returned.values())
        if (first, places, types) not in known:
            size = np.zeros((len(places), len(candidates.by_class[first])))
            for row, (place, tensor) in enumerate(zip(places, types, strict=True)):
                for column, each in enumerate(candidates.by_class[first]):
                    shape = local_shape(tensor.shape, each.strategy.outputs[place], each.strategy.mesh)
                    size[row, column] = math.prod(shape) * itemsize_bytes(tensor.dtype)
            costs = layers[first]
            joined = np.maximum(costs.transient_bytes, size.max(axis=0, initial=0.0))
            own = replace(costs, static_bytes=costs.static_bytes + size.sum(axis=0), transient_bytes=joined)
            known[first, places, types] = own if places else costs
        return known[first, places, types]

    return tuple(map(with_bytes, program.layers, context.classes))


def least_returned_bytes(context: SearchContext) -> float:
    """What a device of a pipeline holds at least for what some layer returns, however it is sharded: all of it, and the
    largest output once more while its microbatches are joined (`_with_returned`).
    """
    program = context.program
    sizes = ([tensor.num_bytes for tensor in _returned(program, layer).values()] for layer in program.layers)
    return max(sum(own) + max(own, default=0) for own in sizes) / context.num_devices


def _returned(program: Program, layer: Layer) -> dict[int, TensorType]:
    """By place, what a layer puts out for the caller."""
    names = {*program.outputs, *program.whole_results}
    return {place: program.type_of(name) for place, name in enumerate(layer.outputs) if name in names}


def _transfers(candidates: CandidateSet, layers: dict[int, LayerCosts]) -> dict[tuple[int, int], Transfer]:
    """By producer and reader, the transfers that cost anything; equal matrices are the same object."""
    between: defaultdict[tuple[int, int], list[BoundaryValue]] = defaultdict(list)
    for crossing in candidates.crossings:
        between[crossing.producer, crossing.reader].append(crossing)
    classes = candidates.context.classes
    known: dict[tuple[object, ...], tuple[Array, Array]] = {}
    transfers: dict[tuple[int, int], Transfer] = {}
    for (producer, reader), crossings in between.items():
        ends = classes[producer], classes[reader]
        key = (*ends, *(each.signature for each in crossings))
        if key not in known:
            known[key] = _transfer_matrices(candidates, layers[ends[0]], layers[ends[1]], crossings)
        if any(matrix.any() for matrix in known[key]):
            transfers[producer, reader] = Transfer(producer, reader, *known[key])
    return transfers


def _transfer_matrices(
    candidates: CandidateSet, producer: LayerCosts, reader: LayerCosts, crossings: list[BoundaryValue]
) -> tuple[Array, Array]:
    settings, count = candidates.settings, len(candidates.states)
    sources, targets = np.unique(producer.state_out), np.unique(reader.state_in)
    total = np.zeros((2, count, count))
    for crossing in crossings:
        total[:, sources[:, None], targets] += transfer_matrices(
            settings.prices, crossing.tensor, crossing.requires_grad and settings.training.is_training, 1,
            _places(candidates, crossing, sources), _places(candidates, crossing, targets),
        )  # fmt: skip
    return total[0], total[1]


def _places(candidates: CandidateSet, crossing: BoundaryValue, numbers: Indices) -> list[MeshLayout]:
    """The mesh and layout that the value has in each of these boundary states."""
    states = list(candidates.states)
    chosen = [states[int(number)] for number in numbers]
    program = candidates.settings.program
    return [(m, arrival_layout(program, crossing.value, policy, m, crossing.tensor)) for m, policy in chosen]


def _sends(candidates: CandidateSet, layers: dict[int, LayerCosts]) -> Iterator[PipelineSend]:
    readers: defaultdict[str, list[BoundaryValue]] = defaultdict(list)
    for crossing in candidates.crossings:
        readers[crossing.value].append(crossing)
    known: dict[tuple[object, ...], tuple[Array, Array, Array]] = {}
    for crossings in readers.values():
        first = crossings[0]
        producer = candidates.context.classes[first.producer]
        key = (producer, first.output, first.tensor, first.requires_grad)
        if key not in known:
            known[key] = _send_costs(candidates, np.unique(layers[producer].state_out), first)
        yield PipelineSend(first.producer, tuple(each.reader for each in crossings), *known[key])


def _send_costs(candidates: CandidateSet, states: Indices, crossing: BoundaryValue) -> tuple[Array, Array, Array]:
    settings, context = candidates.settings, candidates.context
    seconds, num_bytes = np.zeros((2, len(candidates.states)))
    for state, (mesh, layout) in zip(states, _places(candidates, crossing, states), strict=True):
        shape = local_shape(crossing.tensor.shape, layout, mesh)
        num_bytes[state] = math.prod(shape) * itemsize_bytes(crossing.tensor.dtype)
        seconds[state] = settings.prices.collective_s("send", context.pipeline_axis, float(num_bytes[state]))
    has_gradient = crossing.requires_grad and settings.training.is_training
    return seconds, seconds * has_gradient, num_bytes


def _tied_parameters(candidates: CandidateSet) -> Iterator[TiedParameter]:
    layers = candidates.context.program.layers
    for name, cost in candidates.shared_costs.items():
        readers = tuple(index for index, layer in enumerate(layers) if name in layer.state)
        yield TiedParameter(readers, cost.memory.persistent_bytes, cost.step_s, cost.exchange_s)
