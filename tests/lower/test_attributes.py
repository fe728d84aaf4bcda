"""Attributes that a forward reads may change after `parallelize`: calls then do what one device does with them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.objects.attribute_contents import contents_of, has_contents
from autopar.planning.building import call_planner
from autopar.trace import Traced, trace
from tests.end_to_end.harness import launch, parallelize
from tests.lower.runs import build
from tests.random_plans import random_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.fc(x).tanh()


@dataclass
class Config:
    """In the style of a library: modules share it, and read it when they run."""

    power: int = 1
    names: list[str] = field(default_factory=list)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, {"exponent": "power"}.get(name, name))


class Chunked(nn.Module):
    """Gives its result in as many chunks as it was told to, whole for 0."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.num_chunks, self.temperature, self.calls = 2, None, 0
        self.gain = torch.ones(8, dtype=torch.float64)
        self.config = Config()

    def set_num_chunks(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        x = x * self.gain if self.training else x if self.temperature is None else x / self.temperature
        x = x**self.config.exponent
        return list(x.chunk(self.num_chunks)) if self.num_chunks else x


X = torch.arange(32, dtype=torch.float64).view(4, 8) / 16


@cache
def traced_model() -> tuple[Chunked, Traced]:
    torch.manual_seed(0)
    model = Chunked().double()
    return model, trace(model, (X,), {}, training=True)


def on_ranks(action: Any) -> list[Any]:
    """What `action` of the model gives on each of two ranks."""
    model, traced = traced_model()
    plan = random_plan(traced.program, 2, 0)
    planner = call_planner(model, traced, plan)
    scale, chunks, sharp = ("blocks.1", "scale", 3.0), ("", "num_chunks", 0), ("", "temperature", 0.5)
    power = ("config", "power", 2)
    training: list[tuple[Any, ...]] = [(chunks, power), (scale,), (chunks,), ()]
    for mode, settings in (*((True, each) for each in training), (False, (chunks, sharp)), (False, ())):
        planner((X,), {}, mode, "", None, settings)  # ranks are threads, and tracing is for one at a time
    return simulate(2, lambda communicator: action(build(model, traced, plan, communicator, planner=planner)))


def results(model: Any) -> list[Any]:
    """Outputs and a gradient, with attributes changed and set back, by methods and by hand."""
    model.config = replace(model.config)  # simulated ranks share the original's

    def call() -> Tensor:
        given = model(X)
        return torch.cat([x + 0 for x in given]) if isinstance(given, list) else 10 + given

    found: list[Any] = [call().detach()]
    model.blocks[1].scale = 3.0
    call().sum().backward()
    gradient = model.blocks[1].fc.weight.grad
    found.append(getattr(gradient, "full_tensor", lambda: gradient)().clone())
    model.blocks[1].scale = 1.0
    model.set_num_chunks(0)
    found.append(call().detach())
    model.config.power = 2
    found.append(call().detach())
    model.config.power = 1
    model.eval()
    with torch.no_grad():
        model.temperature = 0.5
        found.append(call())
        model.temperature = None
        model.set_num_chunks(2)
        model.calls = 7  # nobody reads it
        found.append(call())
    model.train()
    model.zero_grad(set_to_none=True)
    return [*found, call().detach()]


def test_calls_do_what_one_device_does_with_the_present_values() -> None:
    model, _ = traced_model()

    def on_rank(parallel: Any) -> tuple[list[Any], int, list[str]]:
        found = results(parallel)
        return found, len(parallel.plans), [call.inputs for call in parallel.plans]

    expected = results(model)
    for found, count, texts in on_ranks(on_rank):
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
        assert count == 6, texts  # coming back to values that were seen plans nothing, nor does what nobody reads
        assert any("blocks.1.scale = 3.0" in text for text in texts)


class Normed(nn.Module):
    """With modules whose modes and numbers scripts change while they train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.dropout, self.last = nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.bn(self.first(x))))


def without_dropout(model: Any) -> None:
    model.dropout.p = 0.0


def with_frozen_norm(model: Any) -> None:
    without_dropout(model)
    model.bn.eval()


def with_average_over_batches(model: Any) -> None:
    """As torch.optim.swa_utils.update_bn does."""
    without_dropout(model)
    model.bn.reset_running_stats()
    model.bn.momentum = None


def evaluating_with_batch_statistics(model: Any) -> None:
    model.eval()
    model.bn.train()


CHANGES = {
    without_dropout: (True, (("dropout", "p", 0.0),)),
    with_frozen_norm: (True, (("bn", "training", False), ("dropout", "p", 0.0))),
    with_average_over_batches: (True, (("bn", "momentum", None), ("dropout", "p", 0.0))),
    evaluating_with_batch_statistics: (False, (("bn", "training", True),)),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("change", CHANGES)
def test_modes_and_numbers_of_submodules_may_change(change: Any) -> None:
    torch.manual_seed(0)
    model = Normed().double()
    traced = trace(model, (X,), {}, training=True)
    plan = random_plan(traced.program, 2, 0)
    planner = call_planner(model, traced, plan)
    planner((X,), {}, CHANGES[change][0], "", None, CHANGES[change][1])

    def run(model: Any) -> list[Any]:
        change(model)
        outputs = [model(X), model(2 * X)]
        outputs[0].pow(3).sum().backward()
        gradient = model.first.weight.grad
        found = [*(x.detach() for x in outputs), getattr(gradient, "full_tensor", lambda: gradient)().clone()]
        return found + [x.detach().clone() for x in model.bn.buffers()]

    expected = run(copy.deepcopy(model))
    for found in simulate(2, lambda communicator: run(build(model, traced, plan, communicator, planner=planner))):
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


class Style(Enum):
    SUM = "sum"
    MEAN = "mean"


class Shared:
    """A record that copies as itself."""

    def __init__(self) -> None:
        self.scale, self.inner = 2.0, Config()

    def __deepcopy__(self, memo: object) -> Shared:
        return self


class Styled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.style, self.shared = nn.Linear(8, 8), Style.SUM, Shared()

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x) * self.shared.scale**self.shared.inner.power
        return x.sum() if self.style is Style.SUM else x.mean()


def test_what_copies_as_itself_is_not_written_to() -> None:
    model = Styled().double()
    traced = trace(model, (X,), {}, training=True)
    planner = call_planner(model, traced, random_plan(traced.program, 2, 0))
    settings = ("shared", "scale", 3.0), ("shared.inner", "power", 2), ("", "style", Style.MEAN)
    found = planner((X,), {}, True, "", None, tuple(sorted(settings, key=lambda each: each[:2])))
    planner((X,), {}, True, "", None, ())
    assert found.settings == (("", "style", Style.MEAN), ("shared", "scale", 3.0), ("shared.inner", "power", 2))
    assert (model.shared.scale, model.shared.inner.power, Style.SUM.name) == (2.0, 1, "SUM")


def test_without_a_planner_a_mode_is_kept() -> None:
    model = Normed().double()
    traced = trace(model, (X,), {}, training=True)

    def on_rank(parallel: Any) -> None:
        parallel.bn.eval()
        with pytest.raises(ModelError, match=r"without a planner .* now bn.training = False"):
            parallel(X)

    plan = random_plan(traced.program, 2, 0)
    simulate(2, lambda communicator: on_rank(build(model, traced, plan, communicator)))


def test_an_object_in_place_of_a_number_is_refused() -> None:
    def on_rank(model: Any) -> None:
        model.temperature = torch.ones(8)
        with pytest.raises(ModelError, match=r"'temperature', which was None .* and is a Tensor now"):
            model(X)
        model.temperature = None
        model.gain = 2 * model.gain
        with pytest.raises(
            ModelError,
            match=r"'gain', a Tensor that was replaced or written to .* Only numbers, flags and text may change",
        ):
            model(X)

    on_ranks(on_rank)


class Schedule:
    """A helper as scripts write them, with numbers and a tensor."""

    def __init__(self) -> None:
        self.power, self.betas = 1, torch.ones(8, dtype=torch.float64)


class Optioned(nn.Module):
    """Reads options from containers, and calls a function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), torch.tanh
        self.options: dict[str, Any] = {"scale": 1.0, "steps": [1, 2]}
        self.parts, self.tables = {"square"}, {"a": torch.ones(8, dtype=torch.float64)}
        self.stages = [Config(), Config()]
        self.schedule = Schedule()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.fc(x)) * self.options["scale"] * self.options["steps"][1] * self.tables["a"]
        x = x ** (self.stages[1].power + self.schedule.power) * self.schedule.betas
        return (x * x if "square" in self.parts else x).sum()


def in_a_dict(model: Any) -> None:
    model.options["scale"] = 3.0


def in_a_list_of_a_dict(model: Any) -> None:
    model.options["steps"][1] = 5


def in_a_set(model: Any) -> None:
    model.parts.clear()


def in_a_record_of_a_list(model: Any) -> None:
    model.stages[1].power = 2


def in_a_helper(model: Any) -> None:
    model.schedule.power = 2


def by_another_tensor_in_a_dict(model: Any) -> None:
    model.tables["a"] = torch.full((8,), 2.0, dtype=torch.float64)


def by_writing_to_a_tensor(model: Any) -> None:
    model.schedule.betas.mul_(2)


def by_another_function(model: Any) -> None:
    model.act = torch.sin


PLANNED = in_a_dict, in_a_list_of_a_dict, in_a_set, in_a_record_of_a_list, in_a_helper
REFUSED = {
    by_another_tensor_in_a_dict: r"'tables', a dict of objects that was replaced or written to",
    by_writing_to_a_tensor: r"'schedule.betas', a Tensor that was replaced or written to",
    by_another_function: r"'act', which was the function tanh when .* and is the function sin now",
}


def test_what_is_in_containers_may_change_too_and_objects_in_them_are_refused_by_name() -> None:
    torch.manual_seed(0)
    model = Optioned().double()
    traced = trace(model, (X,), {}, training=True)
    plan = random_plan(traced.program, 2, 0)
    planner = call_planner(model, traced, plan)

    def loss_after(change: Any, model: Any) -> float:
        change(model)
        return float(model(X).detach())

    expected = {change: loss_after(change, copy.deepcopy(model)) for change in PLANNED}
    lock = Lock()  # ranks are threads, and tracing is for one at a time

    class OneAtATime:
        reads, submodule, groups = planner.reads, planner.submodule, planner.groups

        def __call__(self, *args: Any) -> Any:
            with lock:
                return planner(*args)

    def on_rank(parallel: Any) -> dict[Any, float]:
        before = float(parallel(X).detach())
        found: dict[Any, float] = {}
        for change in PLANNED:
            mine = copy.deepcopy(parallel)  # which has containers and tensors of its own
            assert float(mine(X).detach()) == before
            found[change] = loss_after(change, mine)
            change(mine)
            assert len(mine.plans) == 2
        for change, text in REFUSED.items():
            mine = copy.deepcopy(parallel)
            change(mine)
            with pytest.raises(ModelError, match=text):
                mine(X)
        assert float(parallel(X).detach()) == before
        return found

    for found in simulate(2, lambda c: on_rank(build(copy.deepcopy(model), traced, plan, c, planner=OneAtATime()))):
        assert found == pytest.approx(expected, rel=1e-12)


def test_transforms_of_torch_func_are_refused() -> None:
    def on_rank(model: Any) -> None:
        def loss(x: Tensor) -> Tensor:
            return torch.cat(model(x)).sum()

        with pytest.raises(ModelError, match=r"in torch.func's grad, vmap"):
            torch.func.grad(loss)(X)

    on_ranks(on_rank)


def test_parameters_in_a_list_may_be_trained() -> None:
    """As those that recurrent modules list."""
    weight = nn.Parameter(torch.ones(2))
    before = contents_of([weight, 1], copies=True)
    with torch.no_grad():
        weight.add_(1)
    assert has_contents([weight, 1], before)
    assert not has_contents([weight, 2], before)
    assert before.value is None  # no copy of what may be large


class Saving(Chunked):
    """Notes in its config, which forward reads, what it is when it saves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"temperature": 2.0}

    def forward(self, x: Tensor) -> Any:
        return self.blocks[0](x).square().mean() * self.settings["temperature"]

    def save_pretrained(self, folder: Path) -> None:
        self.settings["version"] = "1.0"
        torch.save(self.state_dict(), folder / "weights.pt")
        (folder / "settings.json").write_text(json.dumps(self.settings))


def check_saved(folder: Path) -> None:
    """Only the first rank writes, and none has to plan again."""
    model = Saving().double()
    parallel: Any = parallelize(model, X)
    before = parallel(X).item()
    parallel.save_pretrained(folder)
    assert json.loads((folder / "settings.json").read_text()) == {"temperature": 2.0, "version": "1.0"}
    assert parallel(X).item() == before
    assert len(parallel.plans) == 1


@pytest.mark.slow
def test_saving_on_one_rank_changes_no_attributes(tmp_path: Path) -> None:
    launch(2, partial(check_saved, tmp_path))
