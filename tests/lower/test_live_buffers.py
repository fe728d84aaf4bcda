"""What a model computes from its buffers follows them: however they are written to, in training and in eval mode."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.plan import Plan
from autopar.program import Program
from autopar.trace import trace
from autopar.verify.rehearsal import planner_for, run_ranks
from tests.random_plans import random_plan, with_stages

Inputs = dict[str, Tensor]


class Block(nn.Module):
    """A table that forward only reads, one that no checkpoint has, and an average that eval mode reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("table", torch.linspace(0.0, 1.0, 16).view(2, 8))
        self.register_buffer("rates", torch.linspace(1.0, 2.0, 4)[:, None], persistent=False)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Both [batch, 4, 8]."""
        angles = torch.arange(8) * self.rates
        hidden = self.linear(hidden) * (2 * self.table).cos()[1] + angles.sin() * self.norm(x) - self.average.tanh()
        if self.training:
            self.average.mul_(0.5).add_(x.sum((0, 1)))
        return hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and what it is made of."""
        hidden = x
        for block in self.blocks:
            hidden = block(hidden, x)
        return hidden.square().mean(), hidden


def flat(program: Program) -> Plan:
    return random_plan(program, 2, 1)


def in_microbatches(program: Program) -> Plan:
    return random_plan(program, 2, 2, 2)


def in_stages(program: Program) -> Plan:
    return with_stages(random_plan(program, 1, 3, 2), 2, "1f1b", 2, random.Random(0))


def follow(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What `model` gives while it is trained, and its buffers are written to in every way that there is."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.numel()], lr=0.1)
    found: list[Tensor] = []
    model.whole_outputs = True  # pyright: ignore  (of a parallel module)

    def look() -> None:
        for mode in (True, False):
            with torch.no_grad():
                found.extend(x.detach().clone() for x in model.train(mode)(**inputs))
        model.train()

    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs)[0].backward()
        optimizer.step()
    look()
    with torch.no_grad():
        model.get_buffer("blocks.0.table").mul_(3)
        look()
        model.get_buffer("blocks.1.rates").data.add_(1)
    look()
    block = model.get_submodule("blocks.2")
    block.average = block.average + 1  # pyright: ignore
    look()
    names = [name for name, _ in model.named_buffers()]
    loaded = {name: x.flip(0) for name, x in model.state_dict().items() if name in names and x.ndim}
    model.load_state_dict(loaded, strict=False)
    look()
    return found


@pytest.mark.slow
def test_what_is_computed_from_buffers_is_printed() -> None:
    model = Model()
    inputs = {"x": torch.randn(8, 4, 8)}
    traced = trace(model, (), inputs, training=True)
    (text, _) = run_ranks(model, traced, flat(traced.program), lambda model: str(model.program))
    first, second = text.split("# ---- ")[1:3]
    assert first.startswith("once a step, from buffers and constants")
    assert "aten.cos" in first
    assert "aten.sin" in first
    assert "aten.cos" not in second


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_plan", [in_stages, *(pytest.param(each, marks=pytest.mark.slow) for each in (flat, in_microbatches))]
)
def test_evaluation_reads_what_is_in_the_buffers(make_plan: Callable[[Program], Plan]) -> None:
    torch.manual_seed(0)
    model = Model().double()
    inputs = {"x": torch.randn(8, 4, 8, dtype=torch.float64)}
    traced = trace(model, (), inputs, training=True)
    expected = follow(copy.deepcopy(model), inputs)
    assert len({x.sum().item() for x in expected}) == len(expected), "what is compared does not change"
    plan = make_plan(traced.program)
    planner = planner_for(model, traced, plan, [inputs])
    for found in run_ranks(model, traced, plan, lambda model: follow(model, inputs), planner):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
