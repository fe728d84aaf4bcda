"""Shapes in real processes: in any order, unlike on two ranks, saved and loaded with the plan."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import InputShapeError
from autopar.plan import Plan
from tests.end_to_end import pipelines
from tests.end_to_end.harness import assert_same_step, launch, make, parallelize
from tests.end_to_end.test_bad_input import refused
from tests.shapes import of_length, of_rows

pytestmark = pytest.mark.slow


def check_order(*constraints: str) -> None:
    """A smaller last batch, other lengths, evaluation between, and back: always one device's step."""
    model, inputs = make("gpt2")
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=constraints)
    for rows, length in ((8, 16), (3, 16), (8, 9), (8, 16), (16, 16), (3, 16)):
        batch = of_length(of_rows(inputs, rows), length)
        (pipelines.assert_same_step if parallel.plan.stages else assert_same_step)(parallel, model, batch)
        parallel.eval()
        model.eval()
        with torch.no_grad():
            found, expected = (each(input_ids=batch["input_ids"]) for each in (parallel, model))
        assert found.loss is None
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        parallel.train()
        model.train()
    training = [call for call in parallel.plans if call.is_training]
    assert sorted(call.calls for call in training) == [1, 1, 2, 2]
    assert all(call.planning_s > 0 for call in training)


def check_ranks_with_unlike_shapes() -> None:
    """Both shapes are named, in a call that both ranks have to plan and in one that only one of them has."""
    model, inputs = make("gpt2")
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("data=2",))
    for rows in (5 + dist.get_rank(), 8 - 2 * dist.get_rank()):
        with refused(InputShapeError, "inputs of different shapes", rf"\[{rows}, 16\] int64"):
            parallel(**of_rows(inputs, rows))
    assert_same_step(parallel, model, inputs)


def check_saved(folder: str) -> None:
    """What was planned for other shapes comes back with the plan, and is not planned again."""
    model, inputs = make("gpt2")
    small = of_rows(inputs, 3)
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("data=2",), shapes=[small])
    assert [call.calls for call in parallel.plans] == [0, 0]
    assert len(parallel.plan.other_calls) == 1
    path = Path(folder) / "plan.json"
    if not dist.get_rank():
        parallel.plan.save(path)
    dist.barrier()
    again = parallelize(copy.deepcopy(model), inputs, plan=path)
    assert again.plan.other_calls == parallel.plan.other_calls == Plan.load(path).other_calls
    assert_same_step(again, model, small)
    assert again.plans[0].plan.decisions == parallel.plan.other_calls[0]


def check_one_argument() -> None:
    """Positional inputs, another dtype, an example in eval mode."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    parallel = parallelize(copy.deepcopy(model), (torch.ones(8, 8),)).eval()
    for rows in (8, 5, 1):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(parallel(x), model(x))


def test_shapes_on_two_ranks(tmp_path: Path) -> None:
    launch(
        2,
        partial(check_order, "data=2", "zero=3"),
        partial(check_order, "pipeline=2", "microbatches=4", "schedule=1f1b"),
        check_ranks_with_unlike_shapes,
        partial(check_saved, str(tmp_path)),
        check_one_argument,
    )
