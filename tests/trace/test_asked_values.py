"""What follows from inputs alone and is asked in Python is constant in a trace, and compared in every call."""

from __future__ import annotations

import pickle
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputShapeError, TraceError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.trace import trace
from autopar.trace.calls.signature import MOST_READ
from autopar.trace.compat import torch_recording
from autopar.trace.python_values import recorded_computations
from autopar.verify.rehearsal import planner_for
from tests.lower.runs import build, loss_of
from tests.trace.interpreter import interpret
from tests.zoo import forced_plan

ROWS = 4


class Asking(nn.Module):
    """Asks one thing of floats: which rows there are, or something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how
        self.limit: Tensor
        self.register_buffer("limit", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.how)(x).square().sum()

    def selected(self, x: Tensor) -> Tensor:
        """Which rows are not empty; the first is kept by a write to a view."""
        is_real = (x == 0).sum(-1) != x.shape[-1]
        is_real[0] |= ~torch.any(is_real)
        kept = x[is_real]
        return self.linear(kept) * kept.shape[0]

    def listed(self, x: Tensor) -> Tensor:
        untyped: Any = (x != 0).any(-1).view(2, 2).sum(1)
        counts: list[int] = untyped.tolist()
        return torch.cat([part.softmax(0) for part in self.linear(x).split([*counts, len(x) - sum(counts)])])

    def distinct(self, x: Tensor) -> Tensor:
        """Whether rows differ in length, by a set of numbers, as Lumina and its relatives ask."""
        untyped: Any = (x != 0).sum(-1)
        lengths: list[int] = untyped.tolist()
        return self.linear(x)[: max(lengths) if len(set(lengths)) > 1 else 1].softmax(0)

    def placed(self, x: Tensor) -> Tensor:
        (places,) = (x != 0).any(-1).nonzero(as_tuple=True)
        return self.linear(x)[places].softmax(0)

    def array(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(-1).cpu().numpy()
        return self.linear(x)[: int(np.asarray((x > 0).sum(-1)).max() - lengths.min())].softmax(0)

    def counted(self, x: Tensor) -> Tensor:
        return self.linear(x)[: int((x[:, 0] > 0).sum())].softmax(0)

    def branched(self, x: Tensor) -> Tensor:
        if x.isnan().any() or x[0, 0] > 100:
            x = x.nan_to_num()
        return self.linear(x)

    def of_constants(self, x: Tensor) -> Tensor:
        """Whether a mask that it makes itself hides anything, as LED asks without a mask."""
        mask = torch.ones(x.shape[:1])
        if (1 - mask).bool().any().item():
            return self.linear(x) * mask[:, None]
        for rate in mask.cumsum(0) / 8:
            x = x * (1 - float(rate))
        return self.linear(x)[: int((mask > 0).sum()) - 1].softmax(0)

    def rounded(self, x: Tensor) -> Tensor:
        return self.linear(x)[: int(x.sum())]

    def drawn(self, x: Tensor) -> Tensor:
        return self.linear(x)[: int((torch.rand(4) + x[0] > 0.5).sum())]

    def of_a_buffer(self, x: Tensor) -> Tensor:
        return self.linear(x)[: int((x[:, 0] > self.limit).sum())]

    def array_of_results(self, x: Tensor) -> Tensor:
        places: Any = self.linear(x).detach().mean(0).topk(2).indices.numpy()
        return x[:, places[0] :]

    def of_results(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y[y[:, 0] > 0].softmax(0)

    def selected_results(self, x: Tensor) -> Tensor:
        return self.linear(x)[x[:, 0] > 0].softmax(0)

    def written_to(self, x: Tensor) -> Tensor:
        x[0] = 1
        return self.linear(x)[: int((x[:, 0] > 0).sum())]


def rows(*empty: int, seed: int = 0) -> Tensor:
    x = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(seed)) + 0.5
    x[list(empty)] = 0
    return x


ANSWERED = {
    "selected": (rows(1), (0, 2, 3)), "listed": (rows(1), (1, 2)), "distinct": (rows(1), (4, 0, 4, 4)),
    "array": (rows(1), (4, 0, 4, 4)),
    "placed": (rows(0, 3), (1, 2)),
    "counted": (rows(2), (3,)), "branched": (rows(), (0,)),
}  # fmt: skip


@pytest.mark.parametrize("how", ANSWERED)
def test_an_answer_is_constant_and_other_inputs_may_have_it(how: str) -> None:
    model = Asking(how)
    x, answer = ANSWERED[how]
    before = x.clone()
    traced = trace(model, (x,), {})
    assert not traced.read_values
    assert answer in [read.values for read in traced.computed_values]
    assert {read.inputs for read in traced.computed_values} == {("x",)}
    for given in (x, x * 1.5):
        (found,), _ = interpret(traced, model, traced.flatten_inputs((given,), {}))
        torch.testing.assert_close(found, model(given))
    flatten = pickle.loads(pickle.dumps(traced.flatten_inputs))
    other = torch.full_like(x, torch.nan) if how == "branched" else rows(0, 1, 2, 3)
    with pytest.raises(InputShapeError, match="what follows from input 'x' has the values"):
        flatten((other,), {})
    assert torch.equal(x, before)


@pytest.mark.slow
def test_what_follows_from_constants_alone_is_known_and_compared_with_nothing() -> None:
    model = Asking("of_constants")
    traced = trace(model, (rows(),), {})
    assert not traced.computed_values
    (found,), _ = interpret(traced, model, traced.flatten_inputs((rows(1),), {}))
    torch.testing.assert_close(found, model(rows(1)))
    trace(model, (rows().to("meta"),), {})  # no values are needed


def test_all_of_a_selection_is_the_tensor_itself() -> None:
    traced = trace(Asking("selected"), (rows(),), {})
    assert not [op for layer in traced.program.layers for op in layer.ops if "index" in op.target]


@pytest.mark.parametrize(
    "how", ["rounded", "drawn", "of_a_buffer", "of_results", "array_of_results", "selected_results", "written_to"]
)  # fmt: skip
def test_what_follows_from_more_than_inputs_stays_refused(how: str) -> None:
    with pytest.raises(TraceError, match=r"so the model is not one graph|needs a size that depends on values"):
        trace(Asking(how), (rows(1),), {})


def test_inputs_without_values_are_named() -> None:
    with pytest.raises(TraceError, match="follows from input 'x', which has no values here"):
        trace(Asking("selected"), (rows(1).to("meta"),), {})


def test_long_answers_stay_refused() -> None:
    with pytest.raises(TraceError, match=r"needs 1,025 numbers here that follow from input 'x'.*more than 1,024"):
        trace(Asking("placed"), (torch.rand(MOST_READ + 1, 4),), {})


def test_a_model_that_asks_nothing_computes_nothing_of_its_inputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert not trace(model, (rows(),), {}).computed_values


@pytest.mark.slow
def test_calls_with_other_answers_are_planned_once() -> None:
    model = Asking("selected").double()
    batches = [x.double() for x in (rows(1), rows(2, seed=1), rows(1, seed=2), rows(seed=3))]
    traced = trace(model, (batches[0],), {}, training=True)
    plan = forced_plan(traced.program, 2, "data=2")

    planner = planner_for(model, traced, plan, [{"x": x} for x in batches[1:]], lambda made: made, training=True)

    def act(talk: Communicator) -> int:
        made: Any = build(model, traced, plan, talk, planner=planner)
        for x in batches:
            torch.testing.assert_close(loss_of(made(x)), model(x))
        return len(made.plans)

    assert simulate(2, act) == [3, 3]


class Farthest(nn.Module):
    """Chooses points one after the other, each the farthest from those before; the first one is random."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.linear = count, nn.Linear(3, 4)

    def forward(self, points: Tensor) -> Tensor:
        """[2, 9, 3] -> a scalar."""
        chosen, rows = torch.randint(0, 9, (2,)), torch.arange(2)
        distance, sums = torch.full((2, 9), 1e10), points.new_zeros(2, 3)
        for _ in range(self.count):
            point = points[rows, chosen]
            nearer = (points - point[:, None]).square().sum(-1)
            mask = nearer < distance
            distance[mask] = nearer[mask]
            chosen, sums = distance.argmax(-1), sums + point
        return self.linear(sums).sum()


def test_what_follows_from_random_numbers_is_not_looked_through_for_each_selection() -> None:
    """Hundreds of steps, as PointNet++ has them, took hours: each selection looked at all ops before it."""
    seen: list[int] = []
    original = recorded_computations._memory_of
    for count in (4, 8, 16):
        with patch.object(recorded_computations, "_memory_of", side_effect=original) as memory_of:
            trace(Farthest(count), (torch.randn(2, 9, 3),), {})
        seen.append(memory_of.call_count)
    assert seen[2] - seen[1] <= 2.2 * (seen[1] - seen[0])


def test_questions_do_not_make_later_ops_deeper() -> None:
    """After hundreds of selections, Python's stack was full."""
    depths: list[int] = []

    class Net(Farthest):
        def forward(self, points: Tensor) -> Tensor:
            mask = points[..., 0] > 0
            for _ in range(10):
                points = points + points[mask].sum()
                recorder = torch_recording.recorder()
                depths.append(0 if recorder is None else depth_of(recorder._tracer.create_node))
            return self.linear(points).sum()

    trace(Net(1), (torch.randn(2, 9, 3),), {})
    assert max(depths) == depths[0] > 0


def depth_of(function: Any) -> int:
    """How many functions of the recorder call each other."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return 1 + max(map(depth_of, cells), default=0) if cells else 0
