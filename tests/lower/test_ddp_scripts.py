"""What scripts for DistributedDataParallel do besides wrapping works, or says what to do instead."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ModelError
from tests.end_to_end.harness import launch, whole_mesh

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Returns its loss, which is that of all ranks' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1)).square().mean()


def made(*, is_synced: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = Net().double()
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if is_synced else model, torch.randn(8, 3, 6, 6).double()


def train(model: Any, rows: list[Tensor], no_sync: Any) -> list[float]:
    """Two accumulated batches a step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for _ in range(2):
        optimizer.zero_grad()
        with no_sync():
            model(rows[0]).backward()
        loss = model(rows[1])
        loss.backward()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        losses.append(loss.item())
    model.eval()
    return [*losses, model(rows[0]).item()]


def check(constraints: tuple[str, ...], expected: list[float]) -> None:
    """With rows of each rank's own, as a DistributedSampler gives them."""
    model, x = made(is_synced=True)
    rank = dist.get_rank()
    rows = [half.chunk(2)[rank] for half in x.chunk(2)]
    model = autopar.parallelize(model, whole_mesh(), (rows[0],), inputs="local", profile=False, constraints=constraints)
    untyped: Any = model
    torch.testing.assert_close(train(untyped, rows, untyped.no_sync), expected, rtol=1e-9, atol=0)
    assert not hasattr(model, "module")
    with pytest.raises(AttributeError, match=r"has no attribute 'module': .*write model in place of model\.module"):
        untyped.module.state_dict()
    with pytest.raises(ModelError, match="can't be wrapped in DistributedDataParallel"):
        DistributedDataParallel(model)


def test_a_script_for_data_parallelism() -> None:
    model, x = made(is_synced=False)
    expected = train(model, list(x.chunk(2)), nullcontext)
    launch(2, partial(check, ("data=2", "zero=0"), expected), partial(check, ("data=2", "zero=3"), expected))
