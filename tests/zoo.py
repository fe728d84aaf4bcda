"""The zoo, traced once a process, and what parity with one device means: the same training, by what was priced."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.lower import ParallelModule
from autopar.lower.communication.collectives import Collective
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.search.settings.known_layers import KnownLayers
from autopar.trace import Traced
from autopar.verify import VerificationReport, compare
from autopar.verify.rehearsal import Run, join_runs, keep_double_program, run_ranks, run_single, train
from tests.collectives import assert_run_equals_priced
from tests.models import make

STEPS = 2  # the second reads what the first updated: parameters, buffers, the optimizer's state, what is stored


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
    traced = keep_double_program(traced) if in_double else traced
    return Subject(model, inputs, traced, run_single(model, inputs, STEPS, in_double=in_double))


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
    known = known_layers(name, world_size, dtype).for_other_constraints()
    if not stages:
        return forced_plan(program, world_size, *constraints, known=known)
    request = SearchRequest(constraints=quick(constraints), schedules=schedule_actions, known=known)
    return quick_search(program, world_size, request)


@cache
def known_layers(name: str, world_size: int, dtype: torch.dtype) -> KnownLayers:
    """What the searches for a model share; each finds what it finds alone (`tests.search.test_known_layers`)."""
    return KnownLayers()


def quick(constraints: tuple[str, ...]) -> tuple[str, ...]:
    """`constraints`, and that nothing is computed again if they don't say what is.

    A search without a limit of memory recomputes nothing by itself: it finds the same plan in two thirds of the time.
    """
    says_so = not constraints or any("recompute" in text or "offload" in text for text in constraints)
    return constraints if says_so else (*constraints, "recompute=none")


def forced_plan(program: Program, world_size: int, *constraints: str, known: KnownLayers | None = None) -> Plan:
    """The plan under `constraints`, without stages.

    If these say nothing of microbatches there is one, which a search takes by itself where everything fits in memory:
    it finds the same plan in half the time, as with `quick`.  Without constraints the search is free.
    """
    request = SearchRequest(constraints=quick(constraints), known=known or KnownLayers())
    if constraints and not any("microbatches" in text for text in constraints):
        request = replace(request, max_microbatches=1)
    return quick_search(program, world_size, request)


@lru_cache(maxsize=256)
def quick_search(program: Program, world_size: int, request: SearchRequest) -> Plan:
    """The plan by `quick_prices`; many tests search for the same one, and equal programs have equal plans."""
    return search(program, world_size, quick_prices(world_size), request)


@dataclass(frozen=True)
class Rehearsal:
    """How far training by a plan is from one device, and what each rank ran in the forward and backward passes."""

    report: VerificationReport
    collectives: list[list[Collective]]


# By subject, so that a later one at the same address finds nothing of an earlier one.
_REHEARSALS: WeakKeyDictionary[Subject, dict[tuple[object, ...], Rehearsal]] = WeakKeyDictionary()


def rehearse(who: Subject, plan: Plan) -> Rehearsal:
    """Train by `plan`; plans that run alike run once."""
    known = _REHEARSALS.setdefault(who, {})
    pipeline = (plan.stages, plan.schedule)
    key = (
        plan.num_microbatches,
        plan.layers,
        plan.strategies,
        plan.shared_mesh,
        plan.shared_storage,
        pipeline,
        (plan.decisions.gradients, plan.decisions.host_storage),
    )
    if key not in known:

        def rank(model: ParallelModule) -> tuple[Run, list[Collective]]:
            with model.recording() as collectives:
                return train(model, who.inputs, STEPS), collectives

        ranks = run_ranks(who.model, who.traced, plan, rank)
        found = join_runs([run for run, _ in ranks], plan.num_groups)
        known[key] = Rehearsal(compare(who.alone, found, plan.world_size), [recorded for _, recorded in ranks])
    return known[key]


def assert_parity(who: Subject, plan: Plan, dtype: torch.dtype = torch.float64, *, priced: bool = True) -> None:
    """Loss, gradients and parameters after `STEPS` steps of AdamW are those of one device, and what ran was priced.

    AdamW divides by the gradient's size, so in float32 the first steps of a parameter whose gradient is all but zero
    say nothing; there parameters are compared in float64 only.

    Args:
        priced: that each step's collectives are those that the plan's price counts.  Not so for random plans with
            microbatches, which cut integers where no search would, and gather them for that.
    """
    found = rehearse(who, plan)
    report, in_double = found.report, dtype == torch.float64
    assert report.loss_error <= (1e-12 if in_double else 1e-6), str(report)
    assert report.worst_gradient[1] <= (1e-9 if in_double else 1e-4), str(report)
    if in_double:
        assert report.parameter_error <= 1e-7, str(report)
    if priced:
        assert_run_equals_priced(who.traced.program, plan, found.collectives, STEPS)
