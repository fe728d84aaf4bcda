"""torch's own calls for checkpoints, by name and as they are documented: whole files and exact continuations, with
pipeline stages too; other plans and one device go on from them.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn import functional
from torch.utils._pytree import keystr, tree_leaves_with_path

from autopar.errors import AutoparError
from tests.end_to_end.harness import launch, parallelize

pytestmark = pytest.mark.slow
_DCP: Any = dcp  # incomplete annotations
_DIST: Any = dist
_STATES: Any = state_dict
Options: Any = StateDictOptions
PIPELINE = ("pipeline=2",)


class Block(nn.Module):
    """With a parameter that is a number."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied head, a buffer, and frozen parameters in each stage."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(4))
        self.head = nn.Linear(dim, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((dim,), 0.01))
        for name in ("blocks.1.up.weight", "blocks.3.down.bias"):
            self.get_parameter(name).requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids) + self.shift
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Wrapper(nn.Module):
    """As a trainer's module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        return self.model(*args)


def batch(number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    ids = torch.randint(0, 32, (2, 8, 6))
    return ids[0], ids[1]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net().double()


def adamw(model: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    losses: list[float] = []
    for number in (first, first + 1):
        optimizer.zero_grad()
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(make: Any, wrap: Any) -> tuple[Any, Any]:
    model = wrap(net())
    optimizer = make(model)
    train(model, optimizer, 0)
    return model, optimizer


def begun(plan: tuple[str, ...], make: Any, wrap: Any, seed: int = 0) -> tuple[Any, Any]:
    model = wrap(parallelize(net(seed), batch(0), constraints=plan))
    return model, make(model)


def assert_goes_on(model: Any, optimizer: Any, single: Any, own: Any) -> None:
    """Two more steps are those of one device."""
    wanted, found = train(single, own, 2), train(model, optimizer, 2)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    state = getattr(model, "model", model).full_state_dict()
    torch.testing.assert_close(state, dict(getattr(single, "model", single).state_dict()), rtol=1e-8, atol=1e-10)


def assert_same_entries(found: Any, expected: Any) -> None:
    """Nested states have the same keys, and at each the same value."""
    one, other = ({keystr(keys): x for keys, x in tree_leaves_with_path(state)} for state in (found, expected))
    assert one.keys() == other.keys()
    for key, x in other.items():
        if isinstance(x, Tensor):
            torch.testing.assert_close(one[key], x, rtol=1e-8, atol=1e-10)
        else:
            assert one[key] == x, key


def itself(model: Any) -> Any:
    return model


def check_whole_states(make: Any = adamw, wrap: Any = itself, **options: bool) -> None:
    """What torch's getters give is what they give on one device; training goes on."""
    single, own = alone(make, wrap)
    model, optimizer = begun(PIPELINE, make, wrap)
    train(model, optimizer, 0)
    asked = Options(full_state_dict=True, **options)
    expected = Options(**{name: x for name, x in options.items() if name != "cpu_offload"})
    found, states = (
        _STATES.get_model_state_dict(model, options=asked),
        _STATES.get_optimizer_state_dict(model, optimizer, options=asked),
    )
    if options.get("cpu_offload") and dist.get_rank():
        assert (found, states) == ({}, {})
    else:
        wanted, theirs = _STATES.get_state_dict(single, own, options=expected)
        assert_same_entries(found, wanted)
        assert_same_entries(states, theirs)
    if "ignore_frozen_params" in options:  # of a rank's own stages
        parts: list[Any] = [None] * dist.get_world_size()
        _DIST.all_gather_object(parts, list(_STATES.get_model_state_dict(model, options=expected)))
        assert set().union(*parts) == set(_STATES.get_model_state_dict(single, options=expected))
    assert_goes_on(model, optimizer, single, own)


def check_loading(plan: tuple[str, ...], make: Any = adamw, wrap: Any = itself, **options: bool) -> None:
    """A file of one device, read by the first rank alone or by all, is what training goes on from."""
    single, own = alone(make, wrap)
    model, optimizer = begun(plan, make, wrap, seed=5)
    flat = Options(flatten_optimizer_state_dict=options.get("flatten_optimizer_state_dict", False))
    weights, states = copy.deepcopy(_STATES.get_state_dict(single, own, options=flat))
    if options.get("broadcast_from_rank0") and dist.get_rank():
        weights, states = {}, {}
    asked = Options(full_state_dict=True, **options)
    _STATES.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=asked)
    assert_goes_on(model, optimizer, single, own)


def check_one_after_the_other() -> None:
    single, own = alone(adamw, itself)
    model, optimizer = begun(PIPELINE, adamw, itself, seed=5)
    both: Any = copy.deepcopy(_STATES.get_state_dict(single, own)) if dist.get_rank() == 0 else ({}, {})
    weights, states = both
    asked = Options(full_state_dict=True, broadcast_from_rank0=True)
    _STATES.set_model_state_dict(model, weights, options=asked)
    _STATES.set_optimizer_state_dict(model, optimizer, states, options=asked)
    assert_goes_on(model, optimizer, single, own)


def check_errors() -> None:
    """What one stage lacks is an error on every rank, and loading works after it."""
    single, own = alone(adamw, itself)
    model, optimizer = begun(PIPELINE, adamw, itself, seed=5)
    weights, states = _STATES.get_state_dict(single, own)
    short = {name: x for name, x in weights.items() if name != "blocks.3.up.weight"}
    with pytest.raises((RuntimeError, AutoparError), match=r"blocks\.3\.up\.weight"):
        model.load_state_dict(short)
    with pytest.raises((RuntimeError, AutoparError), match=r"size mismatch for blocks\.3\.up\.weight"):
        model.load_state_dict({**short, "blocks.3.up.weight": torch.zeros(2, 2)})
    for broadcast in (False, True):
        asked = Options(full_state_dict=True, broadcast_from_rank0=broadcast)
        with pytest.raises((RuntimeError, AutoparError), match=r"blocks\.3\.up\.weight"):
            _STATES.set_model_state_dict(model, dict(short), options=asked)
    fewer = {**states, "state": {name: x for name, x in states["state"].items() if name != "blocks.3.up.bias"}}
    for asked in (Options(), Options(full_state_dict=True)):
        with pytest.raises((RuntimeError, AutoparError), match=r"state for parameter 'blocks\.3\.up\.bias'"):
            _STATES.set_optimizer_state_dict(model, optimizer, fewer, options=asked)
    _STATES.set_model_state_dict(model, weights)
    _STATES.set_optimizer_state_dict(model, optimizer, copy.deepcopy(states))
    assert_goes_on(model, optimizer, single, own)


def check_saving(folder: Path, plan: tuple[str, ...], wrap: Any, flat: StateDictOptions, *, is_async: bool) -> None:
    single, own = alone(adamw, wrap)
    model, optimizer = begun(plan, adamw, wrap)
    train(model, optimizer, 0)
    weights, states = _STATES.get_state_dict(model, optimizer, options=flat)
    if is_async:
        _DCP.async_save({"model": weights, "optimizer": states}, checkpoint_id=folder).result()
    else:
        _DCP.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    _DIST.barrier()
    assert_goes_on(model, optimizer, single, own)


def check_resuming(folder: Path, plan: tuple[str, ...], wrap: Any, flat: StateDictOptions) -> None:
    single, own = alone(adamw, wrap)
    model, optimizer = begun(plan, adamw, wrap, seed=5)
    weights, states = _STATES.get_state_dict(model, optimizer, options=flat)
    _DCP.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    _STATES.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=flat)
    assert_goes_on(model, optimizer, single, own)


def check_saving_what_was_loaded(folder: Path) -> None:
    """Whole states that were just loaded for all stages, saved before and after a step by parts."""
    single, own = alone(adamw, itself)
    model, optimizer = begun(PIPELINE, adamw, itself)
    model.load_state_dict(single.state_dict())
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    for _ in range(2):
        _DCP.save({"optimizer": _STATES.get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
        _DIST.barrier()
        state = _STATES.get_optimizer_state_dict(model, optimizer)
        _DCP.load({"optimizer": state}, checkpoint_id=folder)
        _STATES.set_optimizer_state_dict(model, optimizer, state)
        assert_goes_on(model, optimizer, single, own)


FLAT, NESTED = Options(flatten_optimizer_state_dict=True), Options()


def check_loading_another(source: tuple[str, ...], target: tuple[str, ...], change: Any) -> None:
    """As a teacher gets the student's: ranks waited for each other to gather what one stage loaded."""
    student, _ = begun(source, adamw, itself, seed=1)
    teacher, _ = begun(target, adamw, itself)
    teacher.load_state_dict(change(student.state_dict()))
    torch.testing.assert_close(teacher.full_state_dict(), dict(net(1).state_dict()), rtol=0, atol=0)


def check_copied_gradients() -> None:
    """Of a part that begins within other memory, torch copied what it took for its storage."""
    model, _ = begun(("data=2", "zero=3"), adamw, itself)
    model(*batch(0)).backward()
    for copied, parameter in zip(copy.deepcopy(list(model.parameters())), model.parameters(), strict=True):
        if parameter.grad is None:
            assert copied.grad is None
        else:
            assert copied.grad.placements == parameter.grad.placements
            torch.testing.assert_close(copied.grad.to_local(), parameter.grad.to_local(), rtol=0, atol=0)


def test_states_are_loaded_by_other_models() -> None:
    sharded = ("data=2", "zero=3")
    launch(
        2,
        partial(check_loading_another, sharded, PIPELINE, copy.copy),
        partial(check_loading_another, sharded, PIPELINE, dict),
        partial(check_loading_another, PIPELINE, sharded, copy.copy),
        check_copied_gradients,
    )


def test_states_are_whole_with_stages() -> None:
    launch(
        2,
        partial(check_whole_states),
        partial(check_whole_states, wrap=Wrapper, cpu_offload=True),
        partial(check_whole_states, momentum, flatten_optimizer_state_dict=True),
        partial(check_whole_states, wrap=Wrapper, ignore_frozen_params=True),
        partial(check_whole_states, cpu_offload=True, ignore_frozen_params=True),
    )


def test_whole_states_are_loaded() -> None:
    launch(
        2,
        *(partial(check_loading, plan, broadcast_from_rank0=True) for plan in (PIPELINE, ("data=2", "zero=3"))),
        partial(check_loading, PIPELINE, momentum, broadcast_from_rank0=True, flatten_optimizer_state_dict=True),
        partial(check_loading, PIPELINE, wrap=Wrapper, broadcast_from_rank0=True),
        partial(check_loading, PIPELINE),
        check_one_after_the_other,
        check_errors,
    )


def test_folders_are_saved_and_loaded(tmp_path: Path) -> None:
    """By parts, at once or while training goes on, with entries by group or by name."""
    launch(
        2,
        partial(check_saving, tmp_path / "1", PIPELINE, Wrapper, NESTED, is_async=True),
        partial(check_resuming, tmp_path / "1", PIPELINE, Wrapper, NESTED),
        partial(check_resuming, tmp_path / "1", ("data=2", "zero=3"), Wrapper, NESTED),
        partial(check_saving, tmp_path / "2", ("data=2", "zero=3"), itself, FLAT, is_async=True),
        partial(check_resuming, tmp_path / "2", PIPELINE, itself, FLAT),
        partial(check_saving_what_was_loaded, tmp_path / "3"),
    )


def test_folders_are_loaded_on_other_ranks(tmp_path: Path) -> None:
    launch(2, partial(check_saving, tmp_path, PIPELINE, itself, NESTED, is_async=False))
    launch(4, partial(check_resuming, tmp_path, ("pipeline=2", "zero=3"), itself, NESTED))
