"""A lowered model trains as the single device does, whatever the plan."""

import copy
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, InputShapeError, PlanMismatchError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.observe.predictions import Predictions
from autopar.lower.program.layer_program import layer_program
from autopar.lower.run.lowering import Executable
from autopar.placement import REPLICATE
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Op, Program, Ref, TensorType, Value
from autopar.timeline import StepTimeline
from autopar.trace import Traced, trace
from tests.lower.runs import assert_same, build, loss_of, train_parallel, train_single
from tests.models import PlainGPT, make, make_plain_gpt
from tests.random_plans import random_plan


@cache
def traced_model(name: str) -> tuple[nn.Module, dict[str, Any], Traced]:
    model, inputs = make(name)
    return model, inputs, trace(model, (), inputs)


def edited(plan: Plan, **changes: Any) -> Plan:
    """`plan` with the same fields changed in every strategy."""
    return plan.with_decisions(strategies=tuple(replace(strategy, **changes) for strategy in plan.strategies))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "seed"), [("plain_gpt", 0), ("frozen", 1)])
def test_random_plans_train_as_one_device(name: str, seed: int) -> None:
    model, inputs, traced = traced_model(name)
    plan = random_plan(traced.program, 4, seed)
    expected = train_single(model, inputs)
    for run in train_parallel(model, traced, plan, inputs):
        assert_same(expected, run)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_zero_level_with_every_recomputation(zero: int, recompute: str) -> None:
    model, inputs, traced = traced_model("plain_gpt")
    plan = edited(random_plan(traced.program, 2, 5), zero=zero, recompute=recompute)
    expected = train_single(model, inputs)
    for run in train_parallel(model, traced, plan, inputs):
        assert_same(expected, run)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("plain_gpt", 1),
        ("frozen", 2),
        ("flat", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("flat", 0), ("plain_gpt", 3))),
    ],
)
def test_microbatches_train_as_one_device(name: str, zero: int) -> None:
    model, inputs, traced = traced_model(name)
    plan = edited(random_plan(traced.program, 4, zero, num_microbatches=2), zero=zero)
    expected = train_single(model, inputs)
    for run in train_parallel(model, traced, plan, inputs):
        assert_same(expected, run)


@pytest.mark.slow
def test_real_model_with_tied_weights() -> None:
    model, inputs, traced = traced_model("gpt2")
    expected = train_single(model, inputs)
    for seed in range(2):
        for run in train_parallel(model, traced, random_plan(traced.program, 2, seed), inputs):
            assert_same(expected, run, tolerance=2e-4)  # the model computes its loss in float32


def on_ranks(name: str, world: int, seed: int, action: Any, num_microbatches: int = 1, **kwargs: Any) -> list[Any]:
    """``action(parallel_module, inputs)`` on every rank of a random plan."""
    model, inputs, traced = traced_model(name)
    plan = random_plan(traced.program, world, seed, num_microbatches)
    return simulate(world, lambda c: action(build(model, traced, plan, c, **kwargs), inputs))


def test_names_and_ties_are_the_originals() -> None:
    model, _, _ = traced_model("gpt2")

    def names(parallel: nn.Module, _: Any) -> Any:
        parameters = dict(parallel.named_parameters())
        assert all(isinstance(p, DTensor) for p in parameters.values())
        assert len({p.device_mesh for p in parameters.values()}) == 1
        return [*parameters], [*parallel.state_dict()], [*dict(parallel.named_buffers())]

    for found in on_ranks("gpt2", 2, 0, names):
        assert found[0] == [name for name, _ in model.named_parameters()]
        assert found[1] == [*model.state_dict()]
        assert found[2] == [name for name, _ in model.named_buffers()]


def test_frozen_parameters_stay_frozen() -> None:
    model, _, _ = traced_model("frozen")
    for found in on_ranks("frozen", 2, 0, lambda p, _: {n: x.requires_grad for n, x in p.named_parameters()}):
        assert found == {n: x.requires_grad for n, x in model.named_parameters()}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_grad_norm_is_the_single_devices(norm_type: float) -> None:
    model, inputs, _ = traced_model("plain_gpt")
    single = copy.deepcopy(model)
    loss_of(single(**inputs)).backward()
    expected = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.05, norm_type)

    def clip(parallel: Any, inputs: Any) -> Any:
        loss_of(parallel(**inputs)).backward()
        norm = parallel.clip_grad_norm_(0.05, norm_type)
        return norm, {n: parallel._whole(n, p.grad) for n, p in parallel.named_parameters()}

    for norm, gradients in on_ranks("plain_gpt", 4, 2, clip):
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12)


def test_clip_refuses_a_norm_that_is_not_finite() -> None:
    def clip(parallel: Any, inputs: Any) -> None:
        (loss_of(parallel(**inputs)) * float("nan")).backward()
        with pytest.raises(RuntimeError, match="nan"):
            parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)

    on_ranks("flat", 2, 0, clip)


def test_state_dict_goes_round() -> None:
    model, _, _ = traced_model("unet")
    torch.manual_seed(1)
    other = {n: torch.randn_like(x) if x.is_floating_point() else x + 3 for n, x in model.state_dict().items()}

    def load(parallel: Any, _: Any) -> Any:
        parallel.load_state_dict(other)
        parallel.load_state_dict(parallel.state_dict())
        return parallel.full_state_dict()

    for found in on_ranks("unet", 4, 1, load):
        assert found.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_full_state_dict_is_a_copy() -> None:
    def change(parallel: Any, _: Any) -> None:
        before = parallel.full_state_dict()
        for value in parallel.full_state_dict().values():
            value.zero_()
        for name, value in parallel.full_state_dict().items():
            torch.testing.assert_close(value, before[name])

    on_ranks("flat", 2, 0, change)


CONVERSIONS = (
    lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.float(), lambda m: m.to(torch.float16),
    lambda m: m.to("meta"), lambda m: m.type(torch.float32), lambda m: next(m.children()).half(),
)  # fmt: skip


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_what_the_plan_did_not_foresee_is_not_made_of_parameters(convert: Any) -> None:
    def call(parallel: Any, inputs: Any) -> None:
        before = parallel.full_state_dict()
        with pytest.raises(PlanMismatchError, match=r"before autopar\.parallelize"):
            convert(parallel)
        torch.testing.assert_close(parallel.full_state_dict(), before, rtol=0, atol=0)

    on_ranks("unet", 2, 0, call)


def test_conversions_to_what_parameters_are_do_nothing() -> None:
    def call(parallel: Any, inputs: Any) -> None:
        before = parallel.full_state_dict()
        assert parallel.double() is parallel
        assert parallel.to("cpu", torch.float64) is parallel
        torch.testing.assert_close(parallel.full_state_dict(), before, rtol=0, atol=0)
        narrow = {name: x.to(torch.float16) if x.is_floating_point() else x for name, x in before.items()}
        parallel.load_state_dict(narrow, assign=True)
        assert {p.dtype for p in parallel.parameters()} == {torch.float64}
        parallel(**inputs)["loss"].backward()

    on_ranks("unet", 2, 0, call)


def test_inputs_of_another_shape_are_refused_before_any_collective() -> None:
    def call(parallel: Any, inputs: Any) -> None:
        with parallel.recording() as collectives, pytest.raises(InputShapeError, match="x"):
            parallel(**{name: value[:4] for name, value in inputs.items()})
        assert collectives == []

    on_ranks("flat", 2, 0, call)


def test_a_plan_for_another_world_or_program_is_refused() -> None:
    model, _, traced = traced_model("flat")
    plan = random_plan(traced.program, 2, 0)
    with pytest.raises(PlanMismatchError, match="2 devices, but there are 4"):
        simulate(4, lambda c: build(model, traced, plan, c))
    with pytest.raises(PlanMismatchError, match=r"other shapes .*Plan again"):
        simulate(2, lambda c: build(model, traced, plan.with_decisions(fingerprint="other"), c))


def test_loss_is_plain_and_sharded_outputs_are_dtensors_if_asked_for() -> None:
    model, inputs, _ = traced_model("plain_gpt")
    logits, _ = model(**inputs)

    def call(parallel: Any, inputs: Any) -> Any:
        parallel.whole_outputs = False
        found, loss = parallel(**inputs)
        assert not isinstance(loss, DTensor)
        if not isinstance(found, DTensor):
            return False, found.detach()
        return True, (
            found.to_local().detach(),
            found.placements,
            found.device_mesh.shape,
            tuple(found.shape),
        )

    kinds = set()
    for seed in range(4):
        for is_sharded, found in on_ranks("plain_gpt", 2, seed, call):
            kinds.add(is_sharded)
            if is_sharded:
                assert found[3] == tuple(logits.shape)
            else:
                torch.testing.assert_close(found, logits)
    assert kinds == {True, False}


def test_no_grad_runs_forward_only() -> None:
    model, inputs, _ = traced_model("plain_gpt")

    def call(parallel: Any, inputs: Any) -> Tensor:
        with torch.no_grad():
            _, loss = parallel(**inputs)
        assert not loss.requires_grad
        assert all(p.grad is None for p in parallel.parameters())
        return loss

    expected = model(**inputs)[1]
    for num_microbatches in (1, 2):
        for loss in on_ranks("plain_gpt", 2, 1, call, num_microbatches):
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)


def test_microbatch_gradients_are_released_scaled_and_once() -> None:
    model, inputs, _ = traced_model("flat")
    single = copy.deepcopy(model)
    (3 * single(**inputs)).backward()

    def call(parallel: Any, inputs: Any) -> Any:
        loss = parallel(**inputs)
        assert all(p.grad is None for p in parallel.parameters())
        (3 * loss).backward(retain_graph=True)
        with pytest.raises(AutoparError, match="call the model again"):
            loss.backward()
        return {n: parallel._whole(n, p.grad) for n, p in parallel.named_parameters()}

    for gradients in on_ranks("flat", 2, 3, call, 2):
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_eval_runs_the_program_traced_for_it() -> None:
    model, inputs, _ = traced_model("unet")
    evaluated = copy.deepcopy(model).eval()
    expected = evaluated(**inputs)["loss"].detach()
    other = trace(evaluated, (), inputs, training=False)
    plan = random_plan(other.program, 4, 7)

    def call(parallel: Any, inputs: Any) -> Any:
        parallel.eval()
        with torch.no_grad():
            found = parallel(**inputs)["loss"]
        before = {n: b.clone() for n, b in parallel.named_buffers()}
        parallel.train()
        parallel(**inputs)
        assert any(not torch.equal(b, before[n]) for n, b in parallel.named_buffers())
        return found

    made = Executable(other.program, plan, other.constants, other.flatten_inputs, other.unflatten_outputs)
    planner: Any = lambda *_: made  # noqa: E731
    planner.reads = frozenset()
    for found in on_ranks("unet", 4, 1, call, planner=planner):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_eval_of_a_training_only_module_is_an_error() -> None:
    def call(parallel: Any, inputs: Any) -> None:
        parallel.eval()
        with pytest.raises(AutoparError, match="planner"):
            parallel(**inputs)

    on_ranks("unet", 2, 0, call)


def test_printed_program_shows_code_and_collectives() -> None:
    model, _, traced = traced_model("plain_gpt")
    plan = random_plan(traced.program, 4, 3)
    predictions = Predictions(lambda kind, axis, num_bytes: num_bytes * 1e-9, lambda: StepTimeline(0.0, ()))
    text = simulate(4, lambda c: str(build(model, traced, plan, c, predictions=predictions).program))[0]
    assert "blocks.0 ... blocks.1, 2 layers of one kind" in text
    assert "aten.layer_norm" in text
    assert re.search(r"# tests/models.py:\d+  .*self\.norm1\(", text), "the user's own line"
    moves = re.findall(r"(\w+) of ([\d.]+) (KB|B) over \d devices, ([\d.]+) us", text)
    assert {kind for kind, *_ in moves} >= {"all_gather", "reduce_scatter"}
    for _, size, unit, microseconds in moves:
        assert float(microseconds) == pytest.approx(float(size) * (1 if unit == "KB" else 1e-3), rel=1e-2)
    listed = text.count("redistribute(") + text.count("run_kernel(")
    local = sum(line.strip().startswith("# >>") for line in text.splitlines())
    assert 0 < local <= listed


def dropout_model() -> tuple[PlainGPT, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = make_plain_gpt(dropout=0.5)
    assert isinstance(model, PlainGPT)
    return model.double().train(), inputs


def test_dropout_repeats_under_a_seed_and_in_recomputation() -> None:
    model, inputs = dropout_model()
    traced = trace(model, (), inputs)
    plan = random_plan(traced.program, 2, 11)

    def call(communicator: Communicator, recompute: str, seed: int) -> Any:
        parallel = build(model, traced, edited(plan, recompute=recompute), communicator)
        if communicator.rank == 0:
            torch.manual_seed(seed)
        losses = []
        for _ in range(2):
            loss = loss_of(parallel(**inputs))
            losses.append(loss.item())
        loss.backward()
        return losses, {n: parallel._whole(n, p.grad) for n, p in parallel.named_parameters()}

    first = simulate(2, lambda c: call(c, "none", 3))
    assert all(run[0] == first[0][0] for run in first)
    assert first[0][0][0] != first[0][0][1]
    for recompute in ("none", "selective", "full"):
        again = simulate(2, lambda c, recompute=recompute: call(c, recompute, 3))
        assert again[0][0] == first[0][0]
        for name, gradient in first[0][1].items():
            torch.testing.assert_close(again[0][1][name], gradient)
    assert simulate(2, lambda c: call(c, "none", 4))[0][0] != first[0][0]


class Dropped(nn.Module):
    """Shows its dropout mask."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


def test_dropout_differs_between_shards() -> None:
    x = torch.ones(8, 64)
    model = Dropped().train()
    traced = trace(model, (x,), {})
    op = traced.program.layers[0].ops[0]
    assert op.is_random
    plan = random_plan(traced.program, 2, 0)
    for factor in ("d0", "-"):
        fitted = edited(plan, assignments=((factor,),), copies=(), recompute="none")
        runs = simulate(2, lambda c, fitted=fitted: build(model, traced, fitted, c)(x))
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0][:4], runs[0][4:])
        assert set(runs[0].unique().tolist()) == {0.0, 2.0}


def test_inputs_named_as_functions_of_python_are_kept_apart() -> None:
    names = ("sum_1", "sum", "sum_2")  # fx calls the second one sum_3, and sum_2 if the third comes later
    values = {name: Value(name, TensorType((), "float32"), "op", requires_grad=False) for name in (*names, "out")}
    inner = Op("inner", "aten.sub.Tensor", (Ref("sum"), Ref("sum_2")), (), ("out",))
    layer = Layer("one", 0, (inner,), inputs=names, state=(), outputs=("out",))
    program = Program(values, (layer,), (), {}, {}, ("out",))
    strategy = LayerStrategy((1,), (("-",),), (), ((REPLICATE,),) * 3, ((REPLICATE,),), (), ())
    module = layer_program(program, layer, strategy).module
    (found,) = module(torch.tensor(1.0), torch.tensor(5.0), torch.tensor(2.0), None)
    assert found.item() == 3.0
