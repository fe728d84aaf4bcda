"""A parallel module is still the user's model: its class, attributes, methods, submodules and printed form."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import ModelError, PlanMismatchError, SubmoduleError
from autopar.lower import ParallelModule
from autopar.lower.communication.simulated_ranks import simulate
from autopar.trace import Traced, trace
from tests.lower.runs import build
from tests.models import make
from tests.random_plans import random_plan


class Block(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.ln = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width, bias=False)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.proj(self.act(self.fc(self.ln(x))))


class GPT(nn.Module):
    """In the style of nanoGPT."""

    def __init__(self, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=width, vocabulary=vocabulary)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(vocabulary, width), "h": nn.ModuleList(Block(width, 0.5) for _ in range(2))}
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.matrices = [self.lm_head, *(block.fc for block in self.transformer["h"])]  # pyright: ignore
        self.log: Callable[[], str] = self.describe
        self.register_buffer("steps", torch.zeros(()))
        self.lm_head.weight.is_tied = True  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](ids)
        for block in self.transformer["h"]:  # pyright: ignore
            x = block(x)
        logits = self.lm_head(x)
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def describe(self) -> str:
        return f"{len(list(self.parameters()))} parameters"

    def get_num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def configure_optimizers(self, weight_decay: float, lr: float) -> torch.optim.Optimizer:
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, eps=1e-5)

    @torch.no_grad()
    def mean_loss(self, ids: Tensor, targets: Tensor) -> float:
        losses = [self(ids, targets)[1].item() for _ in range(2)]
        return sum(losses) / len(losses)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({k.removeprefix("_orig_mod."): v for k, v in state_dict.items()}, strict, assign)


@cache
def traced_gpt() -> tuple[GPT, dict[str, Tensor], Traced]:
    torch.manual_seed(0)
    model = GPT().double()
    inputs = {"ids": torch.randint(0, 32, (4, 8)), "targets": torch.randint(0, 32, (4, 8))}
    return model, inputs, trace(model, (), inputs)


def on_ranks(action: Callable[[Any], Any], world: int = 2, seed: int = 1) -> list[Any]:
    """``action(parallel)`` on every rank of a random plan."""
    model, _, traced = traced_gpt()
    return simulate(world, lambda c: action(build(model, traced, random_plan(traced.program, world, seed), c)))


def train(model: GPT, inputs: dict[str, Tensor]) -> tuple[list[float], str]:
    """What a script does with a model; the same on one device and on many."""
    optimizer = model.configure_optimizers(0.1, 1e-2)
    losses = [model.mean_loss(**inputs)]
    for _ in range(3):
        _, loss = model(**inputs)
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(model.mean_loss(**inputs))
    return losses, model.log()


def test_a_script_uses_its_own_methods_and_attributes() -> None:
    model, inputs, _ = traced_gpt()
    expected = train(copy.deepcopy(model), inputs)
    for seed in range(3):
        for losses, text in on_ranks(lambda parallel: train(parallel, inputs), seed=seed):
            assert losses == pytest.approx(expected[0], rel=1e-10)
            assert text == expected[1]


def test_classes_names_and_printed_form_are_the_originals() -> None:
    model, _, _ = traced_gpt()

    def check(parallel: Any) -> None:
        assert isinstance(parallel, GPT)
        assert isinstance(parallel, ParallelModule)
        assert [(n, type(m)) for n, m in parallel.named_modules()][1:] == [
            (n, type(m)) for n, m in model.named_modules()
        ][1:]
        assert "GPT(" in str(parallel)
        assert all(line in str(parallel) for line in str(model).splitlines()[1:])
        assert parallel.config is model.config
        assert parallel.get_num_params() == model.get_num_params()
        assert parallel.device == model.device
        assert inspect.signature(parallel.forward) == inspect.signature(model.forward)
        assert type(type(parallel)(width=8)) is GPT

    on_ranks(check)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scales: dict[str, float] = {"x": 2.0}, then: list[float] = []) -> Tensor:  # noqa: B006
        return self.linear(x * scales["x"]).mean() + sum(then)


def test_defaults_of_forward_may_have_no_hash() -> None:
    model, x = Scaled(), torch.randn(4, 8)
    traced = trace(model, (x,), {})

    def run(parallel: Any) -> tuple[str, float]:
        return str(inspect.signature(parallel.forward)), parallel(x).item()

    results = simulate(2, lambda c: run(build(model, traced, random_plan(traced.program, 2, 1), c)))
    assert results == [(str(inspect.signature(model.forward)), pytest.approx(model(x).item(), rel=1e-5))] * 2


def test_attributes_lead_to_the_parallel_modules_own_parts() -> None:
    model, _, _ = traced_gpt()

    def check(parallel: Any) -> None:
        assert parallel.matrices == [parallel.lm_head, *(block.fc for block in parallel.transformer["h"])]
        assert parallel.log.__self__ is parallel
        assert parallel.lm_head.weight is parallel.get_parameter("transformer.wte.weight")
        assert parallel.lm_head.weight.is_tied
        assert parallel.lm_head.in_features == 16
        assert parallel.transformer["h"][0].fc.bias.shape == (64,)

    before = {name: (id(value), type(value)) for name, value in vars(model).items()}
    on_ranks(check)
    assert {name: (id(value), type(value)) for name, value in vars(model).items()} == before


def test_overridden_state_handling_leads_to_the_parallel_modules() -> None:
    model, _, _ = traced_gpt()
    other = {f"_orig_mod.{name}": value + 1 for name, value in model.state_dict().items()}

    def load(parallel: Any) -> dict[str, Tensor]:
        parallel.load_state_dict(other)
        return parallel.full_state_dict()

    for found in on_ranks(load):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value + 1, rtol=0, atol=0)


def test_submodules_need_a_planner_to_run_alone() -> None:
    def check(parallel: Any) -> None:
        with pytest.raises(SubmoduleError, match=r"'transformer.h.1' is part of .* without a planner.* call the whole"):
            parallel.transformer["h"][1](torch.ones(2, 16))
        with pytest.raises(PlanMismatchError, match="Convert the model before"):
            parallel.lm_head.half()
        parallel.lm_head.double()

    on_ranks(check)


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_forward_hook(print),
        lambda m: m.register_forward_pre_hook(print, with_kwargs=True),
        lambda m: m.register_full_backward_hook(print),
        lambda m: m.register_full_backward_pre_hook(print),
    ],
)
def test_hooks_on_submodules_are_refused_and_those_on_the_model_fire(register: Any) -> None:
    _, inputs, _ = traced_gpt()

    def check(parallel: Any) -> None:
        with pytest.raises(SubmoduleError, match=r"the hook 'print' would never run.*Register hooks on the whole"):
            register(parallel.transformer["h"][0].fc)
        seen: list[Any] = []
        parallel.register_forward_hook(lambda module, args, kwargs, out: seen.append((module, out)), with_kwargs=True)
        out = parallel(**inputs)
        assert seen == [(parallel, out)]

    on_ranks(check)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "lm_head", nn.Linear(16, 4)), "'lm_head' of a parallelized model can't be"),
        (lambda m: m.add_module("extra", nn.Linear(16, 4)), "Change the original model"),
        (lambda m: m.transformer["h"].append(nn.Linear(4, 4)), "submodule '2'"),
        (lambda m: delattr(m, "lm_head"), "'lm_head'"),
        (lambda m: m.compile(), "pass compile=True to autopar.parallelize"),
        (copy.copy, r"use copy\.deepcopy"),
    ],
)
def test_what_can_not_work_says_what_does(change: Any, message: str) -> None:
    def check(parallel: Any) -> None:
        with pytest.raises(ModelError, match=message):
            change(parallel)

    on_ranks(check)


def test_attributes_that_autopar_hides_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Planner(nn.Linear):
        def plan(self) -> str:
            return "mine"

    model = Planner(4, 4)
    traced = trace(model, (torch.ones(2, 4),), {})
    plan = random_plan(traced.program, 1, 0)
    with caplog.at_level(logging.WARNING, "autopar"):
        (found,) = simulate(1, lambda c: build(model, traced, plan, c))
    assert "Planner has attributes that a parallelized model uses itself, which hide them: plan" in caplog.text
    assert found.plan == plan


def test_a_copy_trains_apart_from_its_model() -> None:
    model, inputs, _ = traced_gpt()

    seen: set[Any] = set()

    def note(module: Any, *_: Any) -> None:
        seen.add(module)

    def check(parallel: Any) -> Any:
        parallel.steps += 1
        parallel.register_forward_hook(note)
        twin = copy.deepcopy(parallel)
        assert type(twin) is type(parallel)
        assert twin.matrices[0] is twin.lm_head is not parallel.lm_head
        assert twin.log.__self__ is twin
        assert twin.lm_head.weight is twin.get_parameter("transformer.wte.weight")
        parallel.steps += 1
        before = parallel.full_state_dict()
        found = train(twin, inputs)
        after = parallel.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert twin.steps == 1
        assert train(parallel, inputs) == found
        assert {twin, parallel} <= seen
        return found[0]

    expected = train(copy.deepcopy(model), inputs)[0]
    for found in on_ranks(check):
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.gradient_checkpointing_enable(), "memory=, or a constraint such as 'recompute=full'"),
        (lambda m: m.resize_token_embeddings(128), "resize those of the original model"),
        (lambda m: m.share_memory(), "share the tensors of full_state_dict"),
        (
            lambda m: m.set_input_embeddings(nn.Embedding(4, 4)),
            "'wte' of a parallelized model can't be added, replaced",
        ),
    ],
)
def test_methods_of_frameworks_that_can_not_work_say_what_does(call: Any, message: str) -> None:
    model, inputs = make("gpt2")
    traced = trace(model, (), inputs)
    plan = random_plan(traced.program, 1, 0)
    (parallel,) = simulate(1, lambda c: build(model, traced, plan, c))
    with pytest.raises(ModelError, match=message):
        call(parallel)
