"""What was caught on all ranks: a step that failed in its middle is followed by others, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.lower import ParallelModule
from autopar.lower.run.step_runner import StepRunner
from tests.end_to_end.harness import assert_near, assert_same_step, launch, parallelize, state_of

pytestmark = pytest.mark.slow
FULL = "CUDA out of memory. Tried to allocate 1 GiB"  # what accelerate's find_executable_batch_size looks for


class Net(nn.Module):
    """Blocks, and a batch norm, whose buffers every step updates; it needs the whole batch at once."""

    def __init__(self, *, has_norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.norm = nn.BatchNorm1d(8) if has_norm else nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] -> a scalar."""
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x).square().mean() + x.square().mean()


def batch_of(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))}


@contextmanager
def raising(victim: int, owner: Any, method: str, error: BaseException) -> Generator[None]:
    """Inside, `error` is raised on this rank in place of the second call of `method`."""
    original, calls = getattr(owner, method), []

    def changed(*args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        if len(calls) == 2:
            raise error
        return original(*args, **kwargs)

    if dist.get_rank() == victim:
        setattr(owner, method, changed)
    try:
        yield
    finally:
        setattr(owner, method, original)


def caught(kind: type[BaseException], act: Callable[[], object]) -> str:
    """What it raises, on every rank."""
    with pytest.raises(kind) as found:
        act()
    return str(found.value)


def step(model: ParallelModule, rows: int) -> None:
    model(**batch_of(rows)).backward()


def go_on(victim: int, method: str, error: BaseException, kind: type[BaseException], *constraints: str) -> None:
    """The same model with another batch, and a new one in the same processes."""
    torch.manual_seed(0)
    original = Net(has_norm="microbatches=2" not in constraints)
    for rows in (16, 8):
        single = copy.deepcopy(original)
        model = parallelize(original, batch_of(rows), constraints=constraints)
        assert_same_step(model, single, batch_of(rows))
        buffers = {name: x.clone() for name, x in model.named_buffers()}
        with raising(victim, StepRunner, method, error):
            said = caught(kind, lambda: step(model, rows))  # noqa: B023
        assert str(error) in said
        if dist.get_rank() != victim:
            assert f"rank {victim}" in said
        model.load_state_dict(buffers, strict=False)  # a forward that failed may have updated them, as on one device
        for _ in range(2):
            assert_same_step(model, single, batch_of(rows // 2))
        assert_near(state_of(model), state_of(single), 1e-5)


def test_two_ranks_go_on() -> None:
    full = torch.OutOfMemoryError(FULL)
    stages = ("pipeline=2", "microbatches=2")
    launch(
        2,
        partial(go_on, 0, "_forward", full, torch.OutOfMemoryError, *stages),
        partial(go_on, 1, "_backward", full, torch.OutOfMemoryError, *stages, "schedule=1f1b"),
        partial(go_on, 1, "_forward", ValueError("a hook of the user's"), AutoparError, *stages),
        partial(go_on, 0, "_backward", full, torch.OutOfMemoryError, "data=2", "zero=3"),
        partial(go_on, 1, "_forward", full, torch.OutOfMemoryError, "tensor=2"),
    )  # fmt: skip
