"""A loop with accelerate's Accelerator, on ranks and on one device."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.errors import RankError, TrainerError
from tests.end_to_end.harness import launch, parallelize
from tests.integrations.test_transformers_trainer import as_torchrun


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        block = (nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(block)) for _ in range(4))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits, y), logits


def train(accelerator: Any, folder: Path, resume: Path | None = None, seed: int | None = 0) -> dict[str, Any]:
    """Two epochs; saves after the first, or begins with what another run saved there."""
    if seed is not None:
        torch.manual_seed(seed)
    data = [{"x": x, "y": torch.tensor(i % 5)} for i, x in enumerate(torch.randn(36, 12, dtype=torch.float64))]
    model = Classifier().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = DataLoader(data, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, right = [], 0
    if resume is not None:
        accelerator.load_state(str(resume))
    for epoch in range(0 if resume is None else 1, 2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss, logits = model(**batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses += [loss.item(), scheduler.get_last_lr()[0]]
            right += int((accelerator.gather_for_metrics(logits.argmax(-1) == batch["y"])).sum())
        if epoch == 0:
            accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    return {"losses": losses, "right": right, "state": {name: x.sum().item() for name, x in state.items()}}


def accelerator_of(kind: Any, **kwargs: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return kind(cpu=True, gradient_accumulation_steps=2, **kwargs)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    count = len(found["losses"])
    assert found["losses"] == pytest.approx(expected["losses"][-count:], rel=1e-9)
    if found["state"]:
        assert found["state"] == pytest.approx(expected["state"], rel=1e-9)


def check_loop(folder: Path, name: str, constraints: list[str], resume: str | None = None) -> None:
    from autopar.integrations.accelerate import AutoparAccelerator

    as_torchrun()
    options = {"profile": False, "constraints": constraints}
    accelerator = accelerator_of(AutoparAccelerator, parallelize_kwargs=options)
    found = train(accelerator, folder / name, None if resume is None else folder / resume)
    expected = json.loads((folder / "expected.json").read_text())
    assert_equal(found, expected)
    if resume is None:
        assert found["right"] == expected["right"]


def check_refusals() -> None:
    from autopar.integrations.accelerate import AutoparAccelerator

    as_torchrun()
    accelerator = accelerator_of(AutoparAccelerator)
    with pytest.raises(TrainerError, match="without a DataLoader"):
        accelerator.prepare(Classifier())
    with pytest.raises(TrainerError, match="got 2 models: pass example inputs of each"):
        accelerator.prepare(Classifier(), Classifier())
    stranger = torch.optim.SGD(Classifier().parameters())
    example = {"x": torch.zeros(4, 12), "y": torch.zeros(4, dtype=torch.long)}
    options = {"profile": False, "example_inputs": example}
    with pytest.raises(TrainerError, match="not the model's"):
        accelerator_of(AutoparAccelerator, parallelize_kwargs=options).prepare(Classifier(), stranger)


@pytest.mark.slow
def test_a_loop_on_two_and_four_ranks(tmp_path: Path) -> None:
    """Also goes on with another plan, on more ranks, with stages, and on one process."""
    accelerate = pytest.importorskip("accelerate")
    from autopar.integrations.accelerate import AutoparAccelerator

    expected = train(accelerator_of(accelerate.Accelerator), tmp_path / "one")
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    both: list[list[float]] = []
    for is_joint in (False, True):
        accelerator = accelerator_of(accelerate.Accelerator)
        accelerator.gradient_accumulation_steps = 1
        both.append(train_two(accelerator, is_joint=is_joint))
    launch(
        2,
        partial(check_two_models, both),
        partial(check_loop, tmp_path, "data", ["data=2"]),
        partial(check_loop, tmp_path, "tensor", ["tensor=2"], "data"),
        check_refusals,
        partial(check_no_seed, tmp_path / "unseeded"),
        partial(
            check_block_of_the_main_process, tmp_path / "main", "save", r"save_state\(\) takes all.*every_rank_is_main"
        ),
        partial(check_block_of_the_main_process, tmp_path / "main", "call", r"wait_for_everyone\(\) takes all ranks"),
        partial(check_block_of_the_main_process, tmp_path / "main", "save"),
        partial(check_hooks, tmp_path / "hooks"),
    )
    launch(
        4,
        partial(check_loop, tmp_path, "four", ["data=2", "tensor=2", "zero=3"]),
        partial(check_loop, tmp_path, "staged", ["pipeline=2", "data=2"], "data"),
    )
    assert_equal(train(accelerator_of(AutoparAccelerator), tmp_path / "back", tmp_path / "four"), expected)


def check_no_seed(folder: Path) -> None:
    """Each process has drawn other numbers, and the script sets no seed: weights and batches are those of rank 0."""
    from autopar.integrations.accelerate import AutoparAccelerator

    as_torchrun()
    torch.manual_seed(dist.get_rank())
    accelerator = accelerator_of(AutoparAccelerator, parallelize_kwargs={"profile": False, "constraints": ["data=2"]})
    found = train(accelerator, folder, seed=None)
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, found["losses"])
    assert everywhere[0] == everywhere[1]


def check_block_of_the_main_process(folder: Path, what: str, message: str = "") -> None:
    """What takes all ranks is refused where rank 0 does it alone, on both ranks; without a `message` both do it."""
    from autopar.integrations.accelerate import AutoparAccelerator

    as_torchrun()
    options = {"profile": False, "constraints": ["zero=3"]}
    accelerator = accelerator_of(AutoparAccelerator, parallelize_kwargs=options, every_rank_is_main=not message)
    batch = {"x": torch.ones(8, 12, dtype=torch.float64), "y": torch.arange(8) % 5}
    model, _ = accelerator.prepare(Classifier().double(), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    for _ in range(2):
        model(**batch)[0].backward()
    with pytest.raises(RankError, match=message) if message else nullcontext():
        if accelerator.is_main_process:
            model(**batch)[0].backward() if what == "call" else accelerator.save_state(str(folder))
        accelerator.wait_for_everyone() if what == "call" else model(**batch)[0].backward()


def train_two(accelerator: Any, *, is_joint: bool) -> list[float]:
    """Two models, each with an optimizer or with one for both, and one that is frozen, in one `prepare`."""
    torch.manual_seed(0)
    model, critic, frozen = (
        Classifier().double(),
        nn.Linear(5, 1).double(),
        nn.Linear(1, 1).double().requires_grad_(False),
    )
    groups = [model.parameters(), critic.parameters()]
    optimizers = [torch.optim.AdamW(p, lr=1e-2) for p in ([[*groups[0], *groups[1]]] if is_joint else groups)]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in optimizers]
    prepared = accelerator.prepare(model, critic, frozen, *optimizers, *schedules)
    model, critic, frozen, optimizers = *prepared[:3], prepared[3 : 3 + len(optimizers)]
    losses: list[float] = []
    for _ in range(3):
        loss, logits = model(torch.linspace(-1, 1, 96, dtype=torch.float64).view(8, 12), torch.arange(8) % 5)
        loss = loss + frozen(critic(logits)).square().mean()
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in prepared[3 + len(optimizers) :]:
            schedule.step()
        losses.append(loss.item())
    return losses


def check_two_models(expected: list[list[float]]) -> None:
    from autopar.integrations.accelerate import AutoparAccelerator

    as_torchrun()
    examples = [
        {"x": torch.zeros(8, 12, dtype=torch.float64), "y": torch.zeros(8, dtype=torch.int64)},
        (torch.zeros(8, 5, dtype=torch.float64, requires_grad=True),),
        None,
    ]
    options = {"profile": False, "constraints": ["zero=3"], "example_inputs": examples}
    for is_joint, wanted in zip((False, True), expected, strict=True):
        accelerator = accelerator_of(AutoparAccelerator, parallelize_kwargs=options)
        accelerator.gradient_accumulation_steps = 1
        assert train_two(accelerator, is_joint=is_joint) == pytest.approx(wanted, rel=1e-9)


def check_hooks(folder: Path) -> None:
    """Hooks that save and load models in files of their own, as diffusers' scripts have them, get the models."""
    from autopar.integrations.accelerate import AutoparAccelerator

    def save(models: list[Any], weights: list[Any], where: str) -> None:
        if accelerator.is_main_process:
            for each in models:
                torch.save({name: x for name, x in each.state_dict().items() if "head" in name}, Path(where, "head.pt"))
                weights.pop()

    def load(models: list[Any], where: str) -> None:
        while models:
            loaded = torch.load(Path(where, "head.pt"))
            assert not models.pop().load_state_dict(loaded, strict=False).unexpected_keys

    as_torchrun()
    options = {"profile": False, "constraints": ["zero=3"]}
    accelerator = accelerator_of(AutoparAccelerator, parallelize_kwargs=options)
    batch = {"x": torch.ones(8, 12, dtype=torch.float64), "y": torch.arange(8) % 5}
    model, _ = accelerator.prepare(Classifier().double(), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    before = {name: x.clone() for name, x in model.full_state_dict().items()}
    accelerator.save_state(str(folder))
    torch.testing.assert_close(torch.load(folder / "head.pt")["head.weight"], before["head.weight"])
    assert not Path(folder, "autopar_model_0").exists()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    accelerator.load_state(str(folder))
    after = model.full_state_dict()
    torch.testing.assert_close(after["head.weight"], before["head.weight"])
    torch.testing.assert_close(after["first.weight"], before["first.weight"] + 1.0)


def check_batches_that_fit() -> None:
    """accelerate tries smaller batches until one fits, before the model is parallel and after."""
    from accelerate.utils import find_executable_batch_size

    tried: list[int] = []

    def half() -> int:
        return tried[-1] // 2

    @find_executable_batch_size(starting_batch_size=65536, reduce_batch_size_fn=half)
    def make(rows: int) -> Any:
        tried.append(rows)
        batch = (torch.zeros(rows, 12), torch.zeros(rows, dtype=torch.int64))
        return parallelize(Classifier(), batch, memory="4MiB", constraints="microbatches=1")

    @find_executable_batch_size(starting_batch_size=65536, reduce_batch_size_fn=half)
    def step(rows: int) -> Tensor:
        tried.append(rows)
        return model(torch.ones(rows, 12), torch.zeros(rows, dtype=torch.int64))[0]

    model = make()
    assert len(tried) > 1
    tried.clear()
    step().backward()
    assert len(tried) > 1


@pytest.mark.slow
def test_batches_are_made_smaller_until_a_plan_fits() -> None:
    launch(2, check_batches_that_fit)
