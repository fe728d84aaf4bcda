"""Small integer inputs whose values forward reads in Python are constants of a trace, and other values other calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputShapeError, TraceError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.caller_inputs import check_read_values
from autopar.trace import trace
from autopar.trace.calls.signature import MOST_READ
from autopar.verify.rehearsal import planner_for
from tests.lower.runs import build, loss_of
from tests.trace.interpreter import interpret
from tests.zoo import forced_plan

SIZES = torch.tensor([2, 4, 2])


class Pieces(nn.Module):
    """Attends within pieces of the batch's places, whose sizes are read one way or another."""

    def __init__(self, how: str = "tolist") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how

    def sizes_of(self, sizes: Tensor) -> list[int]:
        if self.how == "tolist":
            return sizes.tolist()  # the line that reads
        if self.how == "int":
            return [int(size) for size in sizes]
        ends = torch.arange(int(sizes.sum()) + 1)
        is_end = (ends[:, None] == sizes.cumsum(0)).any(1)
        stops = ends[is_end].tolist()
        return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        parts = self.linear(x).split(self.sizes_of(sizes), dim=1)
        return torch.cat([part.softmax(1) * part for part in parts], 1).square().sum()


def inputs_of(sizes: Tensor, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, int(sizes.sum()), 4, generator=random), "sizes": sizes}


@pytest.mark.parametrize("how", ["tolist", "int", "mask"])
def test_a_trace_has_the_values_of_its_call(how: str) -> None:
    model, inputs = Pieces(how), inputs_of(SIZES)
    traced = trace(model, (), inputs)
    assert traced.read_values == {"sizes": (2, 4, 2)}
    (note,) = (text for text in traced.program.notes if "'sizes'" in text)
    assert "test_read_inputs.py" in note
    assert "planned when they first come" in note
    (found,), _ = interpret(traced, model, list(inputs.values()))
    torch.testing.assert_close(found, model(**inputs))
    with pytest.raises(InputShapeError, match=r"'sizes' has the values \[4, 2, 2\].*for \[2, 4, 2\]"):
        traced.flatten_inputs((), {**inputs, "sizes": torch.tensor([4, 2, 2])})


class Counting(nn.Module):
    """A number that is read may be one that Python computes with, and no size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return (self.linear(x)[:, : int(count)] * (int(count) - 1)).sum()


def test_a_number_that_cuts_and_scales() -> None:
    model, inputs = Counting(), {"x": torch.randn(2, 4, 4), "count": torch.tensor(3)}
    traced = trace(model, (), inputs)
    assert traced.read_values == {"count": (3,)}
    (found,), _ = interpret(traced, model, list(inputs.values()))
    torch.testing.assert_close(found, model(**inputs))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (torch.ones(MOST_READ + 1, dtype=torch.int64), r"input 'sizes' \[1025\], which has more than 1,024 entries"),
        (SIZES.to("meta"), r"input 'sizes' \[3\], which has no values here"),
    ],
)
def test_what_can_not_be_constant_is_refused_by_name(sizes: Tensor, message: str) -> None:
    with pytest.raises(TraceError, match=f"so the model is not one graph.*{message}"):
        trace(Pieces("mask"), (), {"x": torch.randn(4, 8, 4), "sizes": sizes})


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        y = self.linear(x) * sizes.sum()
        return y.sum() if y.sum() > 0 else -y.sum()


def test_what_follows_from_floats_stays_refused() -> None:
    with pytest.raises(TraceError, match="so the model is not one graph") as caught:
        trace(Branching(), (), inputs_of(SIZES))
    assert "'sizes'" not in str(caught.value)


class Ending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.table(ids).sum()
        return y.square() if (ids == 7).any() else y


def test_a_branch_on_many_tokens_is_for_its_answer_not_for_the_tokens() -> None:
    model = Ending()
    assert trace(model, (), {"ids": torch.arange(4)[None]}).read_values == {"ids": (0, 1, 2, 3)}
    ids = torch.arange(32)[None] % 8
    traced = trace(model, (), {"ids": ids})
    assert not traced.read_values
    (read,) = traced.computed_values
    assert (read.inputs, read.values) == (("ids",), (1,))
    (note,) = (text for text in traced.program.notes if "what follows from input 'ids'" in text)
    assert "test_read_inputs.py" in note
    for given in (ids, ids.flip(1)):  # other tokens, the same answer
        (found,), _ = interpret(traced, model, traced.flatten_inputs((), {"ids": given}))
        torch.testing.assert_close(found, model(given))
    with pytest.raises(InputShapeError, match=r"what follows from input 'ids' has the values \[False\].*for \[True\]"):
        traced.flatten_inputs((), {"ids": ids % 7})


def test_local_inputs_with_values_of_rows_are_refused() -> None:
    traced = trace(Pieces(), (), inputs_of(SIZES))
    assert check_read_values(traced, is_local=True) is traced  # sizes of three images for four rows
    of_rows = trace(Pieces(), (), inputs_of(torch.tensor([2, 4, 2, 1])))
    assert check_read_values(of_rows, is_local=False) is of_rows
    with pytest.raises(TraceError, match=r"reads the values of \['sizes'\].*leave inputs='local' out"):
        check_read_values(of_rows, is_local=True)


def on_two_ranks(act: Any) -> list[Any]:
    model = Pieces()
    traced = trace(model, (), inputs_of(SIZES), training=True)
    plan = forced_plan(traced.program, 2, "data=2")
    others = [inputs_of(torch.tensor([4, 2, 2]))]
    planner = planner_for(model, traced, plan, others, lambda made: made, training=True)
    return simulate(2, lambda talk: act(build(model, traced, plan, talk, planner=planner), model, talk))


@pytest.mark.slow
def test_calls_with_other_values_are_planned_once() -> None:
    def act(made: Any, model: nn.Module, talk: Communicator) -> int:
        for seed, sizes in enumerate([SIZES, torch.tensor([4, 2, 2]), SIZES, torch.tensor([4, 2, 2])]):
            inputs = inputs_of(sizes, seed)
            torch.testing.assert_close(loss_of(made(**inputs)), model(**inputs))
        return len(made.plans)

    assert on_two_ranks(act) == [2, 2]
