"""Values for models on the meta device: those that building them on one device draws, a tensor at a time."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar.errors import MaterializationError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.compat import local_tensor, make_mesh
from autopar.lower.parameters.materialize import record_draws
from autopar.planning.building import build
from autopar.planning.call_traces import trace_model
from autopar.planning.setup import Setup
from tests import models

Make = Callable[[], nn.Module]


def on_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make()


def members(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def assert_same_values(found: nn.Module, expected: nn.Module) -> None:
    assert list(members(found)) == list(members(expected))
    for name, value in members(expected).items():
        assert torch.equal(members(found)[name], value), name
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in expected.named_parameters()]  # ties are kept


class Initialized(nn.Module):
    """The initializers that look at values, or at whether there are any."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("truncated", "far", "orthogonal", "sparse"):
            setattr(self, name, nn.Parameter(torch.empty(12, 8)))
        self.filter = nn.Parameter(torch.empty(4, 4, 3))
        self.halves = nn.Parameter(torch.empty(6))
        self.register_buffer("table", torch.empty(5, 8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.5, b=0.5)
        nn.init.trunc_normal_(self.far, mean=3.0, a=-1.0, b=1.0)
        nn.init.orthogonal_(self.orthogonal)
        nn.init.sparse_(self.sparse, sparsity=0.25)
        nn.init.dirac_(self.filter)
        with torch.no_grad():
            self.halves[:3].uniform_()
            self.halves[3:] = torch.tensor([1.0, 2.0, 3.0])
            self.halves.mul_(2).add_(torch.rand(6))
            angles = torch.outer(torch.arange(5.0), 10000.0 ** -(torch.arange(8) / 8))
            self.table.copy_(angles.sin())


class MiniGPT(nn.Module):
    """Initialized from outside of its modules, in the way of many small models; built from its config alone."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Parameter(torch.randn(8, config.width) * 0.1)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._init_weights)
        for block in self.blocks:
            nn.init.normal_(block.weight, std=0.02 / math.sqrt(2 * config.layers))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


CONFIG = SimpleNamespace(vocabulary=16, width=8, layers=3)


class Wrapped(nn.Module):
    """Not built from a config, with parts that are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.body = MiniGPT(CONFIG)
        self.after = nn.Linear(width, width)
        self.after.weight = self.before.weight


@cache
def from_zoo(name: str) -> nn.Module:
    return models.make(name, torch.float32)[0]


def built_anew(name: str) -> nn.Module:
    model = from_zoo(name)
    return type(model)(copy.deepcopy(model.config))


SMALL: dict[str, Make] = {
    "torch": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Embedding(5, 4, padding_idx=1), nn.LSTM(4, 5, 2), nn.PReLU(),
        nn.MultiheadAttention(8, 2), nn.Conv2d(3, 4, 3), nn.TransformerEncoderLayer(8, 2), nn.GroupNorm(2, 4),
        nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    ),
    "float64": lambda: nn.Linear(8, 8, dtype=torch.float64),
    "initializers": Initialized,
    "config": lambda: MiniGPT(CONFIG),
    "wrapped": lambda: Wrapped(8),
    "gpt2": partial(built_anew, "gpt2"),
    "llama": partial(built_anew, "llama"),
    "bert": partial(built_anew, "bert"),
    "vit": partial(built_anew, "vit"),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    ),
}  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore")
def test_values_are_those_of_building_the_model(name: str) -> None:
    make = SMALL[name]
    make()  # random numbers that configurations draw, if any, are out of the way
    torch.manual_seed(3)
    expected = make()
    after = torch.get_rng_state()
    model = on_meta(make)
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    torch.manual_seed(3)
    assert autopar.materialize(model) is model
    assert_same_values(model, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert [p.requires_grad for p in model.parameters()] == flags


def test_recording_draws_nothing_and_leaves_the_model_alone() -> None:
    model = on_meta(lambda: Wrapped(8))
    before = {name: id(x) for name, x in members(model).items()}
    state = torch.get_rng_state()
    draws = record_draws(model)
    assert {name: id(x) for name, x in members(model).items()} == before
    assert torch.equal(torch.get_rng_state(), state)
    assert set(draws.results) == {name for name, _ in model.named_parameters()}
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device.type == "cpu"


class Live(TorchDispatchMode):
    """Bytes of real tensors that live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if type(x) in (Tensor, nn.Parameter) and not x.is_meta:  # a DTensor's memory is its local tensor's
                self._watch(x)
        return results

    def _watch(self, x: Tensor) -> None:
        key, size = x.untyped_storage()._cdata, x.untyped_storage().nbytes()
        if not self._users.get(key):
            self.now += size
            self.peak = max(self.peak, self.now)
        self._users[key] = self._users.get(key, 0) + 1
        weakref.finalize(x, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self.now -= size


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_few_whole_tensors_live_at_a_time(name: str) -> None:
    """Kernels' own temporaries apart: what a draw takes beside the tensor, and what is derived from it."""
    model = on_meta(SMALL[name])
    largest = max(x.numel() * x.element_size() for x in members(model).values())
    total = sum(x.numel() * x.element_size() for x in members(model).values())
    draws = record_draws(model)
    with Live() as live:
        draws.play(torch.device("cpu"), lambda name, value: None)
    assert live.now == 0
    assert live.peak <= 2 * largest < total / 2


@pytest.mark.slow
def test_a_rank_holds_its_parts_and_few_whole_tensors() -> None:
    model, inputs = on_meta(partial(built_anew, "llama")), models.make_llama()[1]
    cluster = autopar.Cluster.of("cpu", devices_per_node=4)
    plan = autopar.plan(model, cluster, inputs, constraints=["mesh=4", "data=4", "zero=3"])
    traced = trace_model(model, inputs)
    setup = Setup(draws=replace(record_draws(model), state=torch.get_rng_state()))
    sizes = [x.numel() * x.element_size() for x in members(model).values()]

    def rank(communicator: Communicator) -> int:
        mesh = make_mesh((4,), range(4), "cpu", rank=communicator.rank)
        with Live() as live:
            parallel = build(model, traced, plan, communicator, mesh, setup)
        held = sum(local_tensor(p).untyped_storage().nbytes() for p in parallel.parameters())
        assert held <= 0.3 * sum(sizes)
        return live.peak - held

    assert max(simulate(4, rank)) <= 2 * max(sizes) + sum(b.numel() * 4 for b in model.buffers()) + 4096


class Unsaid(nn.Module):
    """A parameter and a buffer that only the constructor gives values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def fill(module: nn.Module) -> None:
    if isinstance(module, Unsaid):
        nn.init.constant_(module.scale, 3.0)
        module.angles.copy_(torch.arange(4.0))


def test_what_nobody_gives_a_value_is_named() -> None:
    inner = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Unsaid()))
    with pytest.raises(MaterializationError, match=r"'1\.scale', '1\.angles'.*Unsaid at '1'.*'scale'.*initialize="):
        autopar.materialize(inner)
    assert all(x.is_meta for x in members(inner).values())


def test_the_users_own_initialization_comes_last() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(4, 4)
    torch.manual_seed(0)
    model = on_meta(Unsaid)
    autopar.materialize(model, initialize=fill)
    assert torch.equal(model.linear.weight, expected.weight)
    assert model.scale.tolist() == [3.0] * 4
    assert model.angles.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_values_that_are_missing_in_part_are_named() -> None:
    def fill_half(module: nn.Module) -> None:
        fill(module)
        if isinstance(module, Unsaid):
            module.scale = nn.Parameter(torch.empty(4))
            nn.init.zeros_(module.scale[:2])

    with pytest.raises(MaterializationError, match=r"'scale'.*some of it without a value"):
        autopar.materialize(on_meta(Unsaid), initialize=fill_half)


def test_initialization_that_looks_at_values_is_refused() -> None:
    def look(module: nn.Module) -> None:
        fill(module)
        if isinstance(module, nn.Linear) and module.weight.sum() > 0:
            nn.init.zeros_(module.weight)

    with pytest.raises(MaterializationError, match=r"can't be planned.*not known yet"):
        autopar.materialize(on_meta(Unsaid), initialize=look)


def test_a_changed_model_is_built_by_its_modules() -> None:
    """It can't be built again from its config, but its parts can, and its own `_init_weights` does the rest."""
    model = on_meta(lambda: MiniGPT(CONFIG))
    model.more = nn.Linear(8, 64, device="meta")
    with pytest.raises(MaterializationError, match="'position'"):
        autopar.materialize(model)
    torch.manual_seed(0)
    autopar.materialize(model, initialize=lambda m: nn.init.ones_(m.position) if isinstance(m, MiniGPT) else None)
    assert model.head.weight is model.embed.weight
    assert 0.015 < model.more.weight.std().item() < 0.025
    assert model.position.eq(1).all()
    assert model.more.bias.abs().max() < 1 / math.sqrt(8)  # as nn.Linear draws it


def test_what_has_values_keeps_them() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0] = loaded = nn.Linear(4, 4)
    kept = copy.deepcopy(loaded)
    torch.manual_seed(0)
    autopar.materialize(model)
    assert model[0].weight is loaded.weight
    assert torch.equal(loaded.weight, kept.weight)
    torch.manual_seed(0)
    assert torch.equal(model[1].weight, nn.Linear(4, 4).weight)
