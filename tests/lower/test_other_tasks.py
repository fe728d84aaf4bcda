"""Calls that read other parameters than the example, as those of another task do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from autopar.verify.rehearsal import run_single
from tests.shapes import assert_exact, train_in_turns
from tests.zoo import Subject, quick_search


class Tasks(nn.Module):
    """A stem and a head for each task, around what all have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleDict({task: nn.Linear(8, 8) for task in "ab"})
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 5)})

    def forward(self, x: Tensor, labels: Tensor, task: str) -> Tensor:
        """[batch, 8], [batch] -> a scalar."""
        return functional.cross_entropy(self.heads[task](self.body(self.stems[task](x))), labels)


def batch_of(task: str, rows: int = 4) -> dict[str, Any]:
    return {"x": torch.randn(rows, 8).double(), "labels": torch.randint(3, (rows,)), "task": task}


@pytest.mark.parametrize("constraints", [("pipeline=2",), ("pipeline=2", "microbatches=2")])
def test_any_stage_reads_what_the_example_does_not(constraints: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, example = Tasks().double(), batch_of("a")
    who = Subject(model, example, trace_model(model, example, num_layers=2), run_single(model, example, 1))
    request = SearchRequest(constraints=(*constraints, "recompute=none"), schedules=schedule_actions)
    plan = quick_search(who.traced.program, 2, request)
    assert len(plan.stages) == 2
    assert_exact(train_in_turns(who, plan, [batch_of("b", 6)]))
