"""A loss that reads other outputs than the model's loss trains as on one device, also if backward ran in the call."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import AutoparError, OutputError, PlanMismatchError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run.parallel_module import ParallelModule
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.planning.building import call_planner
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from autopar.step.plan_check import check_fit
from tests.lower.runs import build
from tests.zoo import quick, quick_search


class Net(nn.Module):
    """A loss, logits, another scalar, and a buffer that forward reads and then updates."""

    seen: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = x - self.seen
        self.seen.lerp_(x.mean(0).detach(), 0.25)
        for block in self.blocks:
            h = h + block(h)
        logits = self.head(self.dropout(h))
        return {"logits": logits, "loss": functional.cross_entropy(logits, y), "size": h.square().mean()}


def loss_of(out: dict[str, Tensor]) -> Tensor:
    return 2 * out["loss"] + 0.1 * out["logits"].logsumexp(-1).square().sum() + 0.5 * out["size"]


PLANS = [
    ("pipeline=2", "microbatches=2", "schedule=1f1b"),
    ("data=2", "microbatches=2"),
    pytest.param(("pipeline=2", "stages=4", "microbatches=4"), marks=pytest.mark.slow),
    pytest.param(("tensor=2", "microbatches=4", "recompute=full"), marks=pytest.mark.slow),
]


def on_ranks(constraints: tuple[str, ...], action: Any, *, dropout: float = 0.0, other_rows: int = 0) -> list[Any]:
    """What `action` gives of the model, its inputs and a copy of the model on one device, on each of two ranks."""
    torch.manual_seed(0)
    model = Net(dropout).double().train()
    inputs = {"x": torch.randn(8, 8).double(), "y": torch.randint(0, 4, (8,))}
    traced = trace_model(copy.deepcopy(model), inputs)
    request = SearchRequest(constraints=quick(constraints), schedules=schedule_actions)
    plan = quick_search(traced.program, 2, request)
    planner = call_planner(model, traced, plan)
    for rows in filter(None, (8, other_rows)):  # ranks are threads, and tracing is for one at a time
        planner((), {name: x[:rows] for name, x in inputs.items()}, True, any_output=True)

    def rank(communicator: Any) -> Any:
        return action(build(model, traced, plan, communicator, planner=planner).train(), inputs, copy.deepcopy(model))

    return simulate(2, rank)


def train(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Losses of a few steps, and the buffer after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Tensor] = []
    for batch in batches:
        loss = loss_of(model(**batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(b.detach().clone() for b in model.buffers())]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraints", PLANS)
def test_steps_are_those_of_one_device(constraints: tuple[str, ...]) -> None:
    def rank(model: ParallelModule, inputs: dict[str, Tensor], single: nn.Module) -> None:
        batches = [inputs, inputs, {name: x[:4] for name, x in inputs.items()}]
        expected, found = train(single, batches), train(model, batches)
        for x, y in zip(expected, found, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
        state = model.full_state_dict()
        for name, x in single.state_dict().items():
            torch.testing.assert_close(state[name], x, rtol=1e-12, atol=1e-12)
        # The first step ran by two plans, the second by the later of them, and other rows needed one plan only.
        assert [(len(call.inputs) > 0, call.calls) for call in model.plans] == [(True, 1), (True, 1), (True, 1)]

    on_ranks(constraints, rank, other_rows=4)


def test_what_is_only_read_runs_once() -> None:
    def rank(model: ParallelModule, inputs: dict[str, Tensor], single: nn.Module) -> None:
        for _ in range(2):
            out = model(**inputs)
            assert out["logits"].requires_grad
            out["logits"].argmax(-1)
            (3 * out["loss"] + out["size"].detach()).backward()
        assert [call.calls for call in model.plans] == [2]
        expected = single(**inputs)
        (3 * expected["loss"]).backward()

    on_ranks(PLANS[0], rank)


def test_what_can_not_be_had_is_refused() -> None:
    def rank(model: ParallelModule, inputs: dict[str, Tensor], single: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(**inputs)
        out["loss"].backward()
        with pytest.raises(AutoparError, match="already released by an earlier backward"):
            out["size"].backward()
        optimizer.step()
        out = model(**inputs)
        late = loss_of(out)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        with pytest.raises(OutputError, match="parameters have changed since the call"):
            late.backward()

    on_ranks(PLANS[1], rank)


@pytest.mark.slow
def test_other_random_numbers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def rank(model: ParallelModule, inputs: dict[str, Tensor], single: nn.Module) -> None:
        for _ in range(2):
            loss_of(model(**inputs)).backward()

    with caplog.at_level(logging.WARNING, "autopar"):
        on_ranks(PLANS[1], rank, dropout=0.5)
    assert sum("draws other random numbers" in record.message for record in caplog.records) == 1


class Losses(Net):
    """As a detector returns them: none is the sum."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, y)
        return {"loss_class": out["loss"], "loss_size": out["size"]}


def test_several_losses_are_the_callers_to_add_up() -> None:
    """Backward begins with the sum in the first step already, in stages and microbatches as well."""
    torch.manual_seed(0)
    model = Losses().double().train()
    inputs = {"x": torch.randn(8, 8).double(), "y": torch.randint(0, 4, (8,))}
    traced = trace_model(copy.deepcopy(model), inputs)
    request = SearchRequest(constraints=quick(("pipeline=2", "microbatches=4")), schedules=schedule_actions)
    plan = quick_search(traced.program, 2, request)
    assert (plan.schedule, plan.num_microbatches) == ("gpipe", 4)
    early = plan.with_decisions(schedule="1f1b")
    with pytest.raises(PlanMismatchError, match="1f1b begins backward passes before all forward passes have ended"):
        check_fit(early, traced.program, 2)

    def rank(communicator: Any) -> None:
        parallel, single = build(model, traced, plan, communicator).train(), copy.deepcopy(model)
        for each in (parallel, single):
            sum(weight * loss for weight, loss in zip((1, 3), each(**inputs).values(), strict=True)).backward()
        for name, p in single.named_parameters():
            gradient = parallel.get_parameter(name).grad
            torch.testing.assert_close(gradient.full_tensor(), p.grad, rtol=1e-12, atol=1e-12)

    simulate(2, rank)
