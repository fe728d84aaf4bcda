"""A plan that the caller gives instead of having one searched for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.errors import MissingPriceError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.program import Program
from autopar.step.pricing import predict
from autopar.step.training import TrainingSpec

__all__ = ["load_plan", "with_prediction"]


def load_plan(given: Plan | str | Path | None) -> Plan | None:
    """The plan, or the one in a file; raises what `Plan.load` raises."""
    return given if given is None or isinstance(given, Plan) else Plan.load(given)


def with_prediction(plan: Plan, program: Program, mesh: DeviceMesh, training: TrainingSpec) -> Plan:
    """`plan`; if nothing is predicted of it, since it was edited, with a prediction by estimated prices."""
    if plan.costs:
        return plan
    prices = ClusterPrices(Cluster.from_mesh(mesh), None)
    training = training.on_device(prices.device)
    with suppress(MissingPriceError):
        return replace(plan, prediction=predict(program, plan.decisions, prices, training, schedule_actions))
    return plan
