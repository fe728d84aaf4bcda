"""What a search across layers works on: for a number of microbatches and a storage of shared parameters, the candidates
of every layer, what lies between layers, and the chain that these make.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError
from autopar.placement import REPLICATE, Axis, Layout, refine_layout, refine_mesh, shard
from autopar.plan import Decisions, Stage
from autopar.program import Layer, Program
from autopar.search.assembly import decide
from autopar.search.boundary import Policy, arrival_layout, boundary_layout, has_whole_boundary
from autopar.search.candidates import Candidate, Scene, layer_candidates
from autopar.search.chain import Chain, LayerTable, Paths, Skip, fastest_paths, path_costs, unbeaten
from autopar.search.constraints import Constraints, LayerDemands
from autopar.search.meshes import mesh_shapes
from autopar.search.request import SearchRequest
from autopar.step.boundary_values import Crossing, crossing_matrix, find_crossings
from autopar.step.layer_cost import SharedStorage, is_differentiable
from autopar.step.layer_facts import LayerFacts
from autopar.step.prices import Prices
from autopar.step.shared_parameters import SharedCost, shared_costs

__all__ = ["CandidateCache", "Setting", "Task", "Trial", "make_setting", "make_trial", "shared_menu"]

Array = npt.NDArray[np.float64]
State = tuple[tuple[int, ...], Policy]
_ENOUGH_MESHES = 6
_WIDEST_INNER = 4  # nodes that the inner axes of a device group's meshes span at most

CandidateCache = dict[tuple[object, ...], tuple[Candidate, ...]]


class Task:
    """One search: what is asked, and what its trials share.

    `notes` grows while it works.  `settled` has for each class of layers the demands that its first trial could
    meet: later trials must meet as much, so that more microbatches never excuse a plan from a constraint.
    """

    def __init__(
        self,
        program: Program,
        num_devices: int,
        prices: Prices,
        request: SearchRequest,
        constraints: Constraints,
        demands: tuple[LayerDemands, ...],
        num_groups: int = 1,
    ) -> None:
        """`num_devices` are those that every layer runs on, `demands` has one entry per layer; see `search`."""
        self.program = program
        self.num_devices = num_devices
        self.prices = prices
        self.request = request
        self.constraints = constraints
        self.demands = demands
        self.num_groups = num_groups
        self.notes: list[str] = []
        self.settled: dict[int, LayerDemands] = {}
        self.facts = LayerFacts()

    @property
    def pipeline_axis(self) -> Axis:
        """The axis on which device groups talk to each other."""
        return Axis(self.num_groups, self.num_devices)

    @cached_property
    def meshes(self) -> tuple[tuple[int, ...], ...]:
        """The meshes that layers may use."""
        mesh = self.constraints.get("mesh")
        if isinstance(mesh, tuple):
            return (tuple(int(size) for size in mesh),)
        # A demanded degree for each of several names, and room for an axis more, takes as many axes.
        demanded = max(sum(degree > 1 for _, degree in demands.degrees) for demands in self.demands)
        max_axes = max(self.request.max_axes, min(3, demanded + 1))
        shapes = mesh_shapes(self.num_devices, self.prices.devices_per_node, max_axes)
        if self.num_groups == 1 or len(shapes) <= _ENOUGH_MESHES:
            return shapes
        # With many groups there are many settings: on each, only usual sizes of the inner axes.
        widest = _WIDEST_INNER * self.prices.devices_per_node
        return tuple(shape for shape in shapes if math.prod(shape[1:]) <= widest)

    @cached_property
    def shared_mesh(self) -> tuple[int, ...]:
        """The refinement of all meshes."""
        return refine_mesh(*self.meshes)

    @cached_property
    def shared_names(self) -> tuple[str, ...]:
        """Parameters that several layers read, or whose storage is the caller's."""
        count: dict[str, int] = {}
        for layer in self.program.layers:
            for name in layer.held:
                count[name] = count.get(name, 0) + 1
        return tuple(
            name
            for name, times in count.items()
            if (times > 1 or name in self.stored) and self.program.values[name].role == "parameter"
        )

    @cached_property
    def stored(self) -> dict[str, Layout]:
        """The parameters whose storage is the caller's, by value, with their layout on `shared_mesh`."""
        wanted = {name: (mesh, layout) for name, mesh, layout in self.request.stored}
        for mesh in dict.fromkeys(mesh for mesh, _ in wanted.values()):
            if not _is_refined(mesh, self.shared_mesh):
                raise ConstraintError(
                    f"parameters are kept on a mesh {'x'.join(map(str, mesh))}, but the axes of plans are merged from "
                    f"{'x'.join(map(str, self.shared_mesh))}: keep them on a mesh with axes of those sizes, in order"
                )
        return {
            value: refine_layout(wanted[name][1], wanted[name][0], self.shared_mesh)
            for value, name in self.program.parameters.items()
            if name in wanted
        }

    @cached_property
    def ideal_s(self) -> float:
        """Seconds of a step if all devices of all groups shared all computing evenly and nothing else took time."""
        return float(self.ideal_layers_s.sum()) / self.num_groups

    @cached_property
    def ideal_layers_s(self) -> Array:
        """Forward and backward seconds of every layer, (2, layers), if the devices of a group shared all computing."""
        types = self.program.type_of
        of_kind: dict[int, tuple[float, float]] = {}
        for layer in self.program.kinds:
            times = [
                self.prices.op_s(
                    op, tuple(map(types, op.operands)), tuple(map(types, op.results)),
                    is_differentiable(self.program, op, self.request.training),
                )
                for op in layer.ops
            ]  # fmt: skip
            of_kind[layer.kind] = (sum(each.forward_s for each in times), sum(each.backward_s for each in times))
        return np.array([of_kind[layer.kind] for layer in self.program.layers]).T / self.num_devices

    @cached_property
    def memory_price_s_per_byte(self) -> float:
        """A usual price of memory: half of the ideal step time for all of a device's memory."""
        return 0.5 * self.ideal_s / self.prices.memory_bytes

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
            tuple((name in self.shared_names, self.stored.get(name)) for name in layer.held),
            tuple((name in program.inputs, has_whole_boundary(program, name)) for name in layer.inputs),
            tuple((name in crossing, has_whole_boundary(program, name)) for name in layer.outputs),
        )


def _is_refined(mesh: tuple[int, ...], fine: tuple[int, ...]) -> bool:
    """Whether the axes of `mesh` are merged from those of `fine`."""
    try:
        return refine_mesh(mesh, fine) == refine_mesh(fine)
    except ValueError:
        return False


def _rows(program: Program) -> Iterator[int]:
    """Rows of each input."""
    shapes = (program.type_of(name).shape for name in program.inputs)
    return (shape[0] for shape in shapes if shape)


def shared_menu(task: Task) -> Iterator[SharedStorage]:
    """Where shared parameters may be stored: where the caller keeps them, else all whole, all cut in dim 0 or dim 1."""
    mesh = task.shared_mesh
    seen: list[SharedStorage] = []
    for dim in (-1, 0, 1) if task.shared_names else (-1,):
        shared = {name: (mesh, task.stored.get(name) or _shared_layout(task, name, dim)) for name in task.shared_names}
        if shared not in seen:
            seen.append(shared)
            yield shared


def _shared_layout(task: Task, name: str, dim: int) -> Layout:
    return boundary_layout(_wish(dim, task.shared_mesh), task.program.type_of(name), task.shared_mesh)


def _wish(dim: int, mesh: tuple[int, ...]) -> Layout:
    return (shard(dim) if dim >= 0 else REPLICATE,) * len(mesh)


@dataclass(frozen=True, eq=False)
class Setting:
    """The candidates of all layers for one number of microbatches and storage of shared parameters.

    `states` numbers the boundary states, `tables` has the numbers of each class of layers, `crossings` all values that
    cross from layer to layer, `shared_costs` what each shared parameter takes.
    """

    task: Task
    scene: Scene
    by_class: dict[int, tuple[Candidate, ...]]
    crossings: tuple[Crossing, ...]
    states: dict[State, int]
    tables: dict[int, LayerTable]
    shared_costs: dict[str, SharedCost]

    @property
    def candidates(self) -> tuple[tuple[Candidate, ...], ...]:
        """The candidates of every layer."""
        return tuple(self.by_class[first] for first in self.task.classes)

    def decisions(self, path: Sequence[int], stages: tuple[Stage, ...] = (), schedule: str = "") -> Decisions:
        """Those of the candidates of these indices, one per layer."""
        chosen = [each[index] for each, index in zip(self.candidates, path, strict=True)]
        world_size = self.task.num_devices * self.task.num_groups
        return decide(self.scene, chosen, self.task.shared_mesh, world_size, stages, schedule)

    def chains(self) -> tuple[Chain, Chain]:
        """All layers in one chain, on the same devices; and the same with seconds less what is hidden by estimate."""
        whole = self._chain()
        visible: dict[int, LayerTable] = {}
        for first, candidates in self.by_class.items():
            hidden_s = np.array([candidate.hidden_s for candidate in candidates])
            table = self.tables[first]
            visible[first] = replace(table, time_s=table.time_s - hidden_s) if hidden_s.any() else table
        return whole, replace(whole, tables=tuple(visible[first] for first in self.task.classes))

    def _chain(self) -> Chain:
        moves, skips = _moves(self)
        return Chain(
            len(self.states), tuple(self.tables[first] for first in self.task.classes), moves, skips,
            sum(cost.step_s for cost in self.shared_costs.values()),
            sum(cost.memory.persistent_bytes for cost in self.shared_costs.values()),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting and the paths of its chain; `visible_s` has their seconds less what is hidden by estimate."""

    setting: Setting
    paths: Paths
    visible_s: Array

    def decisions(self, path: int) -> Decisions:
        """Those of the path of this index."""
        return self.setting.decisions(self.paths.paths[path].tolist())

    @cached_property
    def front(self) -> tuple[int, ...]:
        """The paths that no other beats in bytes and in seconds, hidden ones included or not; the smallest first."""
        peak = self.paths.peak_bytes
        found = {*unbeaten(self.paths.time_s, peak), *unbeaten(self.visible_s, peak)}
        return tuple(sorted(found, key=lambda path: (peak[path], path)))


def make_trial(
    task: Task, count: int, factors: dict[int, tuple[str, ...]], shared: SharedStorage, cache: CandidateCache
) -> Trial | None:
    """The trial, or None if some layer has no strategy with so many microbatches that meets what is settled."""
    setting = make_setting(task, count, factors, shared, cache)
    if setting is None:
        return None
    whole, visible = setting.chains()
    paths = fastest_paths(whole)
    if any(table is not other for table, other in zip(whole.tables, visible.tables, strict=True)):
        paths.add(*fastest_paths(visible, mixes=False).paths)
    return Trial(setting, paths, path_costs(visible, np.stack(paths.paths))[:, 0])


def make_setting(
    task: Task, count: int, factors: dict[int, tuple[str, ...]], shared: SharedStorage, cache: CandidateCache
) -> Setting | None:
    """The setting, or None as `make_trial`."""
    scene = Scene(
        task.program, task.prices, task.request.training, count, factors, shared, task.memory_price_s_per_byte,
        min(count, task.num_groups),
    )  # fmt: skip
    by_class = {first: _class_candidates(task, scene, first, cache) for first in dict.fromkeys(task.classes)}
    if not all(by_class.values()):
        return None
    states: dict[State, int] = {}
    tables = {first: _table(candidates, states) for first, candidates in by_class.items()}
    crossings = find_crossings(task.program, factors, count)
    return Setting(
        task,
        scene,
        by_class,
        crossings,
        states,
        tables,
        shared_costs(scene.program, scene.shared, scene.prices, scene.training, task.num_devices, task.num_groups),
    )


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
            missed = [each for each in demands.degrees if each not in wanted.degrees]
            given_up = [f"{name}={degree}" for name, degree in missed]
            if given_up:
                if not task.request.any_batch:
                    _check_batch(task.program, dict(missed).get("data", 1), scene.num_microbatches)
                task.notes.append(f"layers like {layer.name} can't use {', '.join(given_up)}: ignored for these layers")
            task.settled[first] = wanted
            return found
    raise ConstraintError(f"no strategy for layer {layer.name} meets the constraints: relax those that match it")


def _check_batch(program: Program, degree: int, num_microbatches: int) -> None:
    """Raise `ConstraintError` if the rows of no input divide over a data degree."""
    pieces = degree * num_microbatches
    if degree == 1 or any(rows % pieces == 0 for rows in _rows(program)):
        return
    count = program.batch_size // num_microbatches
    where = f" in each of {num_microbatches} microbatches" if num_microbatches > 1 else ""
    raise ConstraintError(
        f"constraint 'data={degree}': a batch of {count} row{'s' * (count != 1)}{where} does not divide over {degree} "
        f"devices. Pass a batch that is a multiple of {pieces} (DataLoader(drop_last=True) leaves out a smaller last "
        "one), or another degree"
    )


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


def _moves(setting: Setting) -> tuple[tuple[Array, ...], tuple[Skip, ...]]:
    """Matrices of boundary moves between neighbours, and the skips; equal ones are the same object."""
    task, scene, tables, states = setting.task, setting.scene, setting.tables, setting.states
    between: dict[tuple[int, int], list[Crossing]] = {}
    for crossing in setting.crossings:
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
