"""Makes a parallel module of a plan: lowers a traced model, and plans its calls of other forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.errors import PlanMismatchError
from autopar.lower import ParallelModule, lower
from autopar.lower.communication.communicator import Communicator
from autopar.lower.observe.predictions import Predictions
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.call_plans import CallPlanner, executable_of
from autopar.planning.call_traces import CallTraces
from autopar.planning.setup import Setup
from autopar.program import Program
from autopar.search import SearchRequest
from autopar.step.prices import Prices
from autopar.step.simulation.simulate import simulate_step
from autopar.trace import Traced

__all__ = ["build", "call_planner"]


def build(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    communicator: Communicator,
    mesh: DeviceMesh,
    setup: Setup | None = None,
    *,
    planner: CallPlanner | None = None,
    compile_layers: bool = False,
) -> ParallelModule:
    """Lower a traced model by a plan; every rank calls this.  `communicator` may be real or simulated.

    `planner` plans calls in eval mode and with inputs of other forms; see `call_planner`.
    """
    setup = setup or Setup()
    dtypes = {traced.program.type_of(value).dtype for value in traced.program.parameters}
    if setup.dtype is not None and dtypes and str(setup.dtype).removeprefix("torch.") not in dtypes:
        raise PlanMismatchError(
            f"compute in {setup.dtype} was requested, but the program has parameters in {sorted(dtypes)}"
        )
    return lower(
        executable_of(traced, plan), module=model, communicator=communicator, mesh=mesh, draws=setup.draws,
        planner=planner, compile_layers=compile_layers, predictions=_predictions(traced.program, plan, mesh, setup),
    )  # fmt: skip


def _predictions(program: Program, plan: Plan, mesh: DeviceMesh, setup: Setup) -> Predictions:
    """Predictions of `plan`, computed when they are needed; by estimated prices if no plan was searched for."""

    @cache
    def prices() -> Prices:
        return setup.prices or ClusterPrices(Cluster.from_mesh(mesh), None)

    return Predictions(
        lambda kind, axis, num_bytes: prices().collective_s(kind, axis, num_bytes),
        lambda: simulate_step(program, plan, prices(), setup.training.on_device(prices().device), schedule_actions),
    )


def call_planner(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    setup: Setup | None = None,
    finish: Callable[[Traced], Traced] = lambda traced: traced,
) -> CallPlanner:
    """A planner of calls of `model` in eval mode and with inputs of other forms; `traced` training runs by `plan`.

    `finish` is as in `CallTraces`.  Prices are deterministic and equal on all ranks, so all ranks find the same plans.
    """
    setup = setup or Setup()
    prices = setup.prices or ClusterPrices(Cluster.of("cpu", devices_per_node=plan.world_size), None)
    request = SearchRequest(
        plan.memory_limit_bytes, setup.training, plan.constraints, schedules=schedule_actions,
        memory_error=plan.memory_error,
    )  # fmt: skip
    traces = CallTraces(model, traced, plan, dtype=setup.dtype, device_type=setup.device_type, finish=finish)
    return CallPlanner(traces, traced, plan, prices, request)
