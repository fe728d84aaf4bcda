"""Batch norm that takes each microbatch for the whole batch, where the user says so by name: as one device does that
accumulates the gradients of the microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import ConstraintError, VerificationError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.trace import Traced
from autopar.verify.rehearsal import SteadyAdamW, loss_of
from tests import models
from tests.lower.runs import Run, assert_same, build

ALLOWED = "batch_norm: per_microbatch"


class Counted(nn.Module):
    """Batch norms with statistics of their own kind each, and a count of steps that has nothing to do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16, momentum=0.3)
        self.bare = nn.BatchNorm1d(16, affine=False, track_running_stats=False)
        self.head = nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.register_buffer("level", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, 6] and [batch] -> a mean over the labels that count."""
        self.steps.add_(1)
        self.level.mul_(0.5).add_(x.detach().sum(0))  # of the whole batch, whatever the microbatches
        hidden = self.bare(self.norm(self.stem(x)).relu())
        return functional.cross_entropy(self.head(hidden), y, ignore_index=0)


def make_counted() -> models.Model:
    torch.manual_seed(0)
    y = torch.tensor([1, 2, 3, 0, 0, 2, 0, 2])  # microbatches hold different numbers that count
    return Counted().double().train(), {"x": torch.randn(8, 6, dtype=torch.float64), "y": y}


def accumulate(model: nn.Module, inputs: dict[str, Tensor], count: int, steps: int = 2) -> Run:
    """One device: the microbatches one after the other, each loss as its share of the whole batch's."""
    model = copy.deepcopy(model)
    optimizer = SteadyAdamW(model.parameters())
    losses, gradients = [], {}
    labels = inputs["y"] if "y" in inputs else inputs["target"]
    ignored = 0 if isinstance(model, Counted) else -100
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        before = {name: getattr(model, name).clone() for name in ("steps", "level") if hasattr(model, name)}
        for part in zip(*(x.chunk(count) for x in inputs.values()), strict=True):
            batch = dict(zip(inputs, part, strict=True))
            own = batch["y" if "y" in inputs else "target"]
            share = int((own != ignored).sum()) / int((labels != ignored).sum())
            loss = loss_of(model(**batch)) * share
            loss.backward()
            total += loss.item()
        if before:
            model.steps.copy_(before["steps"] + 1)
            model.level.copy_(before["level"] * 0.5 + inputs["x"].sum(0))
        losses.append(total)
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return Run(tuple(losses), gradients, {n: x.detach().clone() for n, x in model.state_dict().items()})


def run(model: nn.Module, traced: Traced, plan: Plan, inputs: dict[str, Tensor], steps: int = 2) -> list[Run]:
    def rank(communicator: Communicator) -> Run:
        parallel = build(model, traced, plan, communicator)
        optimizer = SteadyAdamW(parallel.parameters())
        losses, gradients = [], {}
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(parallel(**inputs))
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                own = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}
                names = [n for n, _ in model.named_parameters()]
                gradients = {n: parallel._whole(n, own.get(n)) for n in names}
            optimizer.step()
        return Run(tuple(losses), gradients, parallel.full_state_dict())

    return simulate(plan.world_size, rank)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "world", "constraints"),
    [
        ("counted", 1, ("microbatches=2",)),
        ("counted", 2, ("data=2", "microbatches=2", "zero=3", "recompute=full")),
        ("counted", 2, ("tensor=2", "microbatches=2", "recompute=selective")),
        ("deep_batch_normed", 4, ("microbatches=4", "pipeline=2", "data=2", "schedule=gpipe")),
        pytest.param("unet", 4, ("data=2", "tensor=2", "microbatches=2"), marks=pytest.mark.slow),
        pytest.param("deep_batch_normed", 4, ("microbatches=8", "pipeline=2", "stages=4"), marks=pytest.mark.slow),
    ],
)
def test_it_is_what_one_device_accumulates(name: str, world: int, constraints: Sequence[str]) -> None:
    model, inputs = make_counted() if name == "counted" else models.make(name)
    cluster = autopar.Cluster.of("cpu", devices_per_node=world)
    plan = autopar.plan(model, cluster, inputs, constraints=[*constraints, ALLOWED])
    assert any("statistics of each of" in note for note in plan.notes), plan.notes
    traced = trace_model(model, inputs)
    expected = accumulate(model, inputs, plan.num_microbatches)
    for found in run(model, traced, plan, inputs):
        assert_same(expected, found)


def test_nothing_is_approximated_without_being_named() -> None:
    model, inputs = make_counted()
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    with pytest.raises(ConstraintError, match=r"autopar\.batch_norm .*needs the whole batch.*'batch_norm: per_microb"):
        autopar.plan(model, cluster, inputs, constraints=["microbatches=2"])
    plan = autopar.plan(model, cluster, inputs, constraints=["norm: per_microbatch"])  # the other one is still exact
    assert plan.num_microbatches == 1
    assert not any("statistics of each" in note for note in plan.notes)


def test_verify_says_what_it_can_not_compare() -> None:
    model, inputs = make_counted()
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=["microbatches=2", ALLOWED])
    with pytest.raises(VerificationError, match=r"isn't exact: a constraint lets autopar\.batch_norm \(norm\)"):
        autopar.verify(model, plan, inputs)
