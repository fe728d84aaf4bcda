"""Lightning's Trainer with a strategy of autopar, on ranks and on one device."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from autopar.errors import TrainerError
from tests.end_to_end.harness import launch
from tests.integrations.test_accelerate import Classifier
from tests.integrations.test_transformers_trainer import as_torchrun
from tests.ranks import run_alone


def make_module(loss_outside: bool = False) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = Classifier().double()
            self.history: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss, logits = self.model(**batch)
            if loss_outside:
                loss = nn.functional.cross_entropy(logits, batch["y"], label_smoothing=0.1)
            self.log("loss", loss)
            self.history.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss, logits = self.model(**batch)
            self.log("val_loss", loss, sync_dist=True)
            self.log("val_right", (logits.argmax(-1) == batch["y"]).double().mean(), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.history += [float(self.trainer.callback_metrics[name]) for name in ("val_loss", "val_right")]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    return Module()


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(36, 12, dtype=torch.float64, generator=generator)
    data: Any = [{"x": row, "y": torch.tensor(i % 5)} for i, row in enumerate(x)]
    shuffled = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))
    return shuffled, DataLoader(data[:20], batch_size=8)


def train(
    folder: Path, strategy: Any, devices: int = 1, resume: Path | None = None, loss_outside: bool = False
) -> dict[str, Any]:
    import lightning.pytorch as pl

    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, gradient_clip_val=0.5,
        accumulate_grad_batches=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, num_sanity_val_steps=0,
        callbacks=[] if resume else [Saving(folder / "first.ckpt")],
    )  # fmt: skip
    module = make_module(loss_outside)
    trainer.fit(module, *loaders(), ckpt_path=None if resume is None else str(resume))
    trainer.save_checkpoint(folder / "last.ckpt")
    state = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    return {"history": module.history, "state": {name: x.sum().item() for name, x in state.items()}}


def Saving(path: Path) -> Any:
    import lightning.pytorch as pl

    class Callback(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    return Callback()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["history"] == pytest.approx(expected["history"], rel=1e-6)  # Lightning logs in float32
    assert found["state"] == pytest.approx(expected["state"], rel=1e-9)


def check_fit(
    folder: Path, name: str, constraints: list[str], resume: str | None = None, expected: str = "expected"
) -> None:
    from autopar.integrations.lightning import AutoparStrategy

    as_torchrun()
    strategy = AutoparStrategy(parallelize_kwargs={"profile": False, "constraints": constraints})
    start = None if resume is None else folder / resume / "first.ckpt"
    found = train(folder / name, strategy, dist.get_world_size(), start, expected == "outside")
    assert_equal(found, json.loads((folder / f"{expected}.json").read_text()))


def train_alone(folder: Path) -> dict[str, Any]:
    """On one process, from what four saved; Lightning leaves the process group open until the process ends."""
    from autopar.integrations.lightning import AutoparStrategy

    return train(folder / "back", AutoparStrategy(), 1, folder / "four" / "first.ckpt")


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
        self.judges = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, is_made: bool) -> Tensor:
        return self.judges(self.makes(x) if is_made else x)


def make_gan() -> Any:
    """With manual optimization, as in Lightning's own example, whose step begins with its optimizers."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model, self.automatic_optimization, self.history = Pair(), False, list[float]()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            makes, judges = cast("list[Any]", self.optimizers())
            self.toggle_optimizer(judges)
            real, made = self.model(batch["x"], False), self.model(batch["x"].flip(1), True)
            loss = functional.softplus(-real).mean() + functional.softplus(made).mean()
            judges.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(judges, gradient_clip_val=0.1)
            judges.step()
            self.untoggle_optimizer(judges)
            self.toggle_optimizer(makes)
            other = functional.softplus(-self.model(batch["x"].flip(1), True)).mean()
            makes.zero_grad()
            self.manual_backward(other)
            makes.step()
            self.untoggle_optimizer(makes)
            self.history += [loss.item(), other.item()]

        def configure_optimizers(self) -> Any:
            parts = (self.model.makes, self.model.judges)
            return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]

    return Module()


def train_gan(folder: Path, strategy: Any, devices: int = 1) -> dict[str, Any]:
    """In float64, by Lightning's ``precision="64-true"``, of a module in float32."""
    import lightning.pytorch as pl

    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, logger=False, precision="64-true",
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    module = make_gan()
    trainer.fit(module, loaders()[0])
    trainer.save_checkpoint(folder / "last.ckpt")
    state = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    return {"history": module.history, "state": {name: x.sum().item() for name, x in state.items()}}


def check_gan(folder: Path, constraint: str) -> None:
    from autopar.integrations.lightning import AutoparStrategy

    as_torchrun()
    strategy = AutoparStrategy(parallelize_kwargs={"profile": False, "constraints": constraint})
    found = train_gan(folder / constraint, strategy, dist.get_world_size())
    expected = json.loads((folder / "gan.json").read_text())
    assert found["history"] == pytest.approx(expected["history"], rel=1e-9)
    assert found["state"] == pytest.approx(expected["state"], rel=1e-9)


def check_refusals(folder: Path) -> None:
    import lightning.pytorch as pl

    from autopar.integrations.lightning import AutoparStrategy

    as_torchrun()
    module = make_module()
    module.other = nn.Linear(2, 2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=AutoparStrategy(), max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    with pytest.raises(TrainerError, match="say which one"):
        trainer.fit(module, *loaders())


@pytest.mark.slow
def test_fit_on_two_and_four_ranks(tmp_path: Path) -> None:
    """Also goes on with another plan, on more ranks, with stages, and on one process."""
    pytest.importorskip("lightning")
    expected = train(tmp_path / "one", "auto")
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    resumed = train(tmp_path / "one_resumed", "auto", resume=tmp_path / "one" / "first.ckpt")
    assert len(resumed["history"]) == len(expected["history"]) // 2
    (tmp_path / "resumed.json").write_text(json.dumps(resumed))
    outside = train(tmp_path / "one_outside", "auto", loss_outside=True)
    (tmp_path / "outside.json").write_text(json.dumps(outside))
    (tmp_path / "gan.json").write_text(json.dumps(train_gan(tmp_path / "one_gan", "auto")))
    launch(
        2,
        partial(check_gan, tmp_path, "zero=3"),
        partial(check_gan, tmp_path, "pipeline=2"),
        partial(check_fit, tmp_path, "data", ["data=2"]),
        partial(check_fit, tmp_path, "tensor", ["tensor=2"], "data", "resumed"),
        partial(check_fit, tmp_path, "outside", ["data=2"], None, "outside"),
        partial(check_refusals, tmp_path),
    )
    launch(
        4,
        partial(check_fit, tmp_path, "four", ["data=2", "tensor=2", "zero=3"]),
        partial(check_fit, tmp_path, "staged", ["pipeline=2", "data=2"], "data", "resumed"),
    )
    assert_equal(run_alone(train_alone, tmp_path), resumed)
