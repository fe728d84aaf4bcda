"""The parts that the search inside a layer is made of: meshes, boundaries, storage, reshard tables,
memory.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.ops import is_cheap
from autopar.placement import (
    BROADCAST,
    LOCAL,
    PARTIAL,
    REPLICATE,
    Axis,
    Layout,
    local_shape,
    parse_layout,
    refine_mesh,
    reshard,
    shard,
)  # fmt: skip
from autopar.plan.prediction import LayerCost
from autopar.program import Op, Ref, TensorType
from autopar.search import SearchRequest, search
from autopar.search.layer.layer_solutions import LayerSolutions, SolvedVariant, solve_problem
from autopar.search.layer.layout_choices import (
    arrival_layout,
    boundary_layout,
    boundary_policies,
    mesh_shapes,
    storage_layout,
)
from autopar.search.layer.reshard_prices import collective_counts, reshard_tables
from autopar.step.costs.layer_cost import parameter_times
from autopar.step.costs.parameter_costs import parameter_bytes
from autopar.step.training import TrainingSpec
from tests.layer_costs import layer_cost
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import Builder, TablePrices, build_problem, decoder_layer


@pytest.mark.parametrize(("world", "per_node", "expected"), [
    (1, 8, {(1,)}),
    (7, 8, {(7,)}),
    (8, 8, {(8,), (2, 4), (4, 2)}),
    (12, 4, {(12,), (3, 4), (6, 2)}),
    (6, 4, {(6,), (3, 2)}),  # no whole number of nodes: one node
    (64, 8, {(64,), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2)}),
])  # fmt: skip
def test_meshes_merge_one_chain(world: int, per_node: int, expected: set[tuple[int, ...]]) -> None:
    assert set(mesh_shapes(world, per_node)) == expected


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 3))
def test_all_meshes_have_a_common_refinement(world: int, per_node: int, max_axes: int) -> None:
    shapes = mesh_shapes(world, per_node, max_axes)
    assert len(set(shapes)) == len(shapes)
    assert all(math.prod(shape) == world and len(shape) <= max_axes for shape in shapes)
    assert math.prod(refine_mesh(*shapes)) == world


@pytest.mark.parametrize(("policy", "shape", "expected"), [
    ("S(0),S(1)", (8, 16, 32), "S(0),S(1)"),
    ("S(0),S(0)", (8, 16), "S(0),S(0)"),
    ("S(0),S(0)", (4, 16), "S(0),R"),  # 4 rows on 2 x 4 devices: the outer axis is served first
    ("R,S(1)", (8,), "R,R"),
    ("S(1),R", (8, 3), "R,R"),
    ("S(0),S(1)", (), "R,R"),
])  # fmt: skip
def test_a_boundary_gives_each_tensor_what_it_can_follow(policy: str, shape: tuple[int, ...], expected: str) -> None:
    layout = boundary_layout(parse_layout(policy), TensorType(shape, "float32"), (2, 4))
    assert layout == parse_layout(expected)


def test_an_axis_of_one_device_has_one_policy() -> None:
    assert boundary_policies((1,)) == ((REPLICATE,),)
    assert len(boundary_policies((2, 4))) == 9


@pytest.mark.parametrize(("copy", "shape", "axes", "expected"), [
    ("B,B", (16, 3), (0, 1), "S(0),S(0)"),
    ("B,B", (16, 3), (1,), "R,S(0)"),  # HSDP
    ("B,B", (16, 3), (), "R,R"),
    ("B,S(0)", (16, 8), (0, 1), "S(1),S(0)"),  # no outer axis can be gathered while an inner one cuts the dim
    ("S(0),B", (16, 3), (0, 1), "S(0),S(0)"),
    ("B,B", (3, 8), (0, 1), "S(1),S(1)"),
    ("B,B", (2, 3), (0, 1), "S(0),R"),
    ("B,R", (3, 5), (0, 1), "R,R"),
    ("B,S(0/2)", (16, 8), (), "R,S(1)"),  # slices of parts are stored as slices of another dim
    ("B,S(0/2)", (16, 8), (0, 1), "S(0),S(1)"),
    ("S(0/2),B", (16, 8), (0, 1), "S(1),S(0)"),
    ("S(1),S(0/2)", (16, 8), (), "S(1),S(1)"),
    ("S(1/2),S(0)", (16, 8), (), "R,S(0)"),  # neither dim can be cut outside of an inner axis
])  # fmt: skip
def test_storage_follows_from_the_copy(copy: str, shape: tuple[int, ...], axes: tuple[int, ...], expected: str) -> None:
    assert storage_layout(parse_layout(copy), TensorType(shape, "float32"), (2, 4), axes) == parse_layout(expected)


placements = st.sampled_from([REPLICATE, BROADCAST, shard(0), shard(1), shard(1, 2)])


@given(st.tuples(placements, placements), st.sampled_from([(), (0,), (1,), (0, 1)]))
def test_storage_is_reached_by_gathers_alone_but_for_slices_of_parts(copy: Layout, axes: tuple[int, ...]) -> None:
    tensor, mesh = TensorType((16, 16), "float32"), (2, 4)
    assume({shard(1), shard(1, 2)} - set(copy))  # no op reads a dim as one part and as several
    stored = storage_layout(copy, tensor, mesh, axes)
    local_shape(tensor.shape, stored, mesh)
    assert all(placement.parts == 1 for placement in stored)
    exchanged = 0
    for step in reshard(stored, copy, mesh):
        exchanged += step.forward == "all_to_all"
        if step.dst.parts == 1:
            assert step.forward in ("all_gather", "none")
            assert step.backward in ("reduce_scatter", "all_reduce", "slice", "mask")
        else:
            assert step.forward in ("all_to_all", "slice")
            assert step.src == REPLICATE or step.forward == "all_to_all"
    assert exchanged <= 1


every = [REPLICATE, BROADCAST, PARTIAL, shard(0), shard(1), shard(1, 2)]


@pytest.mark.parametrize("mesh", [(1,), (8,), (8, 2), (2, 1, 3), (2, 2, 2)])
def test_reshard_tables_price_exactly_what_reshard_lists(mesh: tuple[int, ...]) -> None:
    prices = TablePrices()
    active = [axis for axis, size in enumerate(mesh) if size > 1]
    layouts = tuple(
        itertools.product(every if len(active) < 3 else (PARTIAL, shard(0), shard(1, 2)), repeat=len(active))
    )
    table = collective_counts(layouts)
    forward, backward = reshard_tables(table, mesh, 1000.0, prices.collective_s)
    for (i, src), (j, dst) in itertools.product(enumerate(layouts), repeat=2):
        whole: list[Layout] = []
        for layout in (src, dst):
            placed = dict(zip(active, layout, strict=True))
            whole.append(tuple(placed.get(axis, REPLICATE) for axis in range(len(mesh))))
        steps = reshard(whole[0], whole[1], mesh)

        def price(kinds: list[tuple[str, Axis, float]]) -> float:
            return sum(prices.collective_s(k, a, 1000.0 * f) for k, a, f in kinds if k not in LOCAL)

        assert forward[i, j] == pytest.approx(price([(s.forward, s.axis, s.fraction) for s in steps]))
        assert backward[i, j] == pytest.approx(price([(s.backward, s.axis, s.fraction) for s in steps]))


@pytest.mark.parametrize(("zero", "parameter", "gradient", "transient"), [
    (0, 800.0, 800.0, 0.0),  # stored as computed
    (1, 100.0 + 800.0, 100.0 + 800.0, 0.0),
    (2, 100.0 + 800.0, 100.0, 800.0),
    (3, 100.0, 100.0, 800.0 + 800.0),
])  # fmt: skip
def test_zero_levels_hold_what_they_say(zero: int, parameter: float, gradient: float, transient: float) -> None:
    stored = 400 if zero == 0 else 50
    steps = reshard((shard(0) if zero else REPLICATE,), (REPLICATE,), (8,))
    memory = parameter_bytes("bfloat16", stored, 400, steps, trains=True, training=TrainingSpec()).counted_at(zero)
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.transient_bytes) == (
        parameter,
        gradient,
        transient,
    )
    assert memory.optimizer_bytes == 8.0 * stored


def test_a_copy_that_is_cut_in_another_dim_than_the_storage_is_a_tensor_of_its_own() -> None:
    steps = reshard((shard(0),), (shard(1),), (8,))
    memory = parameter_bytes("bfloat16", 50, 50, steps, trains=True, training=TrainingSpec()).counted_at(0)
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.transient_bytes) == (200.0, 200.0, 0.0)


def test_a_shared_parameter_that_a_layer_reads_in_another_dim_costs_it_a_copy() -> None:
    program = decoder_model(1, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2, tied=True)
    plan = search(program, 2, TablePrices(), SearchRequest(constraints=("tensor=2",)))
    strategy, layer = plan.decisions.layer_strategies[-1], program.layers[-1]
    (name,) = layer.state
    assert dict(strategy.copies)[name] == (shard(0),)
    same, other = (
        layer_cost(program, layer, strategy, 1, TablePrices(), TrainingSpec(), {name: (strategy.mesh, (shard(dim),))})
        for dim in (0, 1)
    )
    copy_bytes = program.type_of(name).num_bytes / 2
    assert (same.parameter_bytes, same.gradient_bytes) == (0.0, 0.0)
    assert (other.parameter_bytes, other.gradient_bytes) == (copy_bytes, copy_bytes)


def test_a_frozen_parameter_has_no_gradient_and_no_optimizer() -> None:
    steps = reshard((shard(0),), (REPLICATE,), (8,))
    memory = parameter_bytes("bfloat16", 50, 400, steps, trains=False, training=TrainingSpec()).counted_at(3)
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (100.0, 0.0, 0.0)
    assert memory.transient_bytes == 800.0


def test_storage_in_another_precision_keeps_a_copy_to_compute_with() -> None:
    mixed = TrainingSpec(storage_itemsize_bytes=4)
    memory = parameter_bytes("bfloat16", 400, 400, (), trains=True, training=mixed).counted_at(0)
    assert memory.parameter_bytes == 400 * 4 + 400 * 2


@pytest.mark.parametrize(("zero", "times"), [(0, (1, 1)), (1, (1, 1)), (2, (1, 4)), (3, (8, 4))])
def test_how_often_parameters_travel(zero: int, times: tuple[int, int]) -> None:
    assert parameter_times(zero, 4, TrainingSpec()) == times
    assert parameter_times(zero, 4, TrainingSpec(is_training=False)) == (4 if zero == 3 else 1, 0)


@pytest.mark.parametrize(("target", "expected"), [
    ("aten.mul.Tensor", True),
    ("aten.native_layer_norm.default", True),
    ("prims.convert_element_type.default", True),
    ("aten.linear.default", False),
    ("aten.addmm.default", False),
    ("aten.convolution.default", False),
    ("aten.conv2d.default", False),
    ("aten.scaled_dot_product_attention.default", False),
    ("mylib.swiglu.default", False),
])  # fmt: skip
def test_cheap_ops_are_those_that_compute_little_per_byte(target: str, expected: bool) -> None:
    assert is_cheap(Op("op", target, (), (), ("y",))) is expected


def whole_layer(recompute: str, zero: int = 0) -> tuple[LayerSolutions, LayerCost]:
    program = decoder_layer(2, 64, hidden=32, ffn=128, heads=4, kv_heads=2)
    training = TrainingSpec()
    solutions = solve_problem(build_problem(program, (1,)), SolvedVariant(zero, recompute=recompute))
    cost = layer_cost(program, program.layers[0], solutions.strategy(0, 0), 1, TablePrices(), training)
    return solutions, cost


def test_memory_of_a_whole_layer_by_hand() -> None:
    _, cost = whole_layer("none")
    elements = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 128 * 32 + 2 * 32
    assert cost.parameter_bytes == 2 * elements + 2 * 64 * 8 * 2  # cos, sin
    assert cost.gradient_bytes == 2 * elements
    assert cost.optimizer_bytes == 8 * elements
    assert cost.saved_bytes == saved_by_hand()


def saved_by_hand() -> int:
    """Each tensor that autograd keeps, once: the program is `decoder_layer(2, 64, 32, 128, 4, 2)`."""
    hidden, row, ffn = 2 * 64 * 32, 2 * 64, 2 * 64 * 128
    norm = 4 * hidden  # float32 copy of the input: read by the square and the product
    norm += 4 * row + 4 * row  # mean square plus epsilon, its inverse root
    norm += 2 * hidden  # the normed input, read by the product with the weight
    norm += 2 * hidden  # the result, read by the linear ops, which share it
    turns = 2 * (hidden + hidden // 2) * 2  # q and k as read by both products with cos and sin
    attention = (
        2 * hidden * 4
    )  # q, k, v (repeated for all heads: copies), result, which lies as q: joining heads is free
    gated = 2 * ffn * 4  # gate, its activation, up, their product
    return 2 * norm + turns + attention + gated


def test_recomputation_trades_memory_for_time() -> None:
    (_, none), (_, selective), (_, full) = (whole_layer(each) for each in ("none", "selective", "full"))
    assert full.saved_bytes < selective.saved_bytes < none.saved_bytes
    assert full.saved_bytes == 2 * 64 * 32 * 2  # the layer's input
    assert 0 == none.recompute_s < selective.recompute_s < full.recompute_s == full.forward_s
    assert full.transient_bytes > none.transient_bytes


def test_what_no_parameter_flows_into_crosses_whole() -> None:
    """Every device computes a mask or a rotary table; layers need not gather it one after the other."""
    builder = Builder()
    ids = builder.add("ids", (8, 16), "input", grad=False, dtype="float32")
    table = builder.op("aten.cos.default", (Ref(ids),), (8, 16), "float32")
    weight = builder.add("w", (8, 16), "parameter")
    product = builder.op("aten.mul.Tensor", (Ref(table), Ref(weight)), (8, 16), "float32")
    program = replace(builder.program((table, product)), inputs=("ids",), outputs=(product,), loss=product)
    policy = (shard(0),)
    assert arrival_layout(program, "ids", policy, (4,)) == (REPLICATE,)
    assert arrival_layout(program, table, policy, (4,)) == (REPLICATE,)
    assert arrival_layout(replace(program, loss=table), product, policy, (4,)) == (shard(0),)
    assert arrival_layout(program, product, policy, (4,)) == (REPLICATE,)  # the loss


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_microbatch_but_the_first_adds_its_gradients(zero: int, num_microbatches: int) -> None:
    program = decoder_layer(8, 64, hidden=32, ffn=128, heads=4, kv_heads=2)
    (layer,), prices, mesh = program.layers, TablePrices(), (2,)
    problem = build_problem(program, mesh, num_microbatches=num_microbatches)
    solutions = solve_problem(problem, SolvedVariant(zero, (0,)))
    cost = solutions.cost(0, 0)
    strategy, placed = solutions.strategy(0, 0), solutions.placed(0, 0)
    computing = sum(
        prices.op_s(op, state.operand_types, state.result_types, differentiable=True).backward_s
        for op, state in zip(layer.ops, placed.states, strict=True)
        if any(program.values[name].requires_grad for name in op.results)
    )
    lying = strategy.copies if zero < 2 else tuple(zip(layer.state, strategy.storage, strict=True))
    sums = 0.0
    for name, layout in lying:
        if program.values[name].role == "parameter":
            part = TensorType(local_shape(program.type_of(name).shape, layout, mesh), "bfloat16")
            add = Op("add", "aten.add.Tensor", (Ref("a"), Ref("b")), (), ("c",))
            sums += prices.op_s(add, (part, part), (part,), differentiable=False).forward_s
    assert cost.backward_s == pytest.approx(num_microbatches * computing + (num_microbatches - 1) * sums, rel=1e-12)
