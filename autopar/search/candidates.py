"""The candidates of a layer: strategies that may be part of a good plan.

For a mesh, the search inside a layer is solved exactly for a few ZeRO levels, ways to recompute and prices
of memory (`_SOLVED`).  Each strategy found is priced again for every other ZeRO level, set of storage axes
(HSDP) and way to recompute; those that another candidate between the same boundaries beats in time and
memory are dropped.  A pair of boundary policies is dropped as well if another pair, boundary moves
included, is faster at the same price of memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from autopar.ops import family_of
from autopar.placement import REPLICATE, Axis, Layout
from autopar.plan import LayerStrategy
from autopar.prediction import LayerCost
from autopar.program import Layer, Op, Option, Program
from autopar.search.boundary import Policy, arrival_layout
from autopar.search.constraints import LayerDemands
from autopar.search.labels import DEGREE_LABELS, axis_labels, weight_operands
from autopar.search.layer_problem import Allowed, LayerProblem, LayerSolutions, build_problem, solve_problem
from autopar.search.storage import storage_layout
from autopar.step.boundary_values import crossing_matrix
from autopar.step.layer_cost import (
    SharedStorage,
    TrainingSpec,
    add_storage,
    own_training,
    running_costs,
    storage_cost,
    stored_collectives,
)
from autopar.step.local_layer import PlacedLayer
from autopar.step.overlap_estimate import Carried, carried, hidden_s
from autopar.step.prices import Prices
from autopar.step.value_flows import find_flows, time_view

__all__ = ["Candidate", "Scene", "layer_candidates"]

Array = npt.NDArray[np.float64]
Fact = TypeVar("Fact")

# Per mesh axis the degree that it must serve ("" for none that is demanded).
Roles = tuple[str, ...]


class _Solved(NamedTuple):
    """What is solved: ZeRO level, share of the price of memory, how to recompute, and whether the collectives of
    parameters cost only what they take from compute beside them.
    """

    zero: int
    weight: float
    recompute: str
    hides: bool = False


_SOLVED = (_Solved(0, 0.0, "none"), _Solved(3, 0.0, "none"), _Solved(3, 1.0, "none"))
# Where compute hides them, sharded storage and its optimizer are worth more than sums of seconds say.
_SOLVED_HIDING = (_Solved(0, 0.0, "none"), _Solved(1, 0.0, "none", hides=True), _Solved(3, 1.0, "none"))
# With several microbatches in flight, gathering for each of them is seldom worth its while.
_SOLVED_IN_FLIGHT = (_Solved(0, 0.0, "none"), _Solved(1, 1.0, "none", hides=True), _Solved(3, 1.0, "none"))

# A strategy is dropped if another with boundary moves is as fast, moves being discounted by this share of
# the layer's best time: what would gain less is not worth its place.
_DISCOUNT = 0.002


@dataclass(frozen=True)
class Candidate:
    """A strategy of `layer` (and all like it) with its cost, and the boundary policies around it.

    `hidden_s` estimates how much of the cost's seconds compute hides (`hiding`).
    """

    layer: Layer
    policy_in: Policy
    policy_out: Policy
    strategy: LayerStrategy
    cost: LayerCost
    hidden_s: float = 0.0


@dataclass(frozen=True)
class Scene:
    """What all layers of a search share.

    Args:
        program: the program.
        prices: the prices.
        training: how it is trained.
        num_microbatches: into how many the batch is cut.
        time: layer kind -> per op, the factor that microbatches split.
        shared: where parameters that several layers read are stored.
        memory_price_s_per_byte: a usual price of memory, to look for strategies that save it.
        in_flight: how many microbatches are usually between forward and backward; more than one in a pipeline.
    """

    program: Program
    prices: Prices
    training: TrainingSpec
    num_microbatches: int
    time: dict[int, tuple[str, ...]]
    shared: SharedStorage
    memory_price_s_per_byte: float
    in_flight: int = 1


def layer_candidates(
    scene: Scene, layer: Layer, meshes: tuple[tuple[int, ...], ...], demands: LayerDemands
) -> tuple[Candidate, ...]:
    """The candidates of `layer` on all `meshes` that meet `demands`; empty if there are none."""
    blocks = [
        _Block(_build(scene, layer, mesh, demands, roles), roles)
        for mesh in meshes
        for roles in _role_choices(mesh, demands)
    ]
    found: list[_Draft] = []
    known: dict[tuple[object, ...], list[_Stored]] = {}
    for placed, strategy, policies in _solve(scene, layer, blocks, demands):
        found.extend(_variants(scene, placed, strategy, policies, demands, known))
    return tuple(draft.finish(layer) for draft in _drop_dominated(found, scene.in_flight))


@dataclass(frozen=True)
class _Block:
    """The layer's problem on one mesh, and what its axes must do."""

    problem: LayerProblem
    roles: Roles


def _build(scene: Scene, layer: Layer, mesh: tuple[int, ...], demands: LayerDemands, roles: Roles) -> LayerProblem:
    return build_problem(
        scene.program, layer, mesh, prices=scene.prices, training=scene.training,
        num_microbatches=scene.num_microbatches, time=scene.time[layer.kind],
        allowed=_allowed(scene, layer, mesh, demands, roles), shared_storage=scene.shared,
    )  # fmt: skip


def _role_choices(mesh: tuple[int, ...], demands: LayerDemands) -> Iterator[Roles]:
    """Every way to give the demanded degrees to axes."""
    wanted = dict(demands.degrees)
    for roles in itertools.product(("", *wanted), repeat=len(mesh)):
        product = dict.fromkeys(wanted, 1)
        for role, size in zip(roles, mesh, strict=True):
            if role:
                product[role] *= size
        if product == wanted and not any(role and size == 1 for role, size in zip(roles, mesh, strict=True)):
            yield roles


def _allowed(scene: Scene, layer: Layer, mesh: tuple[int, ...], demands: LayerDemands, roles: Roles) -> Allowed | None:
    """Which options the demands leave; with microbatches, what is cut in time later stays whole."""
    program = scene.program
    whole = {layer.held[position] for position in demands.whole}
    late = _cut_late(scene, layer)
    if not any(roles) and not demands.degrees and not whole and not late:
        return None
    other = {name for name, _ in demands.degrees}

    def allowed(op: Op, axis: int, option: Option) -> bool:
        if mesh[axis] == 1:
            return True
        placements = zip(op.operands, option.operands, strict=True)
        if any(name in whole and placement.is_shard for name, placement in placements):
            return False
        if any(n in late and p.kind != "R" for n, p in zip(op.results, option.results, strict=True)):
            return False
        fits = _fits_role(program, op, option, roles[axis], other)
        return fits and _follows(program, op, option, roles[axis], mesh[axis])

    return allowed


def _fits_role(program: Program, op: Op, option: Option, role: str, demanded: set[str]) -> bool:
    weights = weight_operands(program, op)
    if not weights:
        return True
    cuts = any(option.operands[position].is_shard for position in weights)
    if role == "tensor":
        can_cut = any(o.operands[position].is_shard for o in op.options for position in weights)
        return cuts or not can_cut
    return not cuts if role or "tensor" in demanded else True


def _follows(program: Program, op: Op, option: Option, role: str, size: int) -> bool:
    """Whether the option cuts the activations' dim of this role, if one of the op's options does."""
    computed = any(program.values[name].role in ("op", "input") for name in op.operands)
    dims = _role_dims(program, op, role)
    if not dims or not computed or not program.values[op.results[0]].requires_grad:
        return True
    weights = weight_operands(program, op)

    def cuts(each: Option) -> bool:
        whole = not any(each.operands[position].is_shard for position in weights)
        result = each.results[0]
        return whole and result.is_shard and result.dim in dims and each.extent % size == 0

    return cuts(option) or not any(map(cuts, op.options))


def _role_dims(program: Program, op: Op, role: str) -> tuple[int, ...]:
    """The dims of the op's result that an axis of this role may cut; none says nothing."""
    num_dims = len(program.type_of(op.results[0]).shape)
    if role == "data":
        return (0,)
    if role == "sequence" and family_of(op.target).is_attention:
        return tuple(range(1, num_dims - 1))  # heads (Ulysses) or queries (context)
    return (1,) if role == "sequence" and num_dims == 3 else ()


def _cut_late(scene: Scene, layer: Layer) -> frozenset[str]:
    """Values without gradient that are whole in time but that some reader reads in microbatches.

    The axis in time lies outside those of devices, so they must be whole on devices as well where they are
    cut.
    """
    if scene.num_microbatches == 1:
        return frozenset()
    flows = find_flows(scene.program, layer)
    view = time_view(layer, flows, scene.time[layer.kind], scene.num_microbatches)
    return frozenset(
        name
        for name, flow in flows.items()
        if not view.values[name].is_shard and any(view.operands[op][mention].is_shard for op, mention in flow.readers)
    )


def _solve(
    scene: Scene, layer: Layer, blocks: list[_Block], demands: LayerDemands
) -> Iterator[tuple[PlacedLayer, LayerStrategy, tuple[Policy, Policy]]]:
    """Distinct strategies of the solved variants, applied, with the policies between which they lie."""
    seen: set[tuple[object, ...]] = set()
    late = _cut_late(scene, layer)
    ends = _find_ends(scene, layer, blocks)
    for zero, weight, recompute, hides in _solved_variants(scene, demands):
        solved = [
            solve_problem(
                block.problem, zero=zero, shard_axes=tuple(range(len(block.problem.mesh))) if zero else (),
                recompute=recompute, memory_weight_s_per_byte=weight * scene.memory_price_s_per_byte,
                in_flight=scene.in_flight, hides=hides,
            )
            for block in blocks
        ]  # fmt: skip
        attempt = _Attempt(scene, layer, demands, blocks, solved, late)
        for number, i, j in _useful_pairs(solved, ends, attempt.suits):
            strategy = attempt.strategy(number, i, j)
            key = (number, i, j, strategy.assignments, strategy.copies)
            if key not in seen:
                seen.add(key)
                placed = solved[number].placed(i, j)
                if late:
                    placed = replace(placed, copies={**placed.copies, **dict(strategy.copies)})
                yield placed, strategy, (solved[number].policies[i], solved[number].policies[j])


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A layer solved on every block for one variant, and the strategies that were read from it."""

    scene: Scene
    layer: Layer
    demands: LayerDemands
    blocks: list[_Block]
    solved: list[LayerSolutions]
    late: frozenset[str]
    known: dict[tuple[int, int, int], LayerStrategy] = field(default_factory=dict[tuple[int, int, int], LayerStrategy])

    def strategy(self, number: int, i: int, j: int) -> LayerStrategy:
        """The strategy of block `number` between its policies i and j."""
        if (number, i, j) not in self.known:
            self.known[number, i, j] = _keep_whole(self.solved[number].strategy(i, j), self.late)
        return self.known[number, i, j]

    def suits(self, number: int, i: int, j: int) -> bool:
        """Whether that strategy does what is demanded."""
        roles = self.blocks[number].roles
        return _meets(self.scene, self.layer, self.strategy(number, i, j), self.demands, roles)


def _solved_variants(scene: Scene, demands: LayerDemands) -> Iterable[_Solved]:
    if not scene.training.is_training:
        return (_Solved(0, 0.0, "none"), _Solved(3, 1.0, "none"))
    neighbours = Axis(2, 1)
    hiding = _SOLVED_HIDING if scene.prices.interference("all_gather", neighbours) < 1 else _SOLVED
    variants = hiding if scene.in_flight == 1 else _SOLVED_IN_FLIGHT
    if demands.recompute:
        variants = tuple(each._replace(recompute=demands.recompute) for each in variants)
    if demands.zero >= 0:
        variants = tuple(each._replace(zero=demands.zero) for each in variants)
    return dict.fromkeys(variants)


def _keep_whole(strategy: LayerStrategy, late: frozenset[str]) -> LayerStrategy:
    whole = (REPLICATE,) * len(strategy.mesh)
    copies = tuple((name, whole if name in late else layout) for name, layout in strategy.copies)
    return replace(strategy, copies=copies)


def _meets(scene: Scene, layer: Layer, strategy: LayerStrategy, demands: LayerDemands, roles: Roles) -> bool:
    """Whether every axis does what its role says, and no other axis does what a degree is demanded of."""
    if not demands.degrees:
        return True
    labels = axis_labels(scene.program, layer, strategy)
    return all(
        label in DEGREE_LABELS[role]
        if role
        else size == 1 or all(label not in DEGREE_LABELS[name] for name, _ in demands.degrees)
        for label, role, size in zip(labels, roles, strategy.mesh, strict=True)
    )


@dataclass(frozen=True)
class _Ends:
    """Moves between the boundary states (block, policy) of a layer, numbered through.

    `before_s` and `behind_s` are the seconds to move what crosses from one state to another; `new_before` and
    `new_behind` say which states are the first of their block with their layouts.
    """

    before_s: Array
    behind_s: Array
    new_before: list[bool]
    new_behind: list[bool]


def _find_ends(scene: Scene, layer: Layer, blocks: list[_Block]) -> _Ends:
    if not blocks:
        return _Ends(np.zeros((0, 0)), np.zeros((0, 0)), [], [])
    free = blocks[0].problem.free_outputs
    before = tuple(name for name in layer.inputs if name not in scene.program.inputs)
    behind = tuple(name for name in layer.outputs if name not in free)
    return _Ends(
        _conversion(scene, blocks, before), _conversion(scene, blocks, behind),
        _are_new(scene, blocks, before), _are_new(scene, blocks, behind),
    )  # fmt: skip


def _layouts(scene: Scene, problem: LayerProblem, name: str) -> list[Layout]:
    tensor = problem.view.value_type(problem.flows[name])
    return [arrival_layout(scene.program, name, p, problem.mesh, tensor) for p in problem.policies]


def _conversion(scene: Scene, blocks: list[_Block], names: tuple[str, ...]) -> Array:
    count = sum(len(block.problem.policies) for block in blocks)
    total = np.zeros((count, count))
    for name in names:
        problem = blocks[0].problem
        flow = problem.flows[name]
        has_gradient = flow.value.requires_grad and scene.training.is_training
        ends = [(block.problem.mesh, layout) for block in blocks for layout in _layouts(scene, block.problem, name)]
        total += crossing_matrix(
            scene.prices, problem.view.value_type(flow), has_gradient, scene.num_microbatches, ends, ends
        )
    return total


def _are_new(scene: Scene, blocks: list[_Block], names: tuple[str, ...]) -> list[bool]:
    found: list[bool] = []
    for block in blocks:
        columns = [_layouts(scene, block.problem, name) for name in names]
        keys = list(zip(*columns, strict=True)) or [()] * len(block.problem.policies)
        found += [keys.index(key) == position for position, key in enumerate(keys)]
    return found


def _useful_pairs(
    solved: list[LayerSolutions], ends: _Ends, suits: Callable[[int, int, int], bool]
) -> Iterator[tuple[int, int, int]]:
    """(block, policy before, policy behind) that suit and that no other such pair, boundary moves included, beats.

    Whether a pair suits is asked only of those that look useful, until all of them do.
    """
    sizes = [len(solutions.policies) for solutions in solved]
    places = [(number, i) for number, size in enumerate(sizes) for i in range(size)]
    objective = _joint_objective(solved, sizes)
    objective[~np.array(ends.new_before, dtype=bool)] = np.inf
    objective[:, ~np.array(ends.new_behind, dtype=bool)] = np.inf
    while np.isfinite(objective).any():
        useful = [tuple(pair) for pair in np.argwhere(_is_unbeaten(objective, ends)).tolist()]
        wrong = [(i, j) for i, j in useful if not suits(*places[i], places[j][1])]
        if not wrong:
            yield from ((*places[i], places[j][1]) for i, j in useful)
            return
        objective[tuple(np.transpose(wrong))] = np.inf


def _joint_objective(solved: list[LayerSolutions], sizes: list[int]) -> Array:
    """The objective of every pair of states; only those of one block can be a pair."""
    objective = np.full((sum(sizes), sum(sizes)), np.inf)
    start = 0
    for solutions, size in zip(solved, sizes, strict=True):
        objective[start : start + size, start : start + size] = solutions.objective_s
        start += size
    return objective


def _is_unbeaten(objective: Array, ends: _Ends) -> npt.NDArray[np.bool_]:
    discount = _DISCOUNT * float(objective.min())
    closed = _min_plus(np.maximum(ends.before_s - discount, 0.0), objective)
    closed = _min_plus(closed, np.maximum(ends.behind_s - discount, 0.0))
    # Strictly faster is what beats: so nothing is dropped in a circle.
    return np.isfinite(objective) & (objective <= closed * (1 + 1e-12))


def _min_plus(first: Array, second: Array) -> Array:
    """``out[i, j] = min over k of first[i, k] + second[k, j]``."""
    return np.stack([(row[:, None] + second).min(axis=0) for row in first])


@dataclass(frozen=True)
class _Stored:
    """One way to store a layer's parameters, and the part of the cost that depends on it."""

    zero: int
    storage: tuple[Layout, ...]
    cost: LayerCost
    carried: tuple[Carried, Carried]


@dataclass(frozen=True)
class _Draft:
    """A candidate before it is known to be of use."""

    policies: tuple[Policy, Policy]
    strategy: LayerStrategy
    stored: _Stored
    recompute: str
    cost: LayerCost
    hidden_s: float

    def finish(self, layer: Layer) -> Candidate:
        stored = self.stored
        strategy = replace(self.strategy, storage=stored.storage, zero=stored.zero, recompute=self.recompute)
        return Candidate(layer, *self.policies, strategy, self.cost, self.hidden_s)


def _variants(
    scene: Scene,
    placed: PlacedLayer,
    strategy: LayerStrategy,
    policies: tuple[Policy, Policy],
    demands: LayerDemands,
    known: dict[tuple[object, ...], list[_Stored]],
) -> Iterator[_Draft]:
    """The strategy with every ZeRO level, set of storage axes and way to recompute that makes a difference.

    Storage and recomputation cost apart from each other: the costs of all pairs come from those of each.
    Storage depends on the mesh and on how compute reads the parameters alone; `known` keeps what was found.
    """
    copies = (placed.copies.get(name) for name in placed.layer.held)
    key = (placed.mesh, *copies)
    if key not in known:
        known[key] = list(_stored_variants(scene, placed, demands))
    running = running_costs(placed, _recompute_variants(scene, demands), scene.prices, scene.training)
    training = own_training(scene.program, placed.layer, scene.training)
    for stored in known[key]:
        for recompute, cost in running.items():
            whole = add_storage(cost, stored.cost)
            hidden = hidden_s(whole, *stored.carried, stored.zero, scene.num_microbatches, training)
            yield _Draft(policies, strategy, stored, recompute, whole, hidden)


def _stored_variants(scene: Scene, base: PlacedLayer, demands: LayerDemands) -> Iterator[_Stored]:
    training = own_training(scene.program, base.layer, scene.training)
    seen: set[tuple[int, tuple[Layout, ...]]] = set()
    for zero, shard_axes in _zero_variants(scene, base.mesh, demands):
        storage = _storage(base, shard_axes, demands)
        level = _effective_zero(base, storage, zero, demands)
        if (level, storage) not in seen:
            seen.add((level, storage))
            placed = replace(base, storage=storage, zero=level)
            stored = tuple(stored_collectives(placed, training))
            cost = storage_cost(placed, stored, scene.prices, scene.training)
            yield _Stored(level, storage, cost, carried(scene.program, stored, scene.prices))


def _zero_variants(scene: Scene, mesh: tuple[int, ...], demands: LayerDemands) -> Iterator[tuple[int, tuple[int, ...]]]:
    axes = tuple(axis for axis, size in enumerate(mesh) if size > 1)
    subsets = [s for count in range(len(axes), 0, -1) for s in itertools.combinations(axes, count)]
    for zero in range(4) if demands.zero < 0 else (demands.zero,):
        if zero == 0:
            yield 0, ()
        elif zero != 2 or scene.num_microbatches > 1 or demands.zero == 2:
            yield from ((zero, subset) for subset in subsets)


def _effective_zero(base: PlacedLayer, storage: tuple[object, ...], zero: int, demands: LayerDemands) -> int:
    """0 where storage is not sharded beyond what compute shards: a level there would be a claim only."""
    if demands.zero >= 0:
        return zero
    return zero if storage != _storage(base, (), demands) else 0


def _storage(base: PlacedLayer, shard_axes: tuple[int, ...], demands: LayerDemands) -> tuple[Layout, ...]:
    layouts: list[Layout] = []
    for position, name in enumerate(base.layer.held):
        flow = base.flows[name]
        if not flow.is_parameter or name not in base.copies:
            layouts.append(base.storage[position])
        else:
            axes = () if position in demands.whole else shard_axes
            layouts.append(storage_layout(base.copies[name], flow.value.type, base.mesh, axes))
    return tuple(layouts)


def _recompute_variants(scene: Scene, demands: LayerDemands) -> tuple[str, ...]:
    if demands.recompute:
        return (demands.recompute,)
    return ("none", "selective", "full") if scene.training.is_training else ("none",)


def _drop_dominated(candidates: list[_Draft], in_flight: int) -> Iterator[_Draft]:
    """On one mesh between the same policies, those that no other beats in time, with and without what is hidden, and in
    static (with microbatches in flight, else persistent), saved and transient bytes.
    """
    groups: dict[tuple[object, ...], list[_Draft]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.strategy.mesh, *candidate.policies), []).append(candidate)
    for group in groups.values():
        costs = np.array([_rated(c, in_flight) for c in group])
        kept: list[int] = []
        for index in np.lexsort(costs.T[::-1]).tolist():
            if not kept or not (costs[kept] <= costs[index]).all(axis=1).any():
                kept.append(index)
        yield from (group[index] for index in kept)


def _rated(draft: _Draft, in_flight: int) -> tuple[float, ...]:
    cost = draft.cost
    seconds = cost.total_s, cost.total_s - draft.hidden_s
    if in_flight == 1:
        return *seconds, cost.persistent_bytes, cost.transient_bytes
    return *seconds, cost.static_bytes, cost.saved_bytes, cost.transient_bytes
