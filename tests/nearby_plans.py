"""Plans in which one decision is another one that could stand there: a legal plan, or one that a check must refuse.

`tests.mutated_plans` changes the text of a plan, so that most of its files are refused at once. These changes know what
a decision means: layouts that divide, options that an op has, ops that can run again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Layout, Placement, shard
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.schedules import schedule_names, stage_group
from autopar.search.layer.layout_choices import mesh_shapes
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.step.activation_policies import can_rerun, policy_names, rerun_policy_name
from autopar.step.layer.local_layer import place
from autopar.step.layer.local_program import derive
from autopar.step.layer.pieces import pieced_collectives
from tests.random_plans import option_choices, random_plan

__all__ = ["nearby"]


def nearby(plan: Plan, program: Program, seed: int) -> tuple[str, str]:
    """What was changed, and the file of `plan` with that changed; most files have several changes."""
    rng = random.Random(seed)
    names: list[str] = []
    for _ in range(rng.choice((1, 2, 3, 4, 6))):
        change = rng.choice(_CHANGES)
        changed = change(plan, program, rng)
        if changed is not None:
            plan = changed
            names.append(change.__name__.removeprefix("_"))
    return "+".join(names) or "nothing", plan.to_json()


def _one_strategy(plan: Plan, rng: random.Random) -> int:
    return rng.randrange(len(plan.strategies))


def _layer_of(plan: Plan, program: Program, strategy: int) -> Layer | None:
    """The first layer of the kind that runs by this strategy; None if none does."""
    kinds = [layer.kind for layer in plan.layers if layer.strategy == strategy]
    return program.kinds[kinds[0]] if kinds else None


def _with(plan: Plan, number: int, **changes: Any) -> Plan:
    strategies = [*plan.strategies]
    strategies[number] = replace(strategies[number], **changes)
    return plan.with_decisions(strategies=tuple(strategies))


def _any_layout(program: Program, name: str, mesh: Sequence[int], rng: random.Random, *, terms: bool = True) -> Layout:
    """A layout that divides, with terms (P and B) or without."""
    shape, layout = list(program.type_of(name).shape), list[Placement]()
    for size in mesh:
        dims = [dim for dim, length in enumerate(shape) if length % size == 0]
        choices = [REPLICATE, *map(shard, dims), *((PARTIAL, BROADCAST) if terms else ())]
        placement = rng.choice(choices)
        if placement.is_shard:
            shape[placement.dim] //= size
            if terms and rng.random() < 0.1:
                placement = shard(placement.dim, 2)
        layout.append(placement)
    return tuple(layout)


def _changed_at(row: Sequence[Any], index: int, new: Any) -> tuple[Any, ...]:
    return (*row[:index], new, *row[index + 1 :])


def _swapped_layouts(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """The layouts of two values are exchanged: of two copies, inputs, outputs or parameters."""
    number = _one_strategy(plan, rng)
    part = rng.choice(("copies", "inputs", "outputs", "storage"))
    rows: list[Any] = [*getattr(plan.strategies[number], part)]
    if len(rows) < 2:
        return None
    one, other = rng.sample(range(len(rows)), 2)
    if part == "copies":
        (first, ours), (second, theirs) = rows[one], rows[other]
        rows[one], rows[other] = (first, theirs), (second, ours)
    else:
        rows[one], rows[other] = rows[other], rows[one]
    return _with(plan, number, **{part: tuple(rows)})


def _boundary(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """One layer alone gives or takes a value in another layout; the layer that it comes from or goes to doesn't."""
    index = rng.randrange(len(plan.layers))
    layer, planned = program.layers[index], plan.layers[index]
    strategy = plan.strategies[planned.strategy]
    part = rng.choice(("inputs", "outputs"))
    names = getattr(layer, part)
    if not names:
        return None
    at = rng.randrange(len(names))
    layout = _any_layout(program, names[at], strategy.mesh, rng)
    changed = replace(strategy, **{part: _changed_at(getattr(strategy, part), at, layout)})
    return _with_own(plan, index, changed)


def _with_own(plan: Plan, index: int, strategy: LayerStrategy) -> Plan:
    """Layer `index` alone runs by `strategy`."""
    own = replace(plan.layers[index], strategy=len(plan.strategies))
    return plan.with_decisions(layers=_changed_at(plan.layers, index, own), strategies=(*plan.strategies, strategy))


def _own_strategy(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """One layer alone runs by a random strategy, on a mesh of its own."""
    index = rng.randrange(len(plan.layers))
    other = random_plan(
        program, plan.group_size, rng.randrange(1000), plan.num_microbatches, joins_outputs=bool(plan.stages)
    )
    strategy = replace(other.strategies[program.layers[index].kind], time=plan.decisions.layer_strategies[index].time)
    return _with_own(plan, index, strategy)


def _copy(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """A value's copy has any layout that divides."""
    number = _one_strategy(plan, rng)
    strategy = plan.strategies[number]
    if not strategy.copies:
        return None
    at = rng.randrange(len(strategy.copies))
    name, _ = strategy.copies[at]
    layout = _any_layout(program, name, strategy.mesh, rng)
    return _with(plan, number, copies=_changed_at(strategy.copies, at, (name, layout)))


def _stored(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """A parameter is stored in any slices, at any ZeRO level."""
    number = _one_strategy(plan, rng)
    layer, strategy = _layer_of(plan, program, number), plan.strategies[number]
    able = [n for n, name in enumerate(layer.state) if program.values[name].role == "parameter"] if layer else []
    if layer is None or not able:
        return None
    at = rng.choice(able)
    layout = _any_layout(program, layer.state[at], strategy.mesh, rng, terms=False)
    zero = rng.choice((strategy.zero, 0, 1, 2, 3))
    return _with(plan, number, storage=_changed_at(strategy.storage, at, layout), zero=zero)


def _shared(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """A parameter is stored by `shared_storage`, whether several layers read it or one does, on another mesh."""
    parameters = {
        name: value for value, name in program.parameters.items() if program.values[value].role == "parameter"
    }
    name = rng.choice([*parameters])
    mesh = rng.choice((plan.shared_mesh, plan.shared_mesh, *mesh_shapes(plan.group_size, plan.group_size, 3)))
    entries = dict(plan.decisions.shared_storage)
    if mesh != plan.shared_mesh:
        entries = {key: _any_layout(program, parameters[key], mesh, rng, terms=False) for key in entries}
    entries[name] = _any_layout(program, parameters[name], mesh, rng, terms=False)
    return plan.with_decisions(shared_mesh=mesh, shared_storage=tuple(entries.items()))


def _option(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """An op runs by other options of its own."""
    number = _one_strategy(plan, rng)
    layer, strategy = _layer_of(plan, program, number), plan.strategies[number]
    if layer is None or not layer.ops or len(strategy.assignments) != len(layer.ops):
        return None
    at = rng.randrange(len(layer.ops))
    time = strategy.time[at] if strategy.time else ""
    chosen = [
        tuple(o.factor for o in each)
        for each in option_choices(layer.ops[at], strategy.mesh, plan.num_microbatches, time)
    ]
    row = rng.choice([*chosen, tuple(rng.choice("-~") for _ in strategy.mesh)])
    return _with(plan, number, assignments=_changed_at(strategy.assignments, at, row))


def _time(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """Microbatches split another factor of an op, or run it whole."""
    number = _one_strategy(plan, rng)
    layer, strategy = _layer_of(plan, program, number), plan.strategies[number]
    if layer is None or not strategy.time or len(strategy.time) != len(layer.ops):
        return None
    at = rng.randrange(len(layer.ops))
    factor = rng.choice([*(option.factor for option in layer.ops[at].options), "-", "~"])
    return _with(plan, number, time=_changed_at(strategy.time, at, factor))


def _microbatches(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """Another number of microbatches, or another way to cut into them."""
    count = rng.choice((1, 2, 4, 8))
    time = time_assignment(program, count, joins_outputs=rng.random() < 0.5)
    if not isinstance(time, TimeAssignment):
        return None
    kinds = {layer.strategy: layer.kind for layer in plan.layers}
    strategies = [
        replace(strategy, time=time.factors[kinds[number]] if count > 1 and number in kinds else ())
        for number, strategy in enumerate(plan.strategies)
    ]
    return plan.with_decisions(num_microbatches=count, strategies=tuple(strategies))


def _recompute(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """Other ops run again in backward, or what is kept is offloaded, in one layer alone or in all of a kind."""
    index = rng.randrange(len(plan.layers))
    able = [op.name for op in program.kinds[program.layers[index].kind].ops if can_rerun(op)]
    some = [name for name in able if rng.random() < rng.choice((0.1, 0.5, 0.9))]
    names = [*policy_names(), *([rerun_policy_name(some, offloads=rng.random() < 0.5)] * 6 if some else [])]
    recompute = rng.choice(names)
    number = plan.layers[index].strategy
    if rng.random() < 0.5:
        return _with_own(plan, index, replace(plan.strategies[number], recompute=recompute))
    return _with(plan, number, recompute=recompute)


def _pieces(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """Collectives run in pieces where they can."""
    number = _one_strategy(plan, rng)
    layer, strategy = _layer_of(plan, program, number), plan.strategies[number]
    if layer is None:
        return None
    try:
        local = derive(place(program, layer, replace(strategy, pieces=()), plan.num_microbatches))
    except Exception:  # noqa: BLE001  (another change made it illegal: this one stays out)
        return None
    able = [*pieced_collectives(local, strategy.recompute)]
    if not able:
        return None
    chosen = rng.sample(able, rng.randint(1, len(able)))
    return _with(plan, number, pieces=tuple((name, rng.choice((2, 4))) for name in chosen))


def _mesh(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """A strategy's mesh with one axis as two, which split what it split, or with an axis of one device."""
    number = _one_strategy(plan, rng)
    strategy = plan.strategies[number]
    if not strategy.mesh:
        return None
    axis = rng.randrange(len(strategy.mesh))
    size = strategy.mesh[axis]
    halves = (2, size // 2) if size > 2 and rng.random() < 0.7 else rng.choice(((1, size), (size, 1)))

    def twice(row: Sequence[Any]) -> tuple[Any, ...]:
        return (*row[:axis], row[axis], row[axis], *row[axis + 1 :])

    return _with(
        plan,
        number,
        mesh=(*strategy.mesh[:axis], *halves, *strategy.mesh[axis + 1 :]),
        assignments=tuple(map(twice, strategy.assignments)),
        inputs=tuple(map(twice, strategy.inputs)),
        outputs=tuple(map(twice, strategy.outputs)),
        copies=tuple((name, twice(layout)) for name, layout in strategy.copies),
        storage=tuple(map(twice, strategy.storage)),
        labels=twice(strategy.labels) if strategy.labels else (),
    )


def _precision(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """Gradients are added up in another dtype."""
    return plan.with_decisions(gradients=rng.choice(("float32", "bfloat16")))


def _host(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """Parameters are stored in the host's memory."""
    return plan.with_decisions(host_storage=not plan.decisions.host_storage)


def _stages(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """Other stages, by another schedule, or one layer more in one of two neighboring stages."""
    if not plan.stages:
        return None
    if rng.random() < 0.5:
        at = rng.randrange(len(plan.stages) - 1)
        moved = plan.stages[at].stop + rng.choice((-1, 1))
        one, other = replace(plan.stages[at], stop=moved), replace(plan.stages[at + 1], start=moved)
        return plan.with_decisions(stages=(*plan.stages[:at], one, other, *plan.stages[at + 2 :]))
    schedule = rng.choice(schedule_names())
    stages = tuple(
        replace(stage, group=stage_group(schedule, index, plan.num_groups)) for index, stage in enumerate(plan.stages)
    )
    return plan.with_decisions(schedule=schedule, stages=stages)


def _order(plan: Plan, program: Program, rng: random.Random) -> Plan | None:
    """Two layers of one kind run by each other's strategies, or all strategies have other numbers."""
    numbers = [*range(len(plan.strategies))]
    rng.shuffle(numbers)
    strategies = [plan.strategies[number] for number in numbers]
    layers = tuple(replace(layer, strategy=numbers.index(layer.strategy)) for layer in plan.layers)
    return plan.with_decisions(strategies=tuple(strategies), layers=layers)


Change = Callable[[Plan, Program, random.Random], Plan | None]
_CHANGES: tuple[Change, ...] = (
    _swapped_layouts, _boundary, _boundary, _own_strategy, _own_strategy, _copy, _copy, _stored, _stored, _shared,
    _option, _option, _time, _microbatches, _recompute, _recompute, _pieces, _mesh, _precision, _host, _stages, _order,
)  # fmt: skip
