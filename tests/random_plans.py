"""Random legal plans: any mesh per layer kind, any option per op, any copy layout, storage, recomputation.

None of them is sensible; all of them must compute what one device computes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping

from autopar.placement import REPLICATE, Layout, refine_mesh, shard
from autopar.plan import Decisions, LayerStrategy, Plan, PlannedLayer, Stage
from autopar.program import Layer, Op, Option, Program
from autopar.schedules import schedule_names, schedule_problem, stage_group
from autopar.search.layer.layout_choices import mesh_shapes, storage_layout
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.step.activation_policies import can_rerun, policy_names, rerun_policy_name

Mesh = tuple[int, ...]


def random_plan(
    program: Program, world_size: int, seed: int, num_microbatches: int = 1, *, joins_outputs: bool = False
) -> Plan:
    """A legal plan for `program`, different for every seed; `joins_outputs` as in `time_assignment`."""
    rng = random.Random(seed)
    meshes = mesh_shapes(world_size, world_size, max_axes=3)
    time = time_assignment(program, num_microbatches, joins_outputs=joins_outputs)
    assert isinstance(time, TimeAssignment), time
    strategies = [
        _random_strategy(program, layer, rng.choice(meshes), num_microbatches, time.factors[layer.kind], rng)
        for layer in program.kinds
    ]
    shared_mesh = refine_mesh(*(strategy.mesh for strategy in strategies))
    decisions = Decisions(
        fingerprint=program.fingerprint,
        world_size=world_size,
        num_microbatches=num_microbatches,
        layers=tuple(PlannedLayer(layer.name, layer.kind, layer.kind) for layer in program.layers),
        strategies=tuple(strategies),
        shared_mesh=shared_mesh,
        shared_storage=_random_shared_storage(program, shared_mesh, rng),
    )
    return Plan(decisions)


def random_pipeline(
    program: Program, world_size: int, seed: int, num_groups: int, schedule: str, num_microbatches: int
) -> Plan:
    """A legal plan with stages: random strategies on each device group, random cuts."""
    rng = random.Random(seed)
    plan = random_plan(program, world_size // num_groups, seed, num_microbatches, joins_outputs=True)
    return with_stages(
        plan, num_groups, schedule, rng.choice(_stage_counts(program, num_groups, schedule, num_microbatches)), rng
    )


def pipelines_of(program: Program, num_groups: int, num_microbatches: int) -> tuple[str, ...]:
    """The schedules by which `program` can run on so many device groups, in so many microbatches."""
    names = schedule_names()
    return tuple(name for name in names if _stage_counts(program, num_groups, name, num_microbatches))


def _stage_counts(program: Program, num_groups: int, schedule: str, num_microbatches: int) -> list[int]:
    """How many stages `program` can be cut into, at most three on a device group."""
    counts = range(num_groups, min(3 * num_groups, len(program.layers)) + 1, num_groups)
    return [each for each in counts if not schedule_problem(schedule, num_groups, each, num_microbatches)]


def with_stages(plan: Plan, num_groups: int, schedule: str, num_stages: int, rng: random.Random) -> Plan:
    """`plan` on each of several device groups, each of which runs its part of randomly cut stages."""
    cuts = sorted(rng.sample(range(1, len(plan.layers)), num_stages - 1))
    bounds = itertools.pairwise([0, *cuts, len(plan.layers)])
    stages = tuple(
        Stage(start, stop, stage_group(schedule, index, num_groups)) for index, (start, stop) in enumerate(bounds)
    )
    return plan.with_decisions(world_size=plan.world_size * num_groups, stages=stages, schedule=schedule)


def shared_parameters(program: Program) -> tuple[str, ...]:
    """Names of the parameters (value names) that more than one layer reads."""
    readers: dict[str, int] = {}
    for layer in program.layers:
        for name in layer.state:
            readers[name] = readers.get(name, 0) + 1
    return tuple(n for n, count in readers.items() if count > 1 and program.values[n].role == "parameter")


def _random_shared_storage(program: Program, mesh: Mesh, rng: random.Random) -> tuple[tuple[str, Layout], ...]:
    found: list[tuple[str, Layout]] = []
    for name in shared_parameters(program):
        menu: list[Layout] = [(REPLICATE,) * len(mesh)]
        for dim, size in enumerate(program.type_of(name).shape):
            if size % math.prod(mesh) == 0:
                menu.append((shard(dim),) * len(mesh))
        found.append((program.parameters[name], rng.choice(menu)))
    return tuple(found)


def option_choices(op: Op, mesh: Mesh, num_microbatches: int, time_factor: str) -> list[tuple[Option, ...]]:
    """Every legal choice of one option per mesh axis for `op`."""
    choices: list[tuple[Option, ...]] = [()]
    for _ in mesh:
        choices = [(*chosen, option) for chosen in choices for option in op.options]
    return [chosen for chosen in choices if _is_legal(chosen, mesh, num_microbatches, time_factor)]


def _is_legal(chosen: tuple[Option, ...], mesh: Mesh, num_microbatches: int, time_factor: str) -> bool:
    degrees: dict[str, int] = {time_factor: num_microbatches} if time_factor else {}
    extents = {option.factor: option.extent for option in chosen}
    for option, size in zip(chosen, mesh, strict=True):
        degrees[option.factor] = degrees.get(option.factor, 1) * size
    divides = all(not extents.get(f, 0) or extents[f] % degree == 0 for f, degree in degrees.items())
    num_rings = sum(option.is_on_one_axis for option in chosen)
    return divides and num_rings <= 1 and len({option.kernel for option in chosen if option.kernel}) <= 1


def _random_strategy(
    program: Program, layer: Layer, mesh: Mesh, num_microbatches: int, time: tuple[str, ...], rng: random.Random
) -> LayerStrategy:
    chosen: dict[str, tuple[Option, ...]] = {}
    for index, op in enumerate(layer.ops):
        choices = option_choices(op, mesh, num_microbatches, time[index] if time else "")
        splits = [c for c in choices if any(option.factor not in "-~" for option in c)]
        chosen[op.name] = rng.choice(splits if splits and rng.random() < 0.8 else choices)
    whole: Layout = (REPLICATE,) * len(mesh)
    wanted = _layouts(layer, chosen)
    boundary = {
        name: _random_boundary(program, name, mesh, num_microbatches, rng) for name in (*layer.inputs, *layer.outputs)
    }
    copies = tuple((name, rng.choice([*layouts, whole])) for name, layouts in wanted.items())
    by_name = dict(copies)
    zero = rng.choice((0, 0, 1, 2, 3))
    axes = tuple(axis for axis in range(len(mesh)) if rng.random() < 0.7) if zero else ()
    return LayerStrategy(
        mesh=mesh,
        assignments=tuple(tuple(option.factor for option in chosen[op.name]) for op in layer.ops),
        time=time,
        inputs=tuple(boundary[name] for name in layer.inputs),
        outputs=tuple(boundary[name] for name in layer.outputs),
        copies=copies,
        storage=tuple(_storage(program, name, by_name, mesh, axes) for name in layer.state),
        zero=zero,
        recompute=rng.choice(("none", "none", _random_reruns(layer, rng), *policy_names())),
    )


def _random_reruns(layer: Layer, rng: random.Random) -> str:
    """A way that computes any ops of the layer again that can be."""
    able = [op.name for op in layer.ops if can_rerun(op)]
    chosen = [name for name in able if rng.random() < 0.5]
    return rerun_policy_name(chosen, offloads=rng.random() < 0.3) if chosen else "full"


def _storage(program: Program, name: str, copies: Mapping[str, Layout], mesh: Mesh, axes: tuple[int, ...]) -> Layout:
    if program.values[name].role != "parameter":
        return (REPLICATE,) * len(mesh)
    copy = copies.get(name, (REPLICATE,) * len(mesh))
    if any(p.kind == "P" for p in copy):
        copy = tuple(REPLICATE if p.kind == "P" else p for p in copy)
    return storage_layout(copy, program.type_of(name), mesh, axes)


def _layouts(layer: Layer, chosen: Mapping[str, tuple[Option, ...]]) -> dict[str, list[Layout]]:
    """Value -> the layouts in which it is produced in this layer, or read."""
    wanted: dict[str, list[Layout]] = {}
    for op in layer.ops:
        options = chosen[op.name]
        for index, name in enumerate(op.operands):
            wanted.setdefault(name, []).append(tuple(option.operands[index] for option in options))
        for index, name in enumerate(op.results):
            wanted.setdefault(name, []).append(tuple(option.results[index] for option in options))
    return wanted


def _random_boundary(program: Program, name: str, mesh: Mesh, num_microbatches: int, rng: random.Random) -> Layout:
    if name in program.inputs or name == program.loss or (not program.loss and name in program.outputs):
        return (REPLICATE,) * len(mesh)
    shape = list(program.type_of(name).shape)
    layout = []
    for size in mesh:
        # Whatever dim microbatches cut: leave room for them on every dim.
        dims = [dim for dim, length in enumerate(shape) if length % (size * num_microbatches) == 0]
        if dims and rng.random() < 0.7:
            dim = rng.choice(dims)
            shape[dim] //= size
            layout.append(shard(dim))
        else:
            layout.append(REPLICATE)
    return tuple(layout)


__all__ = ["option_choices", "pipelines_of", "random_pipeline", "random_plan", "shared_parameters", "with_stages"]
