"""A rank that dies or hangs in the middle of a step ends it on every other rank, with an error that says where."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from autopar.lower.run import tied_gradients
from autopar.lower.run.execution import Executor
from autopar.lower.run.layer_runner import LayerRunner
from autopar.lower.run.step_runner import StepRunner
from autopar.schedules.action_lists import Action
from tests.end_to_end.harness import parallelize, run_step
from tests.end_to_end.pipelines import cut
from tests.ranks import forking_context

pytestmark = pytest.mark.slow

GROUP_TIMEOUT_S = 12
STARTED_S = 300  # until processes on a busy machine are there: 90 were too few once
SENT_S = 2  # until what a rank sent before it exits has left it
INPUTS = {"ids": torch.arange(64).view(8, 8) % 16}


class Tied(nn.Module):
    """Ids in, through some blocks, and out by the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, length] -> a scalar."""
        x = functional.embedding(ids, self.table)
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy((x @ self.table.T).flatten(0, 1), ids.flatten())


Mishap = Callable[[], NoReturn]


def vanish() -> NoReturn:
    time.sleep(SENT_S)
    os._exit(0)


def hang() -> NoReturn:
    while True:
        time.sleep(1)


def replace(owner: Any, method: str, mishap: Mishap, microbatch: int | None = None) -> None:
    """From now on `mishap` happens here instead of `method` (in an action of that microbatch)."""
    original = getattr(owner, method)

    def changed(*args: Any, **kwargs: Any) -> Any:
        if microbatch is None or any(isinstance(x, Action) and x.microbatch == microbatch for x in args):
            mishap()
        return original(*args, **kwargs)

    setattr(owner, method, changed)


def in_forward(mishap: Mishap) -> None:
    replace(StepRunner, "_forward", mishap, 2)


def in_backward(mishap: Mishap) -> None:
    replace(StepRunner, "_backward", mishap, 1)


def in_exchange(mishap: Mishap) -> None:
    replace(tied_gradients, "exchanged_sum", mishap)


def in_broadcast(mishap: Mishap) -> None:
    replace(Executor, "share_across_groups", mishap)


def in_a_layer(mishap: Mishap) -> None:
    replace(LayerRunner, "run", mishap)


def train_without_stages(victim: int, place: Callable[[Mishap], None], mishap: Mishap) -> None:
    """The same under a plan in which parameters are gathered and gradients reduced."""
    model = parallelize(Tied(), INPUTS, constraints=("data=2", "zero=3"))
    run_step(model, INPUTS)
    if dist.get_rank() == victim:
        place(mishap)
    run_step(model, INPUTS)


def plan_where_one_ended(victim: int, place: Callable[[Mishap], None], mishap: Mishap) -> None:
    if dist.get_rank() == victim:
        mishap()
    parallelize(Tied(), INPUTS)


def train(victim: int, place: Callable[[Mishap], None], mishap: Mishap) -> None:
    """One good step, and one in which the mishap happens."""
    model = cut(Tied(), INPUTS, constraints=() if dist.get_world_size() == 2 else ("tensor=2",))
    run_step(model, INPUTS)
    if dist.get_rank() == victim:
        place(mishap)
    run_step(model, INPUTS)


def test_of_a_stage_whose_rank_exits_in_backward(tmp_path: Path) -> None:
    said = run_to_the_end(tmp_path, 2, 1, in_backward, vanish)
    assert list(said) == [0]
    # What the dead rank had sent before it may or may not have left it.
    assert re.search(r"PipelineError: rank 0 \(device group 0\) failed in stage 0, action 0B[01]: ", said[0]), said


def test_of_a_stage_whose_rank_is_killed(tmp_path: Path) -> None:
    """Its neighbor in the same stage waits inside of a layer, the others at the cut."""
    said = run_to_the_end(tmp_path, 4, 3, in_forward, hang, kills=True)
    assert sorted(said) == [0, 1, 2]
    for rank, text in said.items():
        group = rank // 2
        assert f"PipelineError: rank {rank} (device group {group}) failed in stage {group}, action {group}" in text


def test_of_a_stage_whose_rank_hangs(tmp_path: Path) -> None:
    said = run_to_the_end(tmp_path, 2, 0, in_forward, hang, hangs=True)
    assert re.search(r"PipelineError: rank 1 \(device group 1\) failed in stage 1, action 1F2: .*[Tt]imed out", said[1])
    assert "look for its message" in said[1]


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (in_exchange, "failed in the exchange of the gradients of 'table'"),
        (in_broadcast, "failed in the broadcast of '[^']*' from device group 1"),
    ],
)
def test_of_the_end_of_a_step(tmp_path: Path, place: Callable[[Mishap], None], what: str) -> None:
    said = run_to_the_end(tmp_path, 2, 1, place, vanish)
    assert re.search(rf"PipelineError: rank 0 \(device group 0\) {what}: ", said[0]), said


def test_without_stages(tmp_path: Path) -> None:
    said = run_to_the_end(tmp_path, 2, 1, in_a_layer, vanish, train=train_without_stages)
    assert re.search(r"RankError: rank 0 failed in training step 2, \w+.* with ranks \[0, 1\]: ", said[0]), said
    assert "No word from ranks [1]" in said[0]


def test_while_planning(tmp_path: Path) -> None:
    said = run_to_the_end(tmp_path, 2, 1, in_a_layer, vanish, train=plan_where_one_ended)
    assert "RankError: rank 0 heard nothing from another rank while both planned: it ended" in said[0], said


# --- processes of which one is to fail


def run_to_the_end(
    folder: Path,
    world: int,
    victim: int,
    place: Callable[[Mishap], None],
    mishap: Mishap,
    *,
    train: Callable[..., None] = train,
    hangs: bool = False,
    kills: bool = False,
) -> Mapping[int, str]:
    """What the ranks that raised said.  They have the group's timeout to do so, from when the mishap happens.

    Args:
        folder: for what the processes leave.
        world: number of processes.
        victim: where it happens.
        place: when it happens.
        mishap: what.
        train: what every rank runs.
        hangs: the victim is still there when the others have ended.
        kills: the victim is killed when the mishap has begun.
    """
    context = forking_context()
    processes = [
        context.Process(target=_run_rank, args=(rank, world, folder, victim, place, mishap, train), daemon=True)
        for rank in range(world)
    ]
    try:
        for process in processes:
            process.start()
        begun = folder / "mishap"
        _wait_until(lambda: begun.exists() or not all(p.is_alive() for p in processes), STARTED_S, "the mishap")
        assert begun.exists(), [path.read_text() for path in folder.glob("said*")]
        if kills:
            pid = processes[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        survivors = [process for rank, process in enumerate(processes) if rank != victim]
        limit_s = GROUP_TIMEOUT_S + 10  # a busy machine
        _wait_until(lambda: not any(process.is_alive() for process in survivors), limit_s, "the survivors' errors")
        assert processes[victim].is_alive() == hangs
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {rank: path.read_text() for rank in range(world) if (path := folder / f"said{rank}").exists()}


def _wait_until(happened: Callable[[], bool], limit_s: float, what: str) -> None:
    end_s = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end_s, f"waited {limit_s} s for {what}"
        time.sleep(0.05)


def _run_rank(
    rank: int,
    world: int,
    folder: Path,
    victim: int,
    place: Callable[[Mishap], None],
    mishap: Mishap,
    train: Callable[..., None],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for number, timeout_s in enumerate((STARTED_S, GROUP_TIMEOUT_S)):  # the short one from when all are there
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=world, timeout=timeout
        )
        if number == 0:
            dist.barrier()
            dist.destroy_process_group()

    def begin() -> NoReturn:
        (folder / "mishap").touch()
        mishap()

    try:
        train(victim, place, begin)
    except Exception as error:  # noqa: BLE001  (whatever it is, the test reads it)
        (folder / f"said{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)
