"""What the first line of a plan says of a precision that was left open."""

from __future__ import annotations

import re

import torch
from torch import nn

import autopar
from autopar.cluster import Cluster
from autopar.plan import Plan


def plan(device: str = "h100", dtype: torch.dtype = torch.float32, precision: str | None = None) -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)).to(dtype)
        x = torch.empty(4096, 4096, dtype=dtype)
    return autopar.plan(
        model,
        Cluster.of(device, 1, 2),
        (x,),
        loss_fn=nn.MSELoss(),
        example_target=x,
        precision=precision,
    )


def heading(found: Plan) -> str:
    return str(found).splitlines()[1]


def test_a_plan_in_float32_that_nobody_asked_for_says_what_bf16_would_bring() -> None:
    found = plan()
    said = re.fullmatch(
        r"Plan for 2 x H100-80GB; computes in float32: precision='bf16' is ([0-9.]+)x faster by estimate",
        heading(found),
    )
    assert said, heading(found)
    # What it says is near what asking for it gives.
    asked = plan(precision="bf16")
    assert found.step_time_s / asked.step_time_s > 0.9 * float(said[1])
    assert Plan.from_json(found.to_json()) == found


def test_nothing_is_said_where_it_was_chosen_or_brings_nothing() -> None:
    for found in (plan(precision="float32"), plan(precision="bf16"), plan(dtype=torch.bfloat16), plan("cpu")):
        assert "precision" not in heading(found)
        assert not found.prediction.speedups
