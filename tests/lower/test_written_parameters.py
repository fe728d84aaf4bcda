"""Frozen parameters that a forward writes to, such as momentum encoders, have the values of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import PlanMismatchError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.planning.building import call_planner
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from tests.lower.runs import build
from tests.zoo import quick, quick_search

INPUTS = {"x": torch.randn(8, 6).double(), "y": torch.randn(8, 6).double()}


class Contrast(nn.Module):
    """An encoder and its average, which forward updates by ``.data`` or in place, in training or in eval mode."""

    def __init__(self, *, in_place: bool = False, writes_in_training: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        self.momentum_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.in_place, self.writes_in_training = in_place, writes_in_training

    @torch.no_grad()
    def update(self) -> None:
        for own, average in zip(self.encoder.parameters(), self.momentum_encoder.parameters(), strict=True):
            if self.in_place:
                average.mul_(0.5).add_(own * 0.5)
            else:
                average.data = average.data * 0.5 + own.data * 0.5

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Two views of a batch, [batch, 6] each -> the loss."""
        query = functional.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            if self.training == self.writes_in_training:
                self.update()
            key = functional.normalize(self.momentum_encoder(y), dim=1)
        return functional.cross_entropy(query @ key.T, torch.arange(len(x)))


def train(model: Any) -> list[Tensor]:
    """The losses of three steps, the second in eval mode without gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    found: list[Tensor] = []
    for step in range(3):
        model.train(step != 1)
        with torch.set_grad_enabled(step != 1):
            loss = model(**INPUTS)
        if step != 1:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize(
    "constraints",
    [
        ("data=2", "zero=3"),
        ("data=2", "microbatches=2"),
        ("tensor=2", "recompute=full"),
        ("data=2", "offload=optimizer"),
        ("pipeline=2", "microbatches=2"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_averages_that_forward_updates_are_those_of_one_device(constraints: tuple[str, ...], in_place: bool) -> None:
    torch.manual_seed(0)
    model = Contrast(in_place=in_place).double().train()
    traced = trace_model(copy.deepcopy(model), INPUTS, num_layers=2)
    plan = quick_search(traced.program, 2, SearchRequest(constraints=quick(constraints), schedules=schedule_actions))
    planner = call_planner(model, traced, plan)
    planner((), INPUTS, False)  # ranks are threads, and tracing is for one at a time
    single = copy.deepcopy(model)
    expected = train(single)

    def rank(communicator: Any) -> None:
        parallel: Any = build(model, traced, plan, communicator, planner=planner).train()
        for x, y in zip(expected, train(parallel), strict=True):
            torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
        state = parallel.full_state_dict()
        for name, x in single.state_dict().items():
            torch.testing.assert_close(state[name], x, rtol=1e-12, atol=1e-12)

    simulate(2, rank)


def test_what_is_stored_in_parts_is_not_written_to() -> None:
    torch.manual_seed(0)
    model = Contrast(writes_in_training=False).double().train()
    traced = trace_model(copy.deepcopy(model), INPUTS)
    plan = quick_search(traced.program, 2, SearchRequest(constraints=quick(("data=2", "zero=3"))))
    planner = call_planner(model, traced, plan)
    planner((), INPUTS, False)

    def rank(communicator: Any) -> None:
        parallel = build(model, traced, plan, communicator, planner=planner).eval()
        with pytest.raises(PlanMismatchError, match=r"writes to the parameter 'momentum_encoder\.\d\.\w+', of which"):
            parallel(**INPUTS)

    simulate(2, rank)
