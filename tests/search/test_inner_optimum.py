"""The search inside a layer against brute force, and its objective against the price that is reported."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.errors import PlanMismatchError
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Layout, Placement, shard
from autopar.plan import LayerStrategy
from autopar.program import KernelCollective, Layer, Op, Option, Program, Ref, TensorType, Value
from autopar.search.layer.layer_solutions import LayerSolutions, SolvedVariant, solve_problem
from autopar.search.layer.layout_choices import arrival_layout, storage_layout
from autopar.step.layer.local_layer import place
from autopar.step.layer.local_program import derive
from autopar.step.layer.op_states import Allowed
from autopar.step.layer.value_flows import Flow, TimeView, find_flows, options_of, time_view
from autopar.step.training import TrainingSpec
from tests.layer_costs import layer_collectives, layer_cost
from tests.search.inner_programs import TablePrices, build_problem, decoder_layer

SHAPES = ((8,), (8, 16), (16, 8))


@dataclass(frozen=True)
class Case:
    program: Program
    mesh: tuple[int, ...]
    num_microbatches: int
    time: tuple[str, ...]
    zero: int
    shard_axes: tuple[int, ...]
    recompute: str
    training: TrainingSpec
    shared: dict[str, tuple[tuple[int, ...], Layout]]


@st.composite
def cases(draw: st.DrawFn, max_ops: int = 3) -> Case:
    mesh = draw(st.sampled_from([(1,), (2,), (4,), (2, 2)]))
    program = draw(programs(max_ops if len(mesh) == 1 else 1))
    count = draw(st.sampled_from([1, 1, 2]))
    layer = program.layers[0]
    time = tuple(draw(st.sampled_from([o.factor for o in options_of(op) if o.extent % count == 0])) for op in layer.ops)
    zero = draw(st.integers(0, 3))
    axes = tuple(a for a in range(len(mesh)) if zero and draw(st.booleans()))
    shared = {}
    if len(mesh) == 1 and "w0" in layer.state and draw(st.booleans()):
        shared["w0"] = (mesh, (shard(0),))
    training = TrainingSpec(draw(st.booleans()), 8.0, draw(st.sampled_from([0, 4])), draw(st.sampled_from([0, 8])))
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    return Case(program, mesh, count, time if count > 1 else (), zero, axes, recompute, training, shared)


@st.composite
def programs(draw: st.DrawFn, max_ops: int) -> Program:
    """A layer of random ops with made-up options."""
    values: dict[str, Value] = {}

    def add(name: str, role: str, grad: bool) -> None:
        tensor = TensorType(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(["float32", "bfloat16"])))
        values[name] = Value(name, tensor, role, grad)

    for name, role in (
        ("x0", "input"),
        ("x1", "input"),
        ("w0", "parameter"),
        ("w1", "parameter"),
        ("c0", "constant"),
    ):
        add(name, role, role != "constant" and draw(st.booleans()))
    ops: list[Op] = []
    for index in range(draw(st.integers(1, max_ops))):
        recent = [*values, *(op.results[0] for op in ops[-1:])]
        operands = draw(st.lists(st.sampled_from(recent), min_size=1, max_size=3))
        results = tuple(f"y{index}{letter}" for letter in "ab"[: draw(st.integers(1, 2))])
        for result in results:
            add(result, "op", any(values[name].requires_grad for name in operands))
        options = tuple(
            draw(made_up_option(values, f"f{i}", operands, results)) for i in range(draw(st.integers(0, 2)))
        )
        saves = tuple(draw(st.lists(st.integers(0, len(operands) + len(results) - 1), unique=True)))
        target = draw(st.sampled_from(["aten.mul.Tensor", "aten.linear.default", "aten.view.default"]))
        extra = draw(st.sampled_from([0, 100]))
        op = Op(f"op{index}", target, tuple(map(Ref, operands)), (), results, options)
        ops.append(replace(op, saves=saves, is_view="view" in target, saved_extra_bytes=extra))
    computed = [name for op in ops for name in op.results]
    outputs = tuple(dict.fromkeys([*draw(st.lists(st.sampled_from(computed), max_size=2)), computed[-1]]))
    read = {name for op in ops for name in op.operands}
    inputs = tuple(n for n in ("x0", "x1") if n in read)
    layer = Layer("layer", 0, tuple(ops), inputs, tuple(n for n in ("w0", "w1", "c0") if n in read), outputs)
    returned = outputs[: draw(st.integers(0, len(outputs)))]
    loss = returned[0] if returned and draw(st.booleans()) else ""
    given_inputs = tuple(n for n in inputs if draw(st.booleans()))
    parameters = {name: name for name in layer.state if name != "c0"}
    return Program(values, (layer,), given_inputs, parameters, {}, returned, loss)


@st.composite
def made_up_option(
    draw: st.DrawFn, values: dict[str, Value], factor: str, operands: list[str], results: tuple[str, ...]
) -> Option:
    def placement(name: str) -> Placement:
        rank = len(values[name].type.shape)
        return draw(st.sampled_from([REPLICATE, BROADCAST, PARTIAL, *map(shard, range(rank))]))

    kernel = draw(st.sampled_from(["", "", "kernel"]))
    phase = draw(st.sampled_from(["forward", "backward"]))
    collectives = (KernelCollective("all_reduce", phase, 0, (0,), count=2),) if kernel else ()
    extent = draw(st.sampled_from([0, 2, 4, 8]))
    placements = tuple(map(placement, operands)), tuple(map(placement, results))
    return Option(factor, *placements, extent, kernel, collectives)


def fits_in_time(case: Case) -> bool:
    """Whether microbatches can be taken as the made-up factors in time say."""
    layer, whole = case.program.layers[0], (REPLICATE,) * len(case.mesh)
    strategy = LayerStrategy(
        case.mesh, (("-",) * len(case.mesh),) * len(layer.ops), case.time, (whole,) * len(layer.inputs),
        (whole,) * len(layer.outputs), (), (whole,) * len(layer.state),
    )  # fmt: skip
    try:
        derive(place(case.program, layer, strategy, case.num_microbatches))
    except (PlanMismatchError, ValueError):
        return False
    return True


def solve(case: Case) -> LayerSolutions:
    problem = build_problem(
        case.program, case.mesh, training=case.training, num_microbatches=case.num_microbatches, time=case.time,
        shared=case.shared,
    )  # fmt: skip
    return solve_problem(problem, SolvedVariant(case.zero, case.shard_axes, case.recompute))


def total_s(case: Case, strategy: LayerStrategy) -> float:
    layer = case.program.layers[0]
    cost = layer_cost(case.program, layer, strategy, case.num_microbatches, TablePrices(), case.training, case.shared)
    return cost.total_s


def cuts_what_is_taken(
    layer: Layer, options: tuple[tuple[Option, ...], ...], flows: Mapping[str, Flow], view: TimeView
) -> bool:
    """Whether devices cut what microbatches are taken of, results or frozen parameters, along the same dim: to take
    them then gathers, and no search considers it.
    """
    for op, chosen in zip(layer.ops, options, strict=True):
        made = [(name, option.results[i]) for option in chosen for i, name in enumerate(op.results)]
        read = [(name, o.operands[i]) for o in chosen for i, name in enumerate(op.operands) if flows[name].is_parameter]
        if any(placement in view.taken(flows[name]) for name, placement in (*made, *read)):
            return True
    return False


def brute_force(case: Case, solutions: LayerSolutions, before: int, behind: int) -> float:
    """The least `layer_cost` over all assignments and copies, strategies being put together here by hand."""
    program, mesh, layer = case.program, case.mesh, case.program.layers[0]
    flows = find_flows(program, layer)
    view = time_view(layer, flows, case.time, case.num_microbatches)
    whole = (REPLICATE,) * len(mesh)

    def boundary(name: str, policy: int) -> Layout:
        return arrival_layout(program, name, solutions.problem.policies[policy], mesh, view.value_type(flows[name]))

    def leave(name: str, copy: Layout) -> Layout:
        is_free = program.loss and name in program.outputs and name != program.loss
        return tuple(p if p.is_shard else REPLICATE for p in copy) if is_free else boundary(name, behind)

    domains = solutions.problem.copy_domains
    choices = [options_of(op) if mesh != (1,) else [options_of(op)[-2]] for op in layer.ops]
    best = math.inf
    for options in itertools.product(*(itertools.product(each, repeat=len(mesh)) for each in choices)):
        if cuts_what_is_taken(layer, options, flows, view):
            continue
        for copied in itertools.product(*domains.values()):
            copies = dict(zip(domains, copied, strict=True))
            for name, flow in flows.items():
                if name in copies or not flow.num_readers:
                    continue
                if flow.num_readers > 1:
                    copies[name] = whole
                elif flow.readers:
                    op, mention = flow.readers[0]
                    copies[name] = tuple(o.operands[mention] for o in options[op])
                    if flow.source == "op" and view.taken(flow):
                        copies[name] = tuple(o.results[flow.result] for o in options[flow.producer])
                else:
                    copies[name] = leave(name, tuple(o.results[flow.result] for o in options[flow.producer]))
            try:
                strategy = LayerStrategy(
                    mesh, tuple(tuple(o.factor for o in each) for each in options), case.time,
                    tuple(boundary(name, before) for name in layer.inputs),
                    tuple(leave(name, copies[name]) for name in layer.outputs),
                    tuple(copies.items()),
                    tuple(
                        storage_layout(copies[name], flows[name].value.type, mesh, case.shard_axes)
                        if flows[name].is_parameter else whole
                        for name in layer.state
                    ),
                    case.zero, case.recompute,
                )  # fmt: skip
                best = min(best, total_s(case, strategy))
            except (PlanMismatchError, ValueError):  # sizes don't divide
                continue
    return best


@given(cases(max_ops=2), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_assignment_is_cheaper(case: Case, data: st.DataObject) -> None:
    assume(fits_in_time(case))
    solutions = solve(case)
    assert solutions.exact
    if math.prod(map(len, solutions.problem.copy_domains.values())) * math.prod(solutions.problem.sizes[:2]) > 3000:
        return
    before, behind = (data.draw(st.integers(0, len(solutions.problem.policies) - 1)) for _ in range(2))
    expected = brute_force(case, solutions, before, behind)
    assert solutions.objective_s[before, behind] == pytest.approx(expected, rel=1e-12)


@given(cases())
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_objective_is_the_reported_price(case: Case) -> None:
    assume(fits_in_time(case))
    solutions = solve(case)
    for before, behind in np.ndindex(*solutions.objective_s.shape):
        objective = solutions.objective_s[before, behind]
        assert solutions.cost(before, behind).total_s == pytest.approx(objective, rel=1e-12)
        assert total_s(case, solutions.strategy(before, behind)) == pytest.approx(objective, rel=1e-12)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("zero", "axes"), [(0, ()), (1, (0,)), (2, (1,)), (3, (0, 1))])
def test_the_objective_is_the_reported_price_of_a_real_layer(zero: int, axes: tuple[int, ...], recompute: str) -> None:
    program = decoder_layer(4, 512, hidden=256, ffn=512, heads=8, kv_heads=4)
    layer, prices, training = program.layers[0], TablePrices(), TrainingSpec(gradient_itemsize_bytes=4)
    problem = build_problem(program, (2, 4), training=training)
    solutions = solve_problem(problem, SolvedVariant(zero, axes, recompute))
    assert solutions.exact
    for pair in [(0, 0), (1, 1), (5, 2), (8, 8)]:
        cost = layer_cost(program, layer, solutions.strategy(*pair), 1, prices, training)
        assert cost == solutions.cost(*pair)
        assert cost.total_s == pytest.approx(solutions.objective_s[pair], rel=1e-12)


def test_the_price_of_communication_is_the_sum_over_its_collectives() -> None:
    program = decoder_layer(4, 512, hidden=256, ffn=512, heads=8, kv_heads=4)
    layer, prices, training = program.layers[0], TablePrices(), TrainingSpec()
    solutions = solve_problem(build_problem(program, (2, 4)), SolvedVariant(3, (0, 1)))
    strategy, cost = solutions.strategy(1, 1), solutions.cost(1, 1)
    runs = layer_collectives(program, layer, strategy, 1, training)
    assert runs
    seconds = sum(run.times * prices.collective_s(run.kind, run.axis, run.num_bytes) for run in runs)
    assert seconds == pytest.approx(cost.activation_comm_s + cost.parameter_comm_s, rel=1e-12)


def test_weighing_memory_saves_memory() -> None:
    program = decoder_layer(4, 512, hidden=256, ffn=512, heads=8, kv_heads=4)
    problem = build_problem(program, (8,))
    fast, small = (solve_problem(problem, SolvedVariant(memory_weight_s_per_byte=weight)) for weight in (0.0, 1.0))
    assert small.cost(1, 1).persistent_bytes < fast.cost(1, 1).persistent_bytes
    assert small.cost(1, 1).total_s > fast.cost(1, 1).total_s


def test_what_is_not_allowed_is_not_used_and_nothing_allowed_is_infinite() -> None:
    program = decoder_layer(4, 512, hidden=256, ffn=512, heads=8, kv_heads=4)

    def solve_allowed(allowed: Allowed) -> LayerSolutions:
        return solve_problem(build_problem(program, (8,), allowed=allowed))

    whole = solve_allowed(lambda _op, _axis, option: option.factor in "-~")
    assert set(itertools.chain(*whole.strategy(0, 0).assignments)) <= {"-", "~"}
    nothing = solve_allowed(lambda _op, _axis, _option: False)
    assert np.isinf(nothing.objective_s).all()
    with pytest.raises(ValueError, match="no allowed strategy"):
        nothing.strategy(0, 0)
