"""Experts that take a matrix for every row (``batched_mm``) are the same op as those that sort rows."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.ops.experts import EXPERTS
from autopar.planning.call_traces import trace_model
from autopar.program import Op
from autopar.search import SearchRequest
from tests.parity.test_experts import NUM_EXPERTS, make
from tests.zoo import Subject, assert_parity, forced_plan, quick_search, trained_alone


@cache
def batched(name: str) -> Subject:
    model, inputs = make(name, products="batched_mm")
    return trained_alone(model.double().train(), inputs)


@pytest.mark.parametrize(
    ("name", "world_size", "constraints"),
    [
        ("mixtral", 2, ("tensor=2",)),
        pytest.param("deepseek", 4, ("tensor=2", "expert=2"), marks=pytest.mark.slow),
        pytest.param("gpt-oss", 4, ("expert=2", "data=2", "zero=3"), marks=pytest.mark.slow),  # biases
    ],
)
def test_models_are_trained_as_on_one_device(name: str, world_size: int, constraints: tuple[str, ...]):
    who = batched(name)
    ops = [op for layer in who.traced.program.layers for op in layer.ops]
    assert {"tokens", "experts", "dispatch", "ffn"} <= {
        o.factor for op in ops if op.target == EXPERTS for o in op.options
    }
    assert not [op for op in ops if op.target == "aten.bmm.default"]
    plan = forced_plan(who.traced.program, world_size, *constraints)
    assert_parity(who, plan, priced=False)


class Rows(nn.Module):
    """Rows left of their matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, 8, 16) / 4)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 16, 8) / 4)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """A scalar."""
        return self.experts(self.mix(x), ids).square().mean()

    def experts(self, x: Tensor, ids: Tensor) -> Tensor:
        rows = torch.bmm(x.unsqueeze(1), self.up[ids]).squeeze(1).relu()
        return torch.bmm(rows.unsqueeze(1), self.down[ids]).squeeze(1)


class Read(Rows):
    """Somebody else reads what is between the products: it can't be inside of an op."""

    def experts(self, x: Tensor, ids: Tensor) -> Tensor:
        rows = torch.bmm(x.unsqueeze(1), self.up[ids]).squeeze(1)
        return torch.bmm(rows.unsqueeze(1), self.down[ids]).squeeze(1) * rows.flip(0).mean()


class Moved(Rows):
    """The second product takes other experts than the first."""

    def experts(self, x: Tensor, ids: Tensor) -> Tensor:
        rows = torch.bmm(x.unsqueeze(1), self.up[ids]).squeeze(1).relu()
        return torch.bmm(rows.unsqueeze(1), self.down[ids.flip(0)]).squeeze(1)


class Twice(Rows):
    """The matrices of rows are read by more than a product."""

    def experts(self, x: Tensor, ids: Tensor) -> Tensor:
        of_rows = self.up[ids]
        return torch.bmm(x.unsqueeze(1), of_rows).squeeze(1) * of_rows.mean((1, 2)).unsqueeze(-1)


def ops_of(model: nn.Module) -> list[Op]:
    inputs = {"x": torch.randn(16, 8), "ids": torch.arange(16) % NUM_EXPERTS}
    return [op for layer in trace_model(model, inputs).program.layers for op in layer.ops]


def test_rows_may_stand_on_either_side():
    (op,) = [op for op in ops_of(Rows()) if op.target == EXPERTS]
    assert {"tokens", "experts", "dispatch", "ffn"} <= {option.factor for option in op.options}
    torch.manual_seed(0)
    inputs = {"x": torch.randn(16, 8).double(), "ids": torch.arange(16) % 3}
    who = trained_alone(Rows().double(), inputs)
    assert_parity(who, quick_search(who.traced.program, 2, SearchRequest()), priced=False)


@pytest.mark.parametrize("model", [Read, Moved, Twice])
def test_what_is_no_region_of_both_products_is_none(model: type[Rows]):
    inputs = {"x": torch.randn(16, 8).double(), "ids": torch.arange(16) % NUM_EXPERTS}
    torch.manual_seed(0)
    who = trained_alone(model().double(), inputs)
    ops = [op for layer in who.traced.program.layers for op in layer.ops]
    assert len([op for op in ops if op.target == EXPERTS]) == (2 if model is Moved else 0)
    assert_parity(who, quick_search(who.traced.program, 2, SearchRequest()), priced=False)
