"""One step: gradients released by its loss, backward called in the ways that autograd has, what runs in what order."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import AutoparError, InputShapeError, PipelineError
from autopar.lower import ParallelModule
from autopar.lower.parameters import layer_parameters
from autopar.lower.program.saved_tensors import SavedTensor
from autopar.lower.run import layer_pass
from autopar.lower.run.step_runner import StepRunner
from autopar.plan import Plan
from autopar.schedules.action_lists import Action
from autopar.step.simulation.actions import StepActions
from autopar.trace import Traced
from autopar.verify.rehearsal import run_ranks
from tests.random_plans import random_pipeline, random_plan
from tests.zoo import forced_plan, keep_double_program, trace_model


class TwoHeads(nn.Module):
    """Two outputs that share a trunk, and one that shares nothing with them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.alone = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, 8] -> three times [batch, 4]."""
        trunk = torch.tanh(self.trunk(x))
        return self.heads[0](trunk), self.heads[1](trunk), self.alone(x)


def two_heads() -> tuple[nn.Module, Mapping[str, Tensor], Traced]:
    torch.manual_seed(0)
    model = TwoHeads().double()
    inputs = {"x": torch.randn(4, 8, dtype=torch.float64)}
    return model, inputs, keep_double_program(trace_model(copy.deepcopy(model), inputs))


def gradients_of(model: nn.Module, use: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """What `use` leaves in the parameters, whole."""
    use(model)
    whole = model._whole if isinstance(model, ParallelModule) else (lambda _, x: x.clone())
    return {name: whole(name, p.grad) for name, p in model.named_parameters() if p.grad is not None}


def check(use: Callable[[nn.Module], None], zero: int, model: nn.Module, traced: Traced, plan: Plan) -> None:
    expected = gradients_of(copy.deepcopy(model), use)
    for found in run_ranks(model, traced, plan, lambda parallel: gradients_of(parallel, use)):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=f"zero={zero}: {name}")


def with_zero(plan: Plan, zero: int) -> Plan:
    strategies = tuple(replace(strategy, zero=zero) for strategy in plan.strategies)
    return plan.with_decisions(strategies=strategies)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_backward_can_be_called_for_one_output_after_the_other(zero: int) -> None:
    model, inputs, traced = two_heads()
    plan = with_zero(random_plan(traced.program, 2, 1), zero)

    def one_by_one(model: nn.Module) -> None:
        first, second, alone = model(**inputs)
        first.sum().backward(retain_graph=True)
        alone.square().sum().backward()
        second.square().sum().backward()

    check(one_by_one, zero, model, traced, plan)


@pytest.mark.parametrize("zero", [0, 3])
def test_backward_twice_with_the_graph_retained_adds_up(zero: int) -> None:
    model, inputs, traced = two_heads()
    plan = with_zero(random_plan(traced.program, 2, 2), zero)

    def twice(model: nn.Module) -> None:
        loss = torch.stack([output.square().sum() for output in model(**inputs)]).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    check(twice, zero, model, traced, plan)


def test_the_gradient_of_an_output_is_freed_when_it_is_used_up() -> None:
    """It may be as large as logits, and whoever keeps it keeps it through the whole backward."""
    model, x, traced = with_loss(asks=False)

    def is_freed(parallel: ParallelModule) -> list[bool]:
        seen: list[bool] = []
        made: list[weakref.ref[Tensor]] = []
        right = layer_pass.LayerPass.backward

        class Noting(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, loss: Tensor) -> Tensor:
                return loss.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                gradient = gradients[0] * 2
                made.append(weakref.ref(gradient.untyped_storage()))
                return gradient

        def noting(own: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(made[0]() is None)
            right(own, *args, **kwargs)

        loss = parallel(x=x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_pass.LayerPass, "backward", noting)
            Noting.apply(loss).backward()
        return seen

    (seen,) = run_ranks(model, traced, random_plan(traced.program, 1, 1), is_freed)
    assert seen == [False] + [True] * (len(seen) - 1)
    assert len(seen) > 2


def test_backward_twice_without_says_what_to_do() -> None:
    model, inputs, traced = two_heads()

    def twice(parallel: ParallelModule) -> str:
        output = parallel(**inputs)[0]
        output.sum().backward()
        with pytest.raises((AutoparError, RuntimeError)) as caught:
            output.sum().backward()
        return str(caught.value)

    for message in run_ranks(model, traced, random_plan(traced.program, 2, 1), twice):
        assert "retain_graph=True" in message


def test_gradients_of_gradients_are_refused_not_dropped() -> None:
    """A penalty on what ``create_graph=True`` gave would add nothing to any gradient."""
    model, inputs, traced = two_heads()

    def penalize(parallel: ParallelModule) -> str:
        x = inputs["x"].clone().requires_grad_()
        with pytest.raises(AutoparError) as caught:
            torch.autograd.grad(parallel(x=x)[0].sum(), x, create_graph=True)
        return str(caught.value)

    for message in run_ranks(model, traced, random_plan(traced.program, 2, 1), penalize):
        assert "create_graph=True" in message
        assert "parallelize that module" in message


class Block(nn.Module):
    """A layer of `Loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] -> [batch, 8]."""
        return x + self.narrow(torch.tanh(self.wide(x)))


class Loss(nn.Module):
    """A chain of layers, and a loss of its end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] -> a scalar."""
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64))


def with_loss(*, asks: bool) -> tuple[nn.Module, Tensor, Traced]:
    torch.manual_seed(0)
    model, x = Loss().double(), torch.randn(4, 8, dtype=torch.float64)
    example = x.clone().requires_grad_(asks)
    return model, x, keep_double_program(trace_model(copy.deepcopy(model), {"x": example}))


@pytest.mark.parametrize("runs", ["at once", "in microbatches", "in stages"])
def test_an_input_gets_its_gradient(runs: str) -> None:
    # An input that asks beforehand is not cut in microbatches.
    model, x, traced = with_loss(asks=runs == "in stages")
    program = traced.program
    plan = {
        "at once": lambda: random_plan(program, 2, 3),
        "in microbatches": lambda: random_plan(program, 2, 3, num_microbatches=2),
        "in stages": lambda: random_pipeline(program, 4, 0, 2, "gpipe", 1),
    }[runs]()

    def gradient(model: nn.Module) -> Tensor:
        given = x.clone().requires_grad_()
        (3 * model(x=given)).backward()
        assert given.grad is not None
        return given.grad

    expected = gradient(copy.deepcopy(model))
    for found in run_ranks(model, traced, plan, gradient):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_flow_on_through_what_made_an_input(num_microbatches: int) -> None:
    """Once, and after the step's backward: the caller's own ops in front are not a part of the step."""
    model, x, traced = with_loss(asks=False)
    plan = random_plan(traced.program, 2, 3, num_microbatches=num_microbatches)

    def gradient(model: nn.Module) -> Tensor:
        given = x.clone().requires_grad_()
        model(x=given + torch.softmax(given, 1)).backward()
        assert given.grad is not None
        return given.grad

    expected = gradient(copy.deepcopy(model))
    for found in run_ranks(model, traced, plan, gradient):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_with_stages_an_input_says_beforehand_that_it_wants_a_gradient() -> None:
    model, x, traced = with_loss(asks=False)
    plan = random_pipeline(traced.program, 2, 0, 2, "1f1b", 2)
    with pytest.raises(InputShapeError, match=r"'x' requires a gradient.*requires_grad_\(\) on the example input"):
        run_ranks(model, traced, plan, lambda parallel: parallel(x=x.clone().requires_grad_()))


@pytest.mark.parametrize("action", ["1F1", "0B0", "1SEND_B1", "0RECV_B0"])
def test_a_failing_action_is_named(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    model, x, traced = with_loss(asks=False)
    plan = random_pipeline(traced.program, 2, 0, 2, "1f1b", 2)
    right = StepRunner._run  # pyright: ignore[reportPrivateUsage]

    def failing(step: StepRunner, each: Action) -> None:
        if str(each) == action:
            raise ZeroDivisionError("by design")
        right(step, each)

    monkeypatch.setattr(StepRunner, "_run", failing)
    who = rf"rank {action[0]} \(device group {action[0]}\)"
    with pytest.raises(PipelineError, match=f"{who} failed in stage {action[0]}, action {action}: Zero") as caught:
        run_ranks(model, traced, plan, lambda parallel: parallel(x=x))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "start again" in str(caught.value)


def test_a_failing_step_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, traced = with_loss(asks=False)
    plan = forced_plan(traced.program, 2, "data=2", "zero=3")
    saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
    right = SavedTensor.__init__

    def noting(own: SavedTensor, tensor: Tensor) -> None:
        right(own, tensor)
        saved.add(own)

    def failing(*args: object, **kwargs: object) -> None:
        assert saved
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(SavedTensor, "__init__", noting)
    monkeypatch.setattr(layer_pass.LayerPass, "backward", failing)
    with pytest.raises(ZeroDivisionError) as caught:
        run_ranks(model, traced, plan, lambda parallel: parallel(x=x).backward())
    del caught
    gc.collect()
    assert not saved


class Watch:
    """Notes what each rank (a thread) really runs: collectives of parameters, and programs of layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._logs = threading.local()
        parameters, layers = layer_parameters.LayerParameters, layer_pass.LayerPass
        self._note(monkeypatch, parameters, "start_gather", "UNSHARD", lambda own: own.layer)
        self._note(monkeypatch, parameters, "start_reduce", "REDUCE", lambda own: own.layer)
        self._note(monkeypatch, layers, "__init__", "F", lambda own: own._runner.layer.name)
        self._note(monkeypatch, layers, "backward", "B", lambda own: own._runner.layer.name)
        self._note(monkeypatch, layers, "backward_inputs", "I", lambda own: own._runner.layer.name)
        self._note(monkeypatch, layers, "backward_weights", "W", lambda own: own._runner.layer.name)

    def log(self, step: Callable[[], object]) -> list[str]:
        self._logs.own = []
        step()
        return self._logs.own

    def _note(
        self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, kind: str, name: Callable[[Any], str]
    ) -> None:
        right = getattr(owner, method)

        def noting(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = right(own, *args, **kwargs)
            if hasattr(self._logs, "own"):
                self._logs.own.append(f"{kind} {name(own)}")
            return result

        monkeypatch.setattr(owner, method, noting)


def listed(actions: StepActions, group: int, names: Sequence[str]) -> list[str]:
    """The same by the list that the simulation times."""
    inside = (each for action in actions.listed[group] for each in actions.of(action))
    every = (*actions.begin(group), *inside, *actions.end(group))
    kinds = ("UNSHARD", "REDUCE", "F", "B", "I", "W")
    return [f"{each.kind} {names[each.layer]}" for each in every if each.kind in kinds]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["", "in microbatches", "1f1b", "zbv"])
def test_what_runs_is_what_is_listed(monkeypatch: pytest.MonkeyPatch, schedule: str, zero: int) -> None:
    model, x, traced = with_loss(asks=False)
    program = traced.program
    if schedule in ("1f1b", "zbv"):
        plan = random_pipeline(program, 4, 1, 2, schedule, 4)
    else:
        plan = random_plan(program, 2, 3, num_microbatches=2 if schedule else 1)
    plan = with_zero(plan, zero)
    watch = Watch(monkeypatch)

    def check_rank(parallel: ParallelModule) -> None:
        log = watch.log(lambda: parallel(x=x).backward())
        executor = parallel._executor
        names = [layer.name for layer in program.layers]
        assert log == listed(executor.training_actions, executor.stages.group, names)

    run_ranks(model, traced, plan, check_rank)
