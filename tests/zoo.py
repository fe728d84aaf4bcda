"""The zoo, traced once a process, and what parity with one device means."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from autopar.api import trace_model
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.lower.schedules import schedule_actions
from autopar.plan import Plan
from autopar.rehearsal import Run, keep_double, keep_double_program, run_parallel, run_single
from autopar.search import SearchRequest, search
from autopar.trace import Traced
from autopar.verify import VerificationReport, compare
from tests.models import make

STEPS = 5


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with its trace and what one device makes of it in `STEPS` steps."""

    model: nn.Module
    inputs: Mapping[str, Any]
    traced: Traced
    alone: Run


@cache
def subject(name: str, dtype: torch.dtype = torch.float64) -> Subject:
    """A model of the zoo; in float64 no differentiable value is ever rounded to float32."""
    return trained_alone(*make(name, dtype), in_double=dtype == torch.float64)


def trained_alone(model: nn.Module, inputs: Mapping[str, Any], *, in_double: bool = True) -> Subject:
    """Trace `model` and train a copy of it on one device."""
    traced = trace_model(copy.deepcopy(model), inputs)
    if not in_double:
        return Subject(model, inputs, traced, run_single(model, inputs, STEPS))
    with keep_double():
        return Subject(model, inputs, keep_double_program(traced), run_single(model, inputs, STEPS))


@cache
def quick_prices(world_size: int) -> ClusterPrices:
    """Prices of devices and links without overhead, so that cutting a tiny model is worth it."""
    cluster = Cluster.of("h100", devices_per_node=world_size)
    link = replace(cluster.within, latency_s=0.0, step_s=0.0, ramp_s=0.0)
    return ClusterPrices(replace(cluster, device=replace(cluster.device, launch_s=0.0), within=link))


@cache
def plan_for(
    name: str,
    world_size: int,
    constraints: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float64,
    *,
    stages: bool = False,
) -> Plan:
    """The plan that a search finds for a model of the zoo; with `stages` it may be a pipeline."""
    program = subject(name, dtype).traced.program
    request = SearchRequest(constraints=constraints, schedules=schedule_actions if stages else None)
    return search(program, world_size, quick_prices(world_size), request)


# By subject, so that a later one at the same address finds nothing of an earlier one.
_REPORTS: WeakKeyDictionary[Subject, dict[tuple[object, ...], VerificationReport]] = WeakKeyDictionary()


def report_on(who: Subject, plan: Plan) -> VerificationReport:
    """How far training by `plan` is from one device; plans that run alike run once."""
    known = _REPORTS.setdefault(who, {})
    pipeline = (plan.stages, plan.schedule)
    key = (plan.num_microbatches, plan.layers, plan.strategies, plan.shared_mesh, plan.shared_storage, pipeline)
    if key not in known:
        found = run_parallel(who.model, who.traced, plan, who.inputs, STEPS)
        known[key] = compare(who.alone, found, plan.world_size)
    return known[key]


def assert_parity(who: Subject, plan: Plan, dtype: torch.dtype = torch.float64) -> None:
    """Loss, gradients and parameters after `STEPS` steps of AdamW are those of one device.

    AdamW divides by the gradient's size, so in float32 the first steps of a parameter whose gradient is all but zero
    say nothing; there parameters are compared in float64 only.
    """
    report = report_on(who, plan)
    in_double = dtype == torch.float64
    assert report.loss_error <= (1e-12 if in_double else 1e-6), str(report)
    assert report.worst_gradient[1] <= (1e-9 if in_double else 1e-4), str(report)
    if in_double:
        assert report.parameter_error <= 1e-7, str(report)
