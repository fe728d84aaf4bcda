"""The search across layers: candidates of every layer, then the fastest path that fits.

For every number of microbatches that is exact and every way to store shared parameters there is one chain
of layers (`chain`); all their paths together are the pool from which the fastest that fits is taken.  The
pool does not depend on the memory limit, so more memory never gives a slower plan.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError
from autopar.placement import REPLICATE, Layout, local_shape, refine_mesh, shard
from autopar.plan import Plan
from autopar.program import Layer, Program
from autopar.search.assembly import Choice, assemble_plan
from autopar.search.boundary import Policy, arrival_layout, boundary_layout, has_whole_boundary
from autopar.search.candidates import Candidate, Scene, layer_candidates
from autopar.search.chain import Chain, LayerTable, Paths, Skip, fastest_paths
from autopar.search.constraints import Constraints, LayerDemands, demands_on, parse_constraints
from autopar.search.crossings import Crossing, crossing_matrix, find_crossings
from autopar.search.infeasibility import describe_infeasible
from autopar.search.layer_cost import SharedStorage, optimizer_s_per_element
from autopar.search.layer_memory import ParameterMemory, parameter_memory
from autopar.search.meshes import mesh_shapes
from autopar.search.microbatch import TimeAssignment, time_assignment
from autopar.search.prices import Prices
from autopar.search.request import SearchRequest

__all__ = ["search"]

Array = npt.NDArray[np.float64]
State = tuple[tuple[int, ...], Policy]

_WORTH = 0.01  # share of time or memory that more microbatches must gain for still more to be tried


def search(program: Program, world_size: int, prices: Prices, request: SearchRequest) -> Plan:
    """The fastest plan for `program` on `world_size` devices that fits and meets the request.

    Raises:
        ConstraintError: a constraint can't be read, contradicts another, matches nothing or can't be met.
        InfeasibleError: no plan fits; the message names the smallest memory that would do, and what fills it.
        MissingPriceError: an op or collective has no price.
    """
    started = time.perf_counter()
    constraints = parse_constraints(request.constraints, world_size)
    task = Task(program, world_size, prices, request, constraints, demands_on(program, constraints))
    limit = prices.memory_bytes if request.memory_limit_bytes is None else request.memory_limit_bytes
    trials = tuple(_trials(task))
    best = _best_trial(trials, limit)
    if best is None:
        raise describe_infeasible([trial.smallest() for trial in trials], limit, task.notes)
    lower_s = min(trial.paths.lower_bound_s(limit) for trial in trials)
    if best.scene.num_microbatches > 1:
        task.notes.append(_note_outputs(program))
    plan = assemble_plan(best.choice(best.paths.best(limit)), program, prices, request.training)
    return replace(
        plan,
        memory_limit_bytes=float(limit),
        optimality_gap=max(0.0, plan.step_time_s / lower_s - 1) if lower_s > 0 else 0.0,
        constraints=request.constraints,
        notes=(*program.notes, *filter(None, dict.fromkeys(task.notes))),
        planning_s=(("search", time.perf_counter() - started),),
    )


def _note_outputs(program: Program) -> str:
    """With microbatches only the loss can be differentiated."""
    others = ", ".join(dict.fromkeys(name for name in program.outputs if name != program.loss))
    return f"in microbatches only the loss carries gradients; these outputs don't: {others}" if others else ""


class Task:
    """One search: what is asked, and what its trials share.

    `notes` grows while it works.  `settled` has for each class of layers the demands that its first trial could
    meet: later trials must meet as much, so that more microbatches never excuse a plan from a constraint.
    """

    def __init__(
        self,
        program: Program,
        world_size: int,
        prices: Prices,
        request: SearchRequest,
        constraints: Constraints,
        demands: tuple[LayerDemands, ...],
    ) -> None:
        """See `search`; `demands` has one entry per layer."""
        self.program = program
        self.world_size = world_size
        self.prices = prices
        self.request = request
        self.constraints = constraints
        self.demands = demands
        self.notes: list[str] = []
        self.settled: dict[int, LayerDemands] = {}

    @cached_property
    def meshes(self) -> tuple[tuple[int, ...], ...]:
        """The meshes that layers may use."""
        mesh = self.constraints.get("mesh")
        if isinstance(mesh, tuple):
            return (mesh,)
        # A demanded degree for each of several names, and room for an axis more, takes as many axes.
        demanded = max(sum(degree > 1 for _, degree in demands.degrees) for demands in self.demands)
        max_axes = max(self.request.max_axes, min(3, demanded + 1))
        return mesh_shapes(self.world_size, self.prices.devices_per_node, max_axes)

    @cached_property
    def shared_mesh(self) -> tuple[int, ...]:
        """The refinement of all meshes."""
        return refine_mesh(*self.meshes)

    @cached_property
    def shared_names(self) -> tuple[str, ...]:
        """Parameters that several layers read."""
        count: dict[str, int] = {}
        for layer in self.program.layers:
            for name in layer.held:
                count[name] = count.get(name, 0) + 1
        return tuple(n for n, times in count.items() if times > 1 and self.program.values[n].role == "parameter")

    @cached_property
    def memory_price_s_per_byte(self) -> float:
        """A usual price of memory: half of the ideal step time for all of a device's memory."""
        types = self.program.type_of
        seconds = 0.0
        for layer in self.program.kinds:
            repeats = sum(other.kind == layer.kind for other in self.program.layers)
            for op in layer.ops:
                differentiable = any(self.program.values[name].requires_grad for name in op.results)
                each = self.prices.op_s(
                    op, tuple(map(types, op.operands)), tuple(map(types, op.results)), differentiable
                )
                seconds += repeats * (each.forward_s + each.backward_s)
        return 0.5 * seconds / self.world_size / self.prices.memory_bytes

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Per layer, the index of the first layer that has the same candidates."""
        first: dict[tuple[object, ...], int] = {}
        return tuple(first.setdefault(self._signature(index), index) for index in range(len(self.program.layers)))

    def _signature(self, index: int) -> tuple[object, ...]:
        layer, program = self.program.layers[index], self.program
        crossing = {name for other in program.layers for name in other.inputs}
        return (
            layer.kind,
            self.demands[index],
            tuple(name in self.shared_names for name in layer.held),
            tuple((name in program.inputs, has_whole_boundary(program, name)) for name in layer.inputs),
            tuple((name in crossing, has_whole_boundary(program, name)) for name in layer.outputs),
        )


def _microbatch_counts(task: Task) -> Iterator[tuple[int, TimeAssignment]]:
    """Numbers of microbatches that are exact, with how."""
    forced = task.constraints.get("microbatches")
    batch = _batch_size(task.program)
    if isinstance(forced, int):
        found = time_assignment(task.program, forced)
        if isinstance(found, str):
            raise ConstraintError(f"constraint 'microbatches={forced}': {found}")
        yield forced, found
        return
    count = 1
    while count <= task.request.max_microbatches and (count == 1 or batch % count == 0):
        found = time_assignment(task.program, count)
        if isinstance(found, str):
            task.notes.append(
                f"no gradient accumulation: {found}" if count == 2 else f"at most {count // 2} microbatches: {found}"
            )
            return
        yield count, found
        count *= 2 if task.request.training.is_training else task.request.max_microbatches + 1


def _batch_size(program: Program) -> int:
    shapes = [program.type_of(name).shape for name in program.inputs]
    return next((shape[0] for shape in shapes if shape), 1)


def _trials(task: Task) -> Iterator[Trial]:
    """Trials with ever more microbatches, until they add (next to) nothing whatever the limit is."""
    cache: dict[tuple[object, ...], tuple[Candidate, ...]] = {}
    known: list[Trial] = []
    for count, assignment in _microbatch_counts(task):
        made = [_make_trial(task, count, dict(assignment.factors), shared, cache) for shared in _shared_menu(task)]
        trials = [trial for trial in made if trial is not None]
        if known and not any(_adds(trial, known) for trial in trials):
            return
        yield from trials
        known += trials


def _adds(trial: Trial, known: list[Trial]) -> bool:
    """Whether a path of `trial` is faster than all known paths that take no more memory, tolerances apart."""
    time = np.concatenate([other.paths.time_s for other in known])
    peak = np.concatenate([other.paths.peak_bytes for other in known])
    order = np.argsort(peak)
    fastest = np.concatenate([[np.inf], np.minimum.accumulate(time[order])])
    allowed = np.array(trial.paths.peak_bytes) * (1 + _WORTH)
    rivals = fastest[np.searchsorted(peak[order], allowed, side="right")]
    return bool((np.array(trial.paths.time_s) < rivals * (1 - _WORTH)).any())


def _best_trial(trials: tuple[Trial, ...], limit: float) -> Trial | None:
    fitting = [(trial.paths.time_s[index], number) for number, trial in enumerate(trials)
               if (index := trial.paths.best(limit)) >= 0]  # fmt: skip
    return trials[min(fitting)[1]] if fitting else None


def _shared_menu(task: Task) -> Iterator[SharedStorage]:
    """Where shared parameters may be stored: all whole, all cut in dim 0, all cut in dim 1."""
    mesh = task.shared_mesh
    seen: list[SharedStorage] = []
    for dim in (-1, 0, 1) if task.shared_names else (-1,):
        shared = {
            name: (mesh, boundary_layout(_wish(dim, mesh), task.program.type_of(name), mesh))
            for name in task.shared_names
        }
        if shared not in seen:
            seen.append(shared)
            yield shared


def _wish(dim: int, mesh: tuple[int, ...]) -> Layout:
    return (shard(dim) if dim >= 0 else REPLICATE,) * len(mesh)


@dataclass(frozen=True, eq=False)
class Trial:
    """One chain (a number of microbatches, a storage of shared parameters), its candidates and paths."""

    task: Task
    scene: Scene
    candidates: tuple[tuple[Candidate, ...], ...]
    crossings: tuple[Crossing, ...]
    shared_cost: tuple[float, ParameterMemory]
    paths: Paths

    def choice(self, path: int) -> Choice:
        """The path of this index as candidates."""
        indices: list[int] = self.paths.paths[path].tolist()
        chosen = tuple(each[i] for each, i in zip(self.candidates, indices, strict=True))
        return Choice(
            self.scene, chosen, self.crossings, self.task.shared_mesh, self.task.world_size, self.shared_cost,
            _batch_size(self.task.program),
        )  # fmt: skip

    def smallest(self) -> Choice:
        """The path that takes the least memory."""
        return self.choice(self.paths.smallest())


def _make_trial(
    task: Task,
    count: int,
    factors: dict[int, tuple[str, ...]],
    shared: SharedStorage,
    cache: dict[tuple[object, ...], tuple[Candidate, ...]],
) -> Trial | None:
    """The trial, or None if some layer has no strategy with so many microbatches that meets what is settled."""
    program, training = task.program, task.request.training
    scene = Scene(program, task.prices, training, count, factors, shared, task.memory_price_s_per_byte)
    by_class = {first: _class_candidates(task, scene, first, cache) for first in dict.fromkeys(task.classes)}
    if not all(by_class.values()):
        return None
    crossings = find_crossings(program, factors, count)
    states: dict[State, int] = {}
    tables = {first: _table(candidates, states) for first, candidates in by_class.items()}
    shared_cost = _shared_cost(task, scene)
    moves, skips = _moves(task, scene, crossings, tables, states)
    chain = Chain(
        len(states), tuple(tables[first] for first in task.classes), moves, skips, shared_cost[0],
        shared_cost[1].persistent_bytes,
    )  # fmt: skip
    candidates = tuple(by_class[first] for first in task.classes)
    return Trial(task, scene, candidates, crossings, shared_cost, fastest_paths(chain))


def _class_candidates(
    task: Task, scene: Scene, first: int, cache: dict[tuple[object, ...], tuple[Candidate, ...]]
) -> tuple[Candidate, ...]:
    """All candidates of a class of layers; demands that no mesh can meet are given up, with a note.

    Empty if what the first trial settled on can't be met in this one.
    """
    layer = task.program.layers[first]
    relevant = tuple((name, scene.shared[name]) for name in layer.held if name in scene.shared)
    key = (first, scene.num_microbatches, relevant)
    if key not in cache:
        settled = task.settled.get(first)
        cache[key] = (
            _search_class(task, scene, layer, first)
            if settled is None
            else layer_candidates(scene, layer, task.meshes, settled)
        )
    return cache[key]


def _search_class(task: Task, scene: Scene, layer: Layer, first: int) -> tuple[Candidate, ...]:
    demands = task.demands[first]
    for wanted in _relaxed(demands):
        found = layer_candidates(scene, layer, task.meshes, wanted)
        if found:
            given_up = [f"{name}={degree}" for name, degree in demands.degrees if (name, degree) not in wanted.degrees]
            if given_up:
                task.notes.append(f"layers like {layer.name} can't use {', '.join(given_up)}: left on what they can")
            task.settled[first] = wanted
            return found
    raise ConstraintError(f"no strategy for layer {layer.name} meets the constraints: relax those that match it")


def _relaxed(demands: LayerDemands) -> Iterator[LayerDemands]:
    """The demands, then with fewer degrees."""
    for count in range(len(demands.degrees), -1, -1):
        for degrees in itertools.combinations(demands.degrees, count):
            yield replace(demands, degrees=degrees)


def _table(candidates: tuple[Candidate, ...], states: dict[State, int]) -> LayerTable:
    def state(candidate: Candidate, policy: Policy) -> int:
        return states.setdefault((candidate.strategy.mesh, policy), len(states))

    return LayerTable(
        np.array([c.cost.total_s for c in candidates]),
        np.array([c.cost.persistent_bytes for c in candidates]),
        np.array([c.cost.transient_bytes for c in candidates]),
        np.array([state(c, c.policy_in) for c in candidates], dtype=np.intp),
        np.array([state(c, c.policy_out) for c in candidates], dtype=np.intp),
    )


def _moves(
    task: Task,
    scene: Scene,
    crossings: tuple[Crossing, ...],
    tables: dict[int, LayerTable],
    states: dict[State, int],
) -> tuple[tuple[Array, ...], tuple[Skip, ...]]:
    """Matrices of boundary moves between neighbours, and the skips; equal ones are the same object."""
    between: dict[tuple[int, int], list[Crossing]] = {}
    for crossing in crossings:
        between.setdefault((crossing.producer, crossing.reader), []).append(crossing)
    known: dict[tuple[object, ...], Array] = {}
    nothing = np.zeros((len(states), len(states)))

    def matrix(producer: int, reader: int) -> Array:
        crossing = between.get((producer, reader), [])
        if not crossing:
            return nothing
        ends = task.classes[producer], task.classes[reader]
        key = (*ends, *(each.signature for each in crossing))
        if key not in known:
            sources = np.unique(tables[ends[0]].state_out)
            targets = np.unique(tables[ends[1]].state_in)
            known[key] = sum((_move_matrix(scene, c, states, sources, targets) for c in crossing), nothing)
        return known[key]

    last = len(task.program.layers) - 1
    moves = tuple(matrix(index, index + 1) for index in range(last))
    # Many skips are free: what is whole everywhere crosses for nothing.
    skips = tuple(Skip(p, r, matrix(p, r)) for p, r in between if r > p + 1 and matrix(p, r).any())
    return moves, skips


def _move_matrix(
    scene: Scene,
    crossing: Crossing,
    states: dict[State, int],
    sources: npt.NDArray[np.intp],
    targets: npt.NDArray[np.intp],
) -> Array:
    """Seconds to bring one value from each source state to each target state."""
    where = list(states)
    has_gradient = crossing.requires_grad and scene.training.is_training

    def placed(state: int) -> tuple[tuple[int, ...], Layout]:
        mesh, policy = where[state]
        return mesh, arrival_layout(scene.program, crossing.value, policy, mesh, crossing.tensor)

    matrix = np.zeros((len(states), len(states)))
    matrix[np.ix_(sources, targets)] = crossing_matrix(
        scene.prices, crossing.tensor, has_gradient, scene.num_microbatches,
        [placed(int(s)) for s in sources], [placed(int(t)) for t in targets],
    )  # fmt: skip
    return matrix


def _shared_cost(task: Task, scene: Scene) -> tuple[float, ParameterMemory]:
    """Seconds of the optimizer on shared parameters, and their memory: both once for the plan."""
    seconds, parameter, gradient, optimizer = 0.0, 0.0, 0.0, 0.0
    training = scene.training
    for name, (mesh, layout) in scene.shared.items():
        value = task.program.values[name]
        stored = math.prod(local_shape(value.type.shape, layout, mesh))
        memory = parameter_memory(value.type.dtype, stored, stored, 0, value.requires_grad, training)
        parameter += memory.parameter_bytes
        gradient += memory.gradient_bytes
        optimizer += memory.optimizer_bytes
        if value.requires_grad and training.is_training:
            rate = optimizer_s_per_element(task.program, value.type.dtype, task.world_size, task.prices, training)
            seconds += stored * rate
    return seconds, ParameterMemory(parameter, gradient, optimizer)
