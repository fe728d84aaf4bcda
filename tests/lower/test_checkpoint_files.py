"""Checkpoints that a script writes with ``torch.save``, as it does on one device, are those of one device."""

from __future__ import annotations

import copy
import io
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from autopar.errors import ModelError, RankError
from autopar.host.memory import available_bytes
from autopar.lower.parameters import saved_files
from tests.end_to_end.harness import launch, parallelize

pytestmark = pytest.mark.slow


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)
    )
    model[5].weight = nn.Parameter(torch.randn(8, 16))
    return model.double(), torch.randn(4, 8, dtype=torch.float64)


class Run:
    """A script's objects."""

    def __init__(self, model: Any, x: Tensor) -> None:
        self.model, self.x = model, x
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(self.x).square().mean()
            loss.backward()
            self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, file: Any) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": 2}
        torch.save({**state, "scheduler": self.scheduler.state_dict()}, file)

    def load(self, file: Any) -> Run:
        state = torch.load(file)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return self


def made(*constraints: str) -> Run:
    model, x = make()
    return Run(parallelize(model, (x,), constraints=constraints) if constraints else model, x)


def check_resumed(folder: Path, constraints: tuple[str, ...], *, on_one_rank: bool = False) -> None:
    """All ranks write one path, as a script of one device does, or only the first one, where parameters are whole."""
    alone, run, file = made(), made(*constraints), folder / "-".join(constraints)
    torch.testing.assert_close(run.train(2), alone.train(2), rtol=1e-9, atol=0)
    if dist.get_rank() == 0 or not on_one_rank:
        run.save(file)
        torch.load(file)  # at once, while the other rank may still write it
    dist.barrier()
    expected = alone.train(2)
    for other in ((), constraints, ("data=2", "zero=3"), ("pipeline=2",)):
        torch.testing.assert_close(made(*other).load(file).train(2), expected, rtol=1e-9, atol=0)


def check_wrappers(constraints: tuple[str, ...]) -> None:
    """What holds tensors of the model elsewhere: an average, a dict under other names, a list of parameters."""
    run = made(*constraints)
    run.train(1)
    average, whole = AveragedModel(run.model), run.model.full_state_dict()
    renamed = {f"net.{name}": x for name, x in run.model.state_dict().items()}
    for state in (average.state_dict(), copy.deepcopy(average.state_dict()), renamed, list(run.model.parameters())):
        if "pipeline=2" in constraints:
            with pytest.raises(ModelError, match=r"this rank's stages only.*full_state_dict"):
                torch.save(state, io.BytesIO())
            continue
        saved = reloaded(state)
        if isinstance(saved, list):
            assert all(type(p) is nn.Parameter for p in saved)
            saved = {
                f"net.{name}": p.detach() for (name, _), p in zip(make()[0].named_parameters(), saved, strict=True)
            }
        prefix = "net." if "net.0.weight" in saved else "module."
        for name in [name for name in whole if prefix + name in saved]:
            torch.testing.assert_close(saved[prefix + name], whole[name], rtol=0, atol=0)
        assert prefix + "5.bias" in saved


def check_wrapper_files(folder: Path) -> None:
    """All ranks write one path, one later than the other, and read it at once: none truncates what another reads."""
    run = made("data=2", "zero=0")
    run.train(1)
    average = AveragedModel(run.model)
    for turn, state in enumerate((average.state_dict(), copy.deepcopy(average.state_dict()))):
        path = folder / f"average-{turn}"
        if dist.get_rank() == turn:
            time.sleep(0.4)
        began = time.monotonic()
        torch.save({"average": state, "step": 1}, path)
        assert dist.get_rank() == turn or time.monotonic() - began > 0.2
        loaded = torch.load(path)["average"]
        assert type(loaded._metadata["module"]) is OrderedDict
        torch.testing.assert_close(
            {name.removeprefix("module."): x for name, x in loaded.items() if "module." in name},
            run.model.full_state_dict(), rtol=0, atol=0,
        )  # fmt: skip
    if dist.get_rank() == 0:
        torch.save(average.state_dict(), folder / "alone")  # which is right, and waits for a second
    dist.barrier()


def reloaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def check_memory() -> None:
    """All ranks hold what they save; a process that takes more memory than there is is killed without a word."""
    for constraints in (("data=2", "zero=3"), ("pipeline=2",)):
        run = made(*constraints)
        run.train(1)
        with patch.object(saved_files, "available_bytes", lambda: 1000.0):
            for state in (run.model.state_dict(), run.optimizer.state_dict()):
                with pytest.raises(ModelError, match=r"GiB of the host's memory.*full_state_dict\(rank=0\)"):
                    torch.save(state, io.BytesIO())
    assert available_bytes() > 1000.0


def check_safetensors(folder: Path) -> None:
    """They read memory, and every rank has only a part of it; `full_state_dict` is what they take."""
    run = made("data=2", "zero=3")
    for save in (
        lambda: save_file(run.model.state_dict(), folder / "x"),
        lambda: save_model(run.model, str(folder / "x")),
    ):
        with pytest.raises(ModelError, match=r"has no storage.*with safetensors, call state = model\.full_state_dict"):
            save()
    file = folder / f"{dist.get_rank()}.safetensors"
    save_file(run.model.full_state_dict(), file)
    torch.testing.assert_close(load_file(file), dict(make()[0].state_dict()), rtol=0, atol=0)


class Net(nn.Module):
    """A module whose attributes refer to its parts, and which shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 12)
        self.out.weight = self.embed.weight
        self.norm, self.absent = nn.BatchNorm1d(8), None
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.parts, self.config = [self.norm, self.out], {"width": 8}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.cell(self.embed(ids))[0].mean(1) * self.scale
        for part in self.parts:
            x = part(x)
        return x


def check_whole_modules(folder: Path, constraints: tuple[str, ...]) -> None:
    """``torch.save(model, path)`` writes the original module, with values that were trained since."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model, ids = Net().double(), torch.arange(24).view(4, 6) % 12
    alone, x = Run(copy.deepcopy(model), ids), torch.ones_like(ids)
    run = Run(parallelize(model, (ids,), constraints=constraints), ids)
    for each in (run, alone):
        each.train(2)
    run.model.note = "set later"
    torch.save(run.model, folder / "net.pt")
    loaded = torch.load(folder / "net.pt", weights_only=False)
    assert type(loaded) is Net
    assert loaded.out.weight is loaded.embed.weight
    assert loaded.parts[1] is loaded.out
    assert (loaded.note, loaded.config, loaded.absent) == ("set later", {"width": 8}, None)
    assert not [name for name in vars(loaded) if name not in {*vars(alone.model), "note"}]
    assert not [name for name in vars(loaded.cell) if name not in vars(alone.model.cell)]
    torch.testing.assert_close(loaded.state_dict(), alone.model.state_dict(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loaded.eval()(x), alone.model.eval()(x), rtol=1e-9, atol=1e-12)
    loaded.train()
    alone.model.train()
    torch.testing.assert_close(Run(loaded, ids).train(2), Run(alone.model, ids).train(2), rtol=1e-9, atol=0)
    copied = reloaded(copy.deepcopy(run.model))
    torch.testing.assert_close(copied.state_dict(), run.model.full_state_dict(), rtol=0, atol=0)
    with pytest.raises(ModelError, match=r"use copy\.deepcopy"):
        copy.copy(run.model)


def check_changed_module() -> None:
    """Its class would run another forward."""
    model, x = make()
    first: Any = model[0]
    first.forward = lambda x: type(first).forward(first, x) * 2
    changed = parallelize(model, (x,), constraints=("data=2", "zero=3"))
    with pytest.raises(ModelError, match=r"can't be pickled, as '0' of the original.*full_state_dict"):
        torch.save(changed, io.BytesIO())


def check_kept_states() -> None:
    """A copy of an optimizer's state, which is saved after further steps, is that of its time."""
    run, alone = made("pipeline=2"), made()
    for each in (run, alone):
        each.train(2)
    kept, expected = copy.deepcopy(run.optimizer.state_dict()), copy.deepcopy(alone.optimizer.state_dict())
    run.train(1)
    torch.testing.assert_close(dict(reloaded({"last": kept})["last"]), expected, rtol=1e-9, atol=1e-12)


def check_one_rank_of_shards() -> None:
    for what in ("model", "optimizer"):
        run = made("data=2", "zero=3")
        run.train(1)

        def save(state: Any, run: Run = run) -> None:
            if dist.get_rank() == 0:
                torch.save(state, io.BytesIO())
            run.train(1)

        with pytest.raises(RankError, match=r"torch\.save on one rank needs parts of tensors"):
            save(run.model.state_dict() if what == "model" else run.optimizer.state_dict())


def test_checkpoints_of_a_script_resume_under_every_plan(tmp_path: Path) -> None:
    launch(
        2,
        partial(check_resumed, tmp_path, ("data=2", "zero=3")),
        partial(check_resumed, tmp_path, ("tensor=2",)),
        partial(check_resumed, tmp_path, ("pipeline=2",)),
        partial(check_resumed, tmp_path, ("data=2", "zero=0")),
        partial(check_resumed, tmp_path, ("data=2", "zero=0"), on_one_rank=True),
        partial(check_wrappers, ("data=2", "zero=3")),
        partial(check_wrappers, ("tensor=2",)),
        partial(check_wrappers, ("pipeline=2",)),
        partial(check_wrapper_files, tmp_path),
        check_kept_states,
        check_memory,
        check_changed_module,
        partial(check_whole_modules, tmp_path, ("data=2", "zero=3")),
        partial(check_whole_modules, tmp_path, ("tensor=2",)),
        partial(check_whole_modules, tmp_path, ("pipeline=2",)),
        partial(check_safetensors, tmp_path),
        check_one_rank_of_shards,
    )
