"""Break the program on purpose: `verify` must notice, and name what differs.  The field has known all of these bugs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import placement
from autopar.errors import ExampleInputsError, PlanMismatchError, VerificationError
from autopar.lower import kernels
from autopar.lower.parameters import layer_parameters as parameters
from autopar.lower.program import layer_ops
from autopar.lower.run import call_executors, hoisted, parallel_module
from autopar.ops import options_for
from autopar.placement import PARTIAL, REPLICATE
from autopar.planning import call_traces
from autopar.program import Op, Option, Program
from autopar.search import SearchRequest, search
from autopar.step.layer.local_program import local_program
from autopar.trace import trace
from autopar.trace.annotations import factors
from tests.models import make, make_plain_gpt
from tests.zoo import forced_plan, quick_prices, quick_search


def plan_of(name: str, *constraints: str, world: int = 2) -> tuple[torch.nn.Module, dict[str, Tensor], autopar.Plan]:
    """A model, its inputs, and a plan made before anything is broken."""
    return *make(name, torch.float32), searched(name, constraints, world)


@cache
def searched(name: str, constraints: tuple[str, ...], world: int) -> autopar.Plan:
    """The plan for a model like it."""
    model, inputs = make(name, torch.float32)
    program = trace(model, (), inputs).program
    return forced_plan(program, world, *constraints)


@pytest.mark.slow
def test_a_good_plan_passes() -> None:
    model, inputs, plan = plan_of("plain_gpt", "data=2")
    assert "2 ranks against one device" in str(autopar.verify(model, plan, inputs, shrink=False))


@pytest.mark.slow
def test_a_plan_that_was_made_on_the_meta_device_is_traced_as_it_was_planned() -> None:
    model, inputs, plan = plan_of("plain_gpt", "data=2")
    planned = copy.deepcopy(model).to("meta")
    report = autopar.verify(model, plan, inputs, shrink=False, planned=planned)
    assert report == autopar.verify(model, plan, inputs, shrink=False)
    other, _, _ = plan_of("flat", "data=2")
    with pytest.raises(ExampleInputsError, match="FlatFunction"):
        autopar.verify(model, plan, inputs, shrink=False, planned=other)


def break_rule(monkeypatch: pytest.MonkeyPatch, target: str, change: Callable[[Option], Option]) -> None:
    """Give every option of `target` to `change` while tracing, which other tests' traces can't stand for."""

    def broken(op: Op, *types: object) -> object:
        match = options_for(op, *types)  # type: ignore[arg-type]
        if match is None or op.target != target:
            return match
        return replace(match, options=tuple(map(change, match.options)))

    monkeypatch.setattr(factors, "options_for", broken)
    monkeypatch.setattr(call_traces, "trace", trace)


def test_a_wrong_rule_is_named_by_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, plan = plan_of("flat", "data=2")

    def summed_is_kept(option: Option) -> Option:
        whole = tuple(REPLICATE if p == PARTIAL else p for p in option.results)
        return option if option.factor.startswith("+") else replace(option, results=whole)

    break_rule(monkeypatch, "aten.sum.default", summed_is_kept)
    with pytest.raises(VerificationError, match=r"first op whose result differs is .*aten\.sum"):
        autopar.verify(model, plan, inputs, shrink=False)


def test_a_mean_over_unevenly_masked_tokens_averaged_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank dividing by its own count is what data parallel wrappers do."""
    model, inputs, plan = plan_of("plain_gpt", "data=2")
    right = kernels.OPS["autopar.cross_entropy_denominator"]
    wrong = {**kernels.OPS, "autopar.cross_entropy_denominator": lambda *args: right(*args) * 0.75}
    monkeypatch.setattr(kernels, "OPS", wrong)
    with pytest.raises(VerificationError, match="loss within"):
        autopar.verify(model, plan, inputs, shrink=False)


NAMES_A_PARAMETER = r"replicas of [\w.]+ differ|gradients within \S+ \([\w.]+\)"


@contextmanager
def moves_forgotten() -> Iterator[None]:
    """Before and behind what is inside, however that ends, nothing keeps the steps of a change of layout."""

    def forget() -> None:
        placement.reshard.cache_clear()
        layer_ops.layout_steps.cache_clear()  # pyright: ignore[reportPrivateUsage]
        local_program.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constraints", "move"),
    [
        ("plain_gpt", ("data=2", "zero=0"), ("R", "B")),  # the all-reduce of gradients
        pytest.param("plain_gpt", ("data=2", "zero=3"), ("S", "B"), marks=pytest.mark.slow),  # their reduce-scatter
        pytest.param("gpt2", ("data=2", "zero=0"), ("R", "B"), marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_is_not_reduced(
    monkeypatch: pytest.MonkeyPatch, name: str, constraints: tuple[str, ...], move: tuple[str, str]
) -> None:
    model, inputs, plan = plan_of(name, *constraints)
    forward, _ = placement._MOVES[move]  # pyright: ignore[reportPrivateUsage]
    backward = "none" if move == ("R", "B") else "slice"
    with monkeypatch.context() as broken, moves_forgotten():
        broken.setitem(placement._MOVES, move, (forward, backward))  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(VerificationError, match=NAMES_A_PARAMETER):
            autopar.verify(model, plan, inputs, shrink=False)
    autopar.verify(model, plan, inputs, shrink=False, steps=1)


@pytest.mark.slow
def test_a_plan_whose_storage_loses_a_tied_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's gradient of a tied weight dropped: only the embedding's arrives."""
    model, inputs, plan = plan_of("gpt2", "data=2")
    right = parameters.LayerParameters.start_reduce

    def drop_in_head(layer: parameters.LayerParameters, gradients: Sequence[Tensor | None]) -> parameters.Reduction:
        is_head = layer.layer == plan.layers[-1].name
        return right(layer, [None if is_head and g is not None and g.shape == (64, 32) else g for g in gradients])

    monkeypatch.setattr(parameters.LayerParameters, "start_reduce", drop_in_head)
    with pytest.raises(VerificationError, match=r"transformer\.wte\.weight"):
        autopar.verify(model, plan, inputs, shrink=False)


def test_a_model_that_draws_is_refused() -> None:
    model, inputs = make_plain_gpt(dropout=0.1)
    program = trace(model, (), inputs).program
    plan = quick_search(program, 2, SearchRequest())
    with pytest.raises(VerificationError, match="the model draws random numbers"):
        autopar.verify(model, plan, inputs)


class OnlyFloat32(nn.Module):
    """A layer whose kernel takes no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.element_size() == 8:  # as a kernel sees it: `x.dtype` is what it is where the model was traced
            raise RuntimeError("Expected a type of float32")
        return self.linear(x).sum()


def test_a_model_that_takes_no_float64_is_refused() -> None:
    model, inputs = OnlyFloat32(), {"x": torch.randn(4, 4)}
    plan = search(trace(model, (), inputs).program, 2, quick_prices(2), SearchRequest())
    with pytest.raises(VerificationError, match="in float64, in which plans are compared: Expected a type"):
        autopar.verify(model, plan, inputs)


@pytest.mark.slow
def test_a_sum_of_terms_that_is_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallel without its forward all-reduce: each rank goes on with its own term."""
    model, inputs, plan = plan_of("llama", "tensor=2", "pieces=1")
    with monkeypatch.context() as broken, moves_forgotten():
        broken.setitem(placement._MOVES, ("P", "R"), ("none", "none"))  # pyright: ignore[reportPrivateUsage]
        broken.setitem(placement._MOVES, ("P", "S"), ("slice", "all_gather"))  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(VerificationError, match="first op whose result differs is"):
            autopar.verify(model, plan, inputs, shrink=False)


def with_factor(plan: autopar.Plan, program: Program, target: str, factor: str) -> autopar.Plan:
    """`plan` with all ops of `target` split in `factor` on every axis."""
    strategies = list(plan.strategies)
    for layer, planned in zip(program.layers, plan.layers, strict=True):
        strategy = strategies[planned.strategy]
        rows = [
            (factor,) * len(strategy.mesh) if op.target == target else row
            for op, row in zip(layer.ops, strategy.assignments, strict=True)
        ]
        strategies[planned.strategy] = replace(strategy, assignments=tuple(rows))
    return plan.with_decisions(strategies=tuple(strategies))


@pytest.mark.slow
def test_a_loss_that_divides_by_each_ranks_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with different numbers of labels that count: the mean of the ranks' means is not the mean."""
    target = "autopar.cross_entropy_denominator"
    model, inputs, plan = plan_of("plain_gpt", "data=2")
    program = trace(model, (), inputs).program
    (op,) = [op for layer in program.layers for op in layer.ops if op.target == target]
    split = next(option.factor for option in op.options if option.results[0] == PARTIAL and option.operands[0].is_shard)
    plan = with_factor(plan, program, target, split)
    autopar.verify(model, plan, inputs, shrink=False, steps=1)
    whole = {PARTIAL: REPLICATE}
    break_rule(monkeypatch, target, lambda o: replace(o, results=tuple(whole.get(p, p) for p in o.results)))
    with pytest.raises(VerificationError, match="cross_entropy_denominator"):
        autopar.verify(model, plan, inputs, shrink=False)


def test_replicas_that_drift_apart() -> None:
    """An optimizer that does not step alike on all ranks leaves different replicas behind."""
    model, inputs, plan = plan_of("plain_gpt", "data=2", "zero=0")
    rates = iter((1e-3, 1e-3, 2e-3))  # the single device, rank 0, rank 1

    def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=next(rates))

    with pytest.raises(VerificationError, match=r"rank 1 has losses|replicas of \S+ differ"):
        autopar.verify(model, plan, inputs, shrink=False, make_optimizer=make_optimizer)


class Averaged(nn.Module):
    """Subtracts a running average in eval mode, and scales by a table that nothing updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("table", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * (2 * self.table).cos()
        if self.training:
            self.average.mul_(0.5).add_(h.detach().sum(0))
        else:
            h = h - (self.average + 1).tanh()
        return h.square().mean()


def plan_of_average() -> tuple[nn.Module, dict[str, Tensor], autopar.Plan]:
    torch.manual_seed(0)
    model, inputs = Averaged(), {"x": torch.randn(8, 8)}
    program = trace(model, (), inputs).program
    return model, inputs, forced_plan(program, 2, "data=2")


def test_evaluation_is_compared() -> None:
    model, inputs, plan = plan_of_average()
    report = autopar.verify(model, plan, inputs, shrink=False)
    assert not report.refusal
    assert [name.removeprefix("output 0 in ") for name in report.output_errors] == [
        "eval mode", "eval mode with other buffers", "training mode with other buffers",
    ]  # fmt: skip


def test_what_is_computed_from_buffers_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, plan = plan_of_average()
    right = hoisted.HoistedValues.begin_step

    def once(self: hoisted.HoistedValues) -> None:
        if not self._values:
            right(self)

    monkeypatch.setattr(hoisted.HoistedValues, "begin_step", once)
    with pytest.raises(
        VerificationError, match=r"output 0 in (eval|training) mode with other buffers.*use of buffers is wrong"
    ):
        autopar.verify(model, plan, inputs, shrink=False)


def test_eval_mode_that_runs_as_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, plan = plan_of_average()
    monkeypatch.setattr(call_executors.CallExecutors, "_mode", lambda *_: True)
    with pytest.raises(VerificationError, match=r"outputs then within .*in eval mode"):
        autopar.verify(model, plan, inputs, shrink=False)


def test_an_eval_mode_that_is_refused_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, plan = plan_of_average()

    def refuse(self: object, **_: object) -> None:
        if not self.training:  # type: ignore[attr-defined]
            raise PlanMismatchError("not here")

    monkeypatch.setattr(
        parallel_module.ParallelModule, "forward", wrapped(parallel_module.ParallelModule.forward, refuse)
    )
    assert "eval mode refused (not here)" in str(autopar.verify(model, plan, inputs, shrink=False))


def wrapped(function: Callable[..., object], before: Callable[..., None]) -> Callable[..., object]:
    def run(self: object, *args: object, **kwargs: object) -> object:
        before(self)
        return function(self, *args, **kwargs)

    return run
