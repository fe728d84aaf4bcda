"""A plan of one graph for the sizes at hand, the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.backend.dynamo_graph import CapturedGraph, make_module
from autopar.backend.options import Options
from autopar.backend.session import Session
from autopar.backend.storage import Stored, stored_parameters
from autopar.cost import ClusterPrices
from autopar.errors import BackendError, TraceError
from autopar.lower.communication.consensus import agree, agree_equal, share
from autopar.lower.communication.digests import digest_tensors
from autopar.placement import REPLICATE, refine_layout
from autopar.plan import Plan
from autopar.planning.arguments import read_bytes, read_dtype, training_spec
from autopar.planning.compiling import search_compiled
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.step.plan_check import check_fit
from autopar.trace import Traced, custom_backwards, frame_of_text, trace

__all__ = ["PlannedGraph", "plan_graph"]

_PLACED = ("op", "input")  # roles of outputs that the runtime carries; it has the others whole


@dataclass(frozen=True)
class PlannedGraph:
    """A graph for sizes at hand: as a module, traced, and what to do.

    The program's outputs are those that depend on an input; the others are in `fixed`: the module's output of this
    number is this constant, parameter or buffer.
    """

    module: nn.Module
    traced: Traced
    plan: Plan
    fixed: Mapping[int, str]
    stored: Stored


def plan_graph(
    graph: CapturedGraph, values: Sequence[Any], options: Options, session: Session, *, trains: bool
) -> PlannedGraph | None:
    """Plan `graph` for these values of its arguments; every rank calls it.  None: there is nothing to distribute.

    Raises:
        AutoparError: the graph can't be traced, ranks have different ones, or no plan fits.
    """
    group = session.group
    started_s = time.perf_counter()
    module = make_module(graph, values)
    inputs = [values[place] for place in graph.places("input")]
    agree(group, lambda: _refuse_custom_functions(graph))
    result = agree(group, lambda: _trace(module, inputs, read_dtype(options.precision), session, trains=trains))
    trace_s = time.perf_counter() - started_s
    agree_equal(
        group,
        f"{result[0].program.fingerprint if result else 'one without inputs'} on {[list(x.shape) for x in inputs]}",
        "graphs",
        "Run the same model on the same batch on every rank, and let no Python value that differs by rank decide what "
        "it runs",
    )
    if result is None:
        return None
    traced, fixed = result
    _compare_ranks(module, inputs, traced, session)
    stored = agree(group, lambda: stored_parameters(module, session.mesh))
    spec = agree(group, lambda: training_spec(module, options.optimizer))
    training = replace(spec.on_device(session.communicator.device.type), is_training=trains)
    constraints = options.constraints
    if all(layout == (REPLICATE,) for _, _, layout in stored) and "zero=0" not in constraints:
        constraints = (*constraints, "zero=0")
    limit = None if options.memory is None else agree(group, lambda: read_bytes(options.memory or 0))
    request = SearchRequest(limit, training, constraints, max_microbatches=1, stored=stored, any_batch=True)
    key = (traced.program.fingerprint, trains, stored, *options.key)
    if key not in session.plans:
        prices = session.prices(options)
        session.plans[key] = share(group, lambda: _decide(traced.program, prices, request, options, session, trace_s))
    return PlannedGraph(module, traced, session.plans[key], fixed, stored)


def _refuse_custom_functions(graph: CapturedGraph) -> None:
    for stack in custom_backwards(graph.code):
        raise TraceError(
            f"{frame_of_text(stack) or 'the model'}: a custom torch.autograd.Function, whose backward does not show in "
            "a traced graph. Make it an op with torch.library.custom_op and register_autograd, or keep it out of the "
            "graphs with torch.compiler.disable"
        )


def _trace(
    module: nn.Module, inputs: Sequence[Tensor], dtype: torch.dtype | None, session: Session, *, trains: bool
) -> tuple[Traced, dict[int, str]] | None:
    """The program, without a loss: nobody says which output it is, so all are whole and can be differentiated."""
    if not inputs:
        return None
    device_type = session.communicator.device.type
    traced = trace(module, tuple(inputs), {}, training=trains, dtype=dtype, device_type=device_type)
    program = traced.program
    roles = [program.values[name].role for name in program.outputs]
    fixed = {place: name for place, name in enumerate(program.outputs) if roles[place] not in _PLACED}
    outputs = tuple(name for place, name in enumerate(program.outputs) if place not in fixed)
    if not any(program.values[name].role == "op" for name in outputs):
        return None
    return replace(traced, program=replace(program, outputs=outputs, loss="")), fixed


def _compare_ranks(module: nn.Module, inputs: Sequence[Tensor], traced: Traced, session: Session) -> None:
    """Raise MeshError, on every rank, where inputs or constants differ, or parameters when they are first met."""
    agree_equal(
        session.group, digest_tensors(("input", x) for x in inputs), "batches",
        "Pass the whole batch on every rank, not a share of it (no DistributedSampler, equal seeds to shuffle)",
    )  # fmt: skip
    members = session.unchecked([*module.parameters(), *module.buffers()])
    known = [*(("member", x) for x in members if not isinstance(x, DTensor)), *traced.constants.items()]
    agree_equal(
        session.group, digest_tensors(known), "initial values of parameters or buffers",
        "Call torch.manual_seed with the same seed on every rank before the model is made, or load the same checkpoint "
        "everywhere",
    )  # fmt: skip


def _decide(
    program: Program, prices: ClusterPrices, request: SearchRequest, options: Options, session: Session, trace_s: float
) -> Plan:
    """The plan in the user's folder, or the best."""
    world = session.communicator.world_size
    path = options.plans / f"{program.fingerprint}.json" if options.plans else None
    if path is not None and path.exists():
        plan = Plan.load(path)
        if options.compile not in (None, plan.compiled):
            plan = plan.with_decisions(compiled=options.compile)
        check_fit(plan, program, world)
        _check_edit(plan, request.stored, str(path))
        return plan
    result = search_compiled(options.compile, lambda own: search(program, world, prices, own), program, prices, request)
    result = replace(result, planning_s=(("trace", trace_s), *result.planning_s))
    session.num_searches += 1
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        result.save(path)
    return result


def _check_edit(plan: Plan, stored: Stored, path: str) -> None:
    """Raise unless parameters are stored where they are, and the graph runs in one piece."""
    wanted = {name: refine_layout(layout, mesh, plan.shared_mesh) for name, mesh, layout in stored}
    moved = [name for name, layout in plan.shared_storage if wanted.get(name) != layout]
    if moved or plan.stages or plan.num_microbatches > 1:
        what = f"stores {moved[0]!r} elsewhere" if moved else "has stages or microbatches"
        raise BackendError(
            f"the plan {path} {what}, but backend='autopar' runs a graph in one piece on parameters that stay where "
            "they are: undo that edit, or use autopar.parallelize"
        )
