"""Calls for which a known plan fits, but would have a stage read parameters that another one holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning import call_plans
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from autopar.verify.rehearsal import planner_for
from tests.zoo import quick_search


class Stacked(nn.Module):
    """Four layers of one form, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[] of what the layers make of x [rows, 8]."""
        for part in self.parts:
            x = part(x)
        return x.square().mean()


def test_a_plan_that_moves_parameters_to_other_stages_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stacked(), torch.zeros(4, 8)
    traced = trace_model(model, {"x": x})

    def cut_at(layer: int) -> Plan:
        request = SearchRequest(constraints=("pipeline=2", f"cuts={layer}"), schedules=schedule_actions)
        return quick_search(traced.program, 2, request)

    plan, moved = cut_at(1), cut_at(2)
    assert plan.stages != moved.stages
    monkeypatch.setattr(call_plans, "reuse_plan", lambda *_: moved)  # as where another call's layers have this form
    planner = planner_for(model, traced, plan, [], training=True)
    made = planner((), {"x": torch.zeros(6, 8)}, True)
    assert made.plan.stages == plan.stages
