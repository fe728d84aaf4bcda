"""A new way to keep activations is one record."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ConstraintError
from autopar.lower.program import recompute
from autopar.plan import Plan
from autopar.program import Op, Program
from autopar.step import activation_policies
from autopar.step.activation_policies import ActivationPolicy, register_activation_policy
from autopar.trace import trace
from tests.zoo import forced_plan


class Wide(nn.Module):
    """Large activations between products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(4):
            h = torch.sin(h) * torch.tanh(h)
        return self.second(h).square().mean()


MODEL, INPUTS = Wide(), {"x": torch.randn(64, 32)}


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(MODEL, (), INPUTS).program


@pytest.fixture(autouse=True)
def _forget_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_policies, "_policies", dict(activation_policies._policies))


def planned(program: Program, name: str) -> Plan:
    plan = forced_plan(program, 2, f"recompute={name}", "zero=0", "data=2")
    assert {strategy.recompute for strategy in plan.strategies} == {name}
    return plan


def saved_bytes(plan: Plan) -> float:
    return sum(cost.saved_bytes for cost in plan.costs)


def recompute_s(plan: Plan) -> float:
    return sum(cost.recompute_s for cost in plan.costs)


def is_sine(op: Op) -> bool:
    return op.target.startswith("aten.sin")


def test_a_way_that_reruns_other_ops_is_one_record(program: Program) -> None:
    register_activation_policy(ActivationPolicy("without_sines", reruns=is_sine, is_searched=False))
    plans = {name: planned(program, name) for name in ("none", "without_sines", "selective", "full")}
    sizes = [saved_bytes(plan) for plan in plans.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4 or sizes[2] == sizes[3]
    assert 0 == recompute_s(plans["none"]) < recompute_s(plans["without_sines"]) < recompute_s(plans["selective"])
    assert Plan.from_json(plans["without_sines"].to_json()) == plans["without_sines"]
    assert "2 ranks against one device" in str(autopar.verify(MODEL, plans["without_sines"], INPUTS, shrink=False))


def test_what_is_rerun_is_not_kept(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []
    drop = recompute._Recomputation.value
    monkeypatch.setattr(
        recompute._Recomputation, "value", lambda self, name: (dropped.append(name), drop(self, name))[1]
    )
    register_activation_policy(ActivationPolicy("without_sines", reruns=is_sine, is_searched=False))
    autopar.verify(MODEL, planned(program, "without_sines"), INPUTS, shrink=False)
    assert any(name.startswith("sin") for name in dropped)
    assert not any(name.startswith(("tanh", "mul", "linear")) for name in dropped)


def test_a_way_that_offloads_what_another_keeps_is_one_record(program: Program) -> None:
    register_activation_policy(ActivationPolicy("without_sines", reruns=is_sine, is_searched=False))
    register_activation_policy(ActivationPolicy("sines_away", reruns=is_sine, offloads=True, is_searched=False))
    kept, plan = planned(program, "without_sines"), planned(program, "sines_away")
    assert saved_bytes(plan) == 0 < saved_bytes(kept) == sum(cost.host_bytes for cost in plan.costs)
    assert recompute_s(plan) == recompute_s(kept)
    assert "2 ranks against one device" in str(autopar.verify(MODEL, plan, INPUTS, shrink=False))


def test_the_words_of_constraints_and_plans_are_those_of_the_records(program: Program) -> None:
    with pytest.raises(ConstraintError, match="'shelf' is none of none, selective, full"):
        planned(program, "shelf")
    with pytest.raises(ValueError, match="give one of"):
        register_activation_policy(ActivationPolicy("both", reruns=is_sine, keeps_inputs_only=True))
