"""docs/checkpoints.md: what its functions save on two ranks goes on on one, as if the run had never stopped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.models import make_plain_gpt
from tests.ranks import run_ranks

TEXT = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
FUNCTIONS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[0]


def train(world: int, folder: str, first: int, last: int, constraints: tuple[str, ...] = ()) -> list[float]:
    """Losses of the steps `first` to `last`, resumed from `folder` if the first isn't 0, and saved there."""
    made: dict[str, Any] = {}
    exec(FUNCTIONS, made)
    torch.manual_seed(first)  # the values that are loaded are others
    model, inputs = make_plain_gpt()
    mesh = init_device_mesh("cpu", (world,))
    model = autopar.parallelize(model.double(), mesh, inputs, constraints=constraints, profile=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if first else 1e-2)  # what is loaded counts
    if first:
        assert made["load"](folder, model, optimizer) == first
    losses: list[float] = []
    for step in range(first, last):
        loss = model(**inputs)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            made["save"](folder, model, optimizer, 2)
    return losses


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = run_ranks(train, 2, 2, str(tmp_path), 0, 4, ("zero=3",))[0]
    resumed = run_ranks(train, 1, 1, str(tmp_path), 2, 4)[0]
    assert resumed == pytest.approx(whole[2:], rel=1e-12)
    assert whole[3] < whole[2] < whole[0]


@pytest.mark.slow
def test_a_run_with_stages_goes_on_with_stages_and_without(tmp_path: Path) -> None:
    stages = ("pipeline=2", "schedule=1f1b", "microbatches=2")
    whole = run_ranks(train, 2, 2, str(tmp_path), 0, 4, stages)[0]
    for world, constraints in ((2, stages), (1, ())):
        resumed = run_ranks(train, world, world, str(tmp_path), 2, 4, constraints)
        assert all(each == pytest.approx(whole[2:], rel=1e-12) for each in resumed)
