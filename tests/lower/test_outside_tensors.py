"""What forward reads from elsewhere than its model and a script changes is an error, on every rank; before, old values
were computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.building import call_planner
from autopar.trace import trace
from tests.lower.runs import build
from tests.random_plans import random_plan

X = torch.arange(32, dtype=torch.float64).view(4, 8) / 16


class Student(nn.Module):
    """Learns from a teacher that it doesn't have."""

    def __init__(self, teach: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.teach = nn.Linear(8, 8), teach

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) - self.teach(x)).square().mean()


def double(teacher: nn.Module) -> None:
    teacher.get_parameter("weight").mul_(2)


def average(teacher: nn.Module) -> None:
    teacher.get_parameter("weight").data.mul_(0.9)


@pytest.mark.parametrize("change", [double, average])
def test_a_teacher_that_changes_is_refused(change: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(8, 8).double().requires_grad_(False)
    model = Student(lambda x: teacher(x)).double()
    traced = trace(model, (X,), {}, training=True)
    plan = random_plan(traced.program, 2, 0)
    planner = call_planner(model, traced, plan)
    meeting = Barrier(2)

    def on_rank(communicator: Communicator) -> None:
        made = build(model, traced, plan, communicator, planner=planner)
        for _ in range(4):
            made(X).backward()
        if not meeting.wait():
            change(teacher)
        meeting.wait()
        match = r"reads a tensor \(float64 \[8, 8\]\) that is not the model's.* it has changed since that was traced"
        with pytest.raises(ModelError, match=match):
            made(X)

    simulate(2, on_rank)
