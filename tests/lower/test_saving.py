"""Files of a parallel module's state: whole under every plan, or an error that says which call gives that."""

from __future__ import annotations

import copy
import io
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from autopar.errors import ModelError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.compat import leaves_of
from autopar.plan import Plan
from autopar.trace import Traced, trace
from tests.lower.runs import build
from tests.models import make
from tests.random_plans import random_plan, with_stages


@cache
def traced_model(name: str) -> tuple[nn.Module, dict[str, Any], Traced]:
    model, inputs = make(name)
    return model, inputs, trace(model, (), inputs)


def plans(traced: Traced) -> list[Plan]:
    """Without and with stages."""
    staged = with_stages(random_plan(traced.program, 1, 3, 2), 2, "1f1b", 2, random.Random(0))
    return [random_plan(traced.program, 2, 1), staged]


def on_ranks(name: str, plan: Plan, action: Any) -> list[Any]:
    model, _, traced = traced_model(name)
    return simulate(plan.world_size, lambda c: action(build(model, traced, plan, c)))


def reloaded(saved: Any) -> Any:
    """What a file of it has; every rank calls it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)


def assert_same_state(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is Tensor
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_file_of_a_state_is_that_of_the_whole_model(name: str) -> None:
    model, _, traced = traced_model(name)
    expected: Any = model.state_dict()

    def save(parallel: Any) -> None:
        state = parallel.state_dict()
        assert any(isinstance(value, DTensor) for value in state.values())
        best = copy.deepcopy(state)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.add_(1)
        for saved in (best, copy.copy(best)):
            assert_same_state(reloaded(saved), expected)
        loaded = reloaded({"model": best, "epoch": 3, "prefixed": parallel.state_dict(prefix="net.")})
        assert_same_state(loaded["model"], expected)
        assert loaded["model"]._metadata == expected._metadata
        assert len({x.data_ptr() for x in loaded["model"].values()}) == len({x.data_ptr() for x in expected.values()})
        assert_same_state(loaded["prefixed"], {f"net.{name}": x for name, x in parallel.full_state_dict().items()})

    for plan in plans(traced):
        on_ranks(name, plan, save)


def test_a_state_whose_entries_were_replaced_is_refused_with_stages() -> None:
    def save(parallel: Any) -> None:
        state = parallel.state_dict()
        for name in state:
            state[name] = state[name].half() if isinstance(state[name], DTensor) else state[name]
        with pytest.raises(ModelError, match=r"was replaced or removed, or has another dtype.*full_state_dict\(\)"):
            torch.save(state, io.BytesIO())

    on_ranks("llama", plans(traced_model("llama")[2])[1], save)


def test_a_state_is_kept_and_loaded_again() -> None:
    def keep(parallel: Any) -> None:
        best = copy.deepcopy(parallel.state_dict())
        before = parallel.full_state_dict()
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.add_(1)
        parallel.load_state_dict(best)
        for name, value in parallel.full_state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)

    for plan in plans(traced_model("gpt2")[2]):
        on_ranks("gpt2", plan, keep)


@pytest.mark.parametrize(("name", "part"), [("gpt2", "transformer"), ("gpt2", "transformer.h.0"), ("llama", "lm_head")])
def test_a_file_of_the_state_of_a_submodule_has_what_all_stages_hold(name: str, part: str) -> None:
    """It was refused, or empty on ranks whose stage has nothing of the submodule.  Without stages each tensor of a
    submodule is written whole by itself, which real processes only can do.
    """
    model, _, traced = traced_model(name)
    expected: Any = model.get_submodule(part).state_dict()

    def save(parallel: Any) -> None:
        state = parallel.get_submodule(part).state_dict()
        assert_same_state(reloaded(state), expected)
        loaded = reloaded({"encoder": copy.deepcopy(state)})["encoder"]
        assert_same_state(loaded, expected)
        assert loaded._metadata == expected._metadata

    on_ranks(name, plans(traced)[1], save)


def test_a_submodule_loads_the_state_of_one_with_the_same_stages() -> None:
    """As a copy that follows a model by averages does; ranks missed what other stages have."""

    def load(parallel: Any) -> None:
        follower = copy.deepcopy(parallel)
        with torch.no_grad():
            for parameter in follower.parameters():
                parameter.add_(1)
        encoder = follower.get_submodule("transformer")
        encoder.load_state_dict(parallel.get_submodule("transformer").state_dict())
        assert_same_state(follower.full_state_dict(), parallel.full_state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):  # on every rank
            encoder.load_state_dict({"wpe.weight": parallel.full_state_dict()["transformer.wpe.weight"]})

    on_ranks("gpt2", plans(traced_model("gpt2")[2])[1], load)


def test_a_state_is_loaded_by_a_model_with_other_stages() -> None:
    """Some ranks lacked entries of stages that were cut elsewhere, and others went on."""
    model, _, traced = traced_model("gpt2")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    sharded, staged = plans(traced)
    cut_elsewhere = with_stages(random_plan(traced.program, 1, 3, 2), 2, "1f1b", 2, random.Random(1))
    assert staged.stages != cut_elsewhere.stages

    def load(source: Plan, target: Plan, change: Any, communicator: Any) -> None:
        student, teacher = (
            build(each, traced, plan, communicator) for each, plan in ((model, source), (other, target))
        )
        teacher.load_state_dict(change(student.state_dict()))
        assert_same_state(teacher.full_state_dict(), model.state_dict())

    for target, change in ((cut_elsewhere, copy.deepcopy), (sharded, copy.copy)):
        simulate(2, partial(load, staged, target, change))


def test_the_whole_state_that_torch_gathers_has_all_stages() -> None:
    """It was silently that of one stage."""
    model, _, traced = traced_model("llama")
    options = StateDictOptions(full_state_dict=True)
    expected = model.state_dict()

    def gather(parallel: Any) -> dict[str, Any]:
        return get_model_state_dict(parallel, options=options)

    for state in on_ranks("llama", plans(traced)[1], gather):
        assert state.keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in state.items())


def test_what_async_save_stages_are_the_ranks_parts() -> None:
    """Of a parameter it was plain memory that nobody had written to; with stages, ranks waited for each other."""

    def stage(parallel: Any) -> None:
        optimizer = torch.optim.AdamW(parallel.parameters())
        for state in (parallel.state_dict(), get_optimizer_state_dict(parallel, optimizer)["state"]):
            tensors: list[Any] = [x for x in leaves_of(state) if isinstance(x, DTensor)]
            staged = StateDictStager(pin_memory=False, share_memory=False).stage(tensors)
            assert all(type(x) is DTensor for x in staged)
            for x, copied in zip(tensors, staged, strict=True):
                assert copied.placements == x.placements
                assert copied.shape == x.shape
                assert torch.equal(copied.to_local(), x.to_local())
                assert copied.to_local().data_ptr() != x.to_local().data_ptr()

    for plan in plans(traced_model("plain_gpt")[2]):
        on_ranks("plain_gpt", plan, stage)


def test_a_whole_file_on_one_rank(tmp_path: Path) -> None:
    model, _, traced = traced_model("gpt2")

    def save(parallel: Any) -> None:
        state = parallel.full_state_dict(rank=1)
        assert bool(state) == (parallel._communicator.rank == 1)
        if state:
            assert state["lm_head.weight"] is state["transformer.wte.weight"]
            torch.save(state, tmp_path / "model.pt")

    for plan in plans(traced):
        on_ranks("gpt2", plan, save)
        loaded = copy.deepcopy(model)
        for parameter in loaded.parameters():
            nn.init.zeros_(parameter)
        loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
        for name, value in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_save_pretrained_writes_whole_weights_once(name: str, tmp_path: Path) -> None:
    model, inputs, traced = traced_model(name)
    kind: Any = type(model)
    expected = model.eval()(**inputs)
    model.train()

    def save(parallel: Any, folder: Path) -> None:
        parallel.save_pretrained(folder)
        assert (folder / "model.safetensors").exists()
        assert isinstance(next(iter(parallel.state_dict().values())), DTensor)

    for number, plan in enumerate(plans(traced)):
        folder = tmp_path / str(number)
        on_ranks(name, plan, lambda parallel, folder=folder: save(parallel, folder))
        loaded = kind.from_pretrained(folder, dtype=torch.float64)
        assert type(loaded) is kind
        assert loaded.config.architectures == [kind.__name__]
        torch.testing.assert_close(loaded(**inputs).logits, expected.logits, rtol=1e-9, atol=1e-9)
