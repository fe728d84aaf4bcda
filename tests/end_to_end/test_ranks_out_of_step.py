"""Ranks that get out of step: real processes, each with an error that names ranks and steps, within seconds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, InputShapeError, MeshError, RankError
from autopar.lower import ParallelModule
from tests.backend.models import Mlp, compile_for, make_mesh
from tests.end_to_end.harness import parallelize
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
SOON_S = 40  # on machines that do other things, too; the process group gives up after 60
GROUP_TIMEOUT_S = 60


class Model(nn.Module):
    """Two layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """[batch, 8] -> a scalar."""
        return self.second(self.dropout(self.first(x).relu())).square().mean() * scale


def train(model: ParallelModule, x: Tensor | None = None) -> None:
    model(torch.randn(8, 8) if x is None else x).backward()


def draw_one_more(model: ParallelModule, rank: int) -> None:
    if rank == 0:
        torch.rand(())
    train(model)


def draw_one_more_beside_the_batch(model: ParallelModule, rank: int) -> None:
    if rank == 1:
        torch.rand(())
    train(model, torch.ones(8, 8))


def evaluate_alone(model: ParallelModule, rank: int) -> None:
    if rank == 0:
        model.eval()
    model(torch.ones(8, 8))


def evaluate_together_then_alone(model: ParallelModule, rank: int) -> None:
    model.eval()
    model(torch.ones(8, 8))
    model.train(rank == 1)
    for _ in range(3):
        model(torch.ones(8, 8))


def skip_a_step(model: ParallelModule, rank: int) -> None:
    for number in range(3):
        x = torch.randn(8, 8)
        if number != 1 or rank == 0:
            train(model, x)


def skip_a_backward(model: ParallelModule, rank: int) -> None:
    loss = model(torch.ones(8, 8))
    if rank == 0:
        loss.backward()
    train(model, torch.ones(8, 8))


def run_backward_again_alone(model: ParallelModule, rank: int) -> None:
    loss = model(torch.ones(8, 8))
    loss.backward(retain_graph=True)
    if rank == 1:
        loss.backward()
    train(model, torch.ones(8, 8))


def clip_alone(model: ParallelModule, rank: int) -> None:
    if rank == 0:
        model.clip_grad_norm_(1.0)
    train(model)


def pass_another_shape(model: ParallelModule, rank: int) -> None:
    train(model, torch.ones(8 - 2 * rank, 8))


def pass_another_dtype(model: ParallelModule, rank: int) -> None:
    train(model, torch.ones(8, 8).to((torch.float32, torch.bfloat16)[rank]))


def pass_another_number(model: ParallelModule, rank: int) -> None:
    for scale in (1.0, 2.0):  # each is planned for on both ranks
        model(torch.ones(8, 8), scale=scale).backward()
    model(torch.ones(8, 8), scale=1.0 + rank).backward()


def want_a_gradient_of_the_input_alone(model: ParallelModule, rank: int) -> None:
    train(model, torch.ones(8, 8, requires_grad=rank == 1))


def pass_a_tensor_without_values(model: ParallelModule, rank: int) -> None:
    train(model, torch.ones(8, 8, device="meta" if rank else "cpu"))


def clear_gradients_alone(model: ParallelModule, rank: int) -> None:
    train(model, torch.ones(8, 8))
    if rank == 1:
        model.zero_grad()
    train(model, torch.ones(8, 8))


def step_alone(model: ParallelModule, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, torch.ones(8, 8))
    if rank == 0:
        optimizer.step()
    train(model, torch.ones(8, 8))


def step_with_another_learning_rate(model: ParallelModule, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + rank))
    train(model, torch.ones(8, 8))
    optimizer.step()
    train(model, torch.ones(8, 8))


def freeze_alone(model: ParallelModule, rank: int) -> None:
    model.first.requires_grad_(rank == 0)
    train(model, torch.ones(8, 8))


def load_alone(model: ParallelModule, rank: int) -> None:
    state = model.full_state_dict()
    if rank == 0:
        model.load_state_dict(state)
    train(model, torch.ones(8, 8))


def load_another_checkpoint(model: ParallelModule, rank: int) -> None:
    model.load_state_dict({name: x + rank for name, x in model.full_state_dict().items()})
    train(model, torch.ones(8, 8))


def gather_alone(model: ParallelModule, rank: int) -> None:
    if rank == 0:
        model.first.weight.full_tensor()
    train(model, torch.ones(8, 8))


def pass_another_batch_to_a_compiled_model(model: ParallelModule, rank: int) -> None:
    torch._dynamo.reset()
    compiled = compile_for(Mlp(), make_mesh(), "data=2")
    for number in range(2):
        compiled(torch.full((4, 8), 1.0 + rank * number)).sum().backward()


Mishap = Callable[[ParallelModule, int], None]
MISHAPS: dict[Mishap, tuple[str, type[AutoparError], str]] = {
    draw_one_more: ("tensor=2", MeshError, "different batches in training step 3: 'x' of rank"),
    draw_one_more_beside_the_batch: ("data=2", RankError, "out of step in training step 3"),
    evaluate_alone: ("tensor=2", RankError, "evaluation 1"),
    evaluate_together_then_alone: ("tensor=2", RankError, "evaluation 2"),
    skip_a_step: ("data=2", MeshError, "different batches in training step 4"),
    skip_a_backward: ("data=2", RankError, "rank 1 came to training step 4 without"),
    run_backward_again_alone: ("data=2", RankError, "backward 1 through a graph that was retained"),
    clip_alone: ("data=2", RankError, "clip_grad_norm_ 1"),
    pass_another_batch_to_a_compiled_model: ("data=2", MeshError, "different batches in call 2 of graph"),
    pass_another_dtype: ("data=2", InputShapeError, r"different dtypes: .*bfloat16.*Convert"),
    pass_another_number: (
        "tensor=2",
        InputShapeError,
        r"came to training step 5 with scale=1\.0.*scale=2\.0|2\.0.*1\.0",
    ),
    want_a_gradient_of_the_input_alone: ("tensor=2", InputShapeError, r"float32 requires_grad"),
    pass_a_tensor_without_values: ("data=2", InputShapeError, "'x' is on the meta device"),
    clear_gradients_alone: ("data=2", RankError, "step 4 with gradients of [04] parameters, .* those of [04]"),
    step_alone: ("data=2", RankError, r"\b1 of them, the last one by SGD with lr=0\.1"),
    step_with_another_learning_rate: ("data=2", RankError, r"1 of them, the last one by AdamW with lr=0\.[12], rank"),
    freeze_alone: ("data=2", RankError, "came to training step 1 of 2 parameters"),
    load_alone: ("data=2", RankError, "came to load_state_dict 1"),
    load_another_checkpoint: ("tensor=2", MeshError, "values in load_state_dict 1: 'first.weight', 'first.bias'"),
    gather_alone: ("tensor=2", RankError, r"came to reading a parameter or gradient \(1\)"),
    pass_another_shape: ("tensor=2", InputShapeError, r"different shapes: .*\[6, 8\] float32"),
}


def join(folder: str, name: str, rank: int) -> None:
    """Begin a new process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2, timeout=timeout)


NUM_PAIRS = 3  # side by side: most of a mishap is waiting for the other rank


def suffer(folder: str) -> dict[str, tuple[str, str, float]]:
    """What each mishap of this rank's pair raises on this rank after two good steps, and when."""
    found: dict[str, tuple[str, str, float]] = {}
    dist.barrier()  # of all pairs: who leaves the first group closes it to those that have yet to connect
    pair, rank = divmod(dist.get_rank(), 2)
    for mishap, (constraint, _, _) in [*MISHAPS.items()][pair::NUM_PAIRS]:
        name = mishap.__name__
        join(folder, name, rank)
        torch.manual_seed(0)
        model = parallelize(Model(), (torch.ones(8, 8),), constraints=(constraint,))
        for _ in range(2):
            train(model)
        dist.barrier()
        started_s = time.perf_counter()
        try:
            mishap(model, rank)
        except AutoparError as error:
            found[name] = (type(error).__name__, str(error), time.time())
        Path(folder, f"{name}-{rank}").touch()
        while not Path(folder, f"{name}-{1 - rank}").exists() and time.perf_counter() - started_s < GROUP_TIMEOUT_S:
            time.sleep(0.02)  # the other is to learn of it while this one is still there
    join(folder, f"end-{pair}", rank)
    return found


def test_of_two_ranks(tmp_path: Path) -> None:
    found = run_ranks(suffer, 2 * NUM_PAIRS, str(tmp_path))
    for mishap, (_, kind, text) in MISHAPS.items():
        errors = [each[mishap.__name__] for each in found if mishap.__name__ in each]
        assert len(errors) == 2, mishap.__name__
        for name, said, _ in errors:
            assert name == kind.__name__, said
            assert re.search(text, said), said
        assert abs(errors[0][2] - errors[1][2]) < SOON_S, mishap.__name__


class WithFeatures(Model):
    """The same, returning what the loss is made of."""

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """[batch, 8] -> a scalar, [batch, 8]."""
        features = self.second(self.first(x).relu())
        return features.square().mean() * scale, features


def read_outputs() -> str:
    """Read an output of training steps on all ranks, then on the first only."""
    x = torch.randn(8, 8)
    model = parallelize(WithFeatures(), (x,), constraints=("data=2",))
    for number in range(3):
        with model.recording() as step:
            loss, features = model(x)
        assert not any(collective.kind == "all_gather" for collective in step)
        if number:
            torch.testing.assert_close(features.square().mean(), loss)
        loss.backward()
    cut = parallelize(WithFeatures(), (x,), constraints=("data=2",), outputs="local")(x)[1]
    assert isinstance(cut, DTensor)
    loss, features = model(x)
    try:
        if dist.get_rank() == 0:
            features.sum()
        model(x)
    except RankError as error:
        return str(error)
    return ""


def test_an_output_is_read_by_all_ranks_or_by_none() -> None:
    for said in run_ranks(read_outputs, 2):
        assert re.search(r"came to reading output '\w+' of a training step \(3\)", said), said
        assert "training step 5" in said
