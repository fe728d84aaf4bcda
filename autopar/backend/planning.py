"""A plan of one graph for the sizes at hand, the same on every rank."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.backend.dynamo_graph import CapturedGraph, make_module
from autopar.backend.options import Options
from autopar.backend.session import Session
from autopar.backend.sharding import shard_in_place
from autopar.backend.storage import Stored, stored_parameters
from autopar.cost import ClusterPrices
from autopar.errors import BackendError, TraceError
from autopar.lower.communication.consensus import SAME_VALUES, agree, agree_equal, agree_tensors, share
from autopar.lower.communication.digests import digest_tensors
from autopar.lower.parameters.store import storage_layouts
from autopar.placement import REPLICATE, refine_layout
from autopar.plan import Plan
from autopar.planning.arguments import read_bytes, read_dtype, training_spec
from autopar.planning.compiling import search_compiled
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.search.settings.constraints import spell_out
from autopar.step.plan_check import check_fit
from autopar.trace import Traced, frame_of_text, function_gradients, hidden_backwards, trace

__all__ = ["PlannedGraph", "plan_graph"]

_MICROBATCHES = re.compile(r"\bmicrobatches\s*=")
_ZERO = re.compile(r"\bzero\s*=")
_PLACED = ("op", "input")  # roles of outputs that the runtime carries; it has the others whole


@dataclass(frozen=True)
class PlannedGraph:
    """A graph for sizes at hand: as a module, traced, and what to do.

    The program's outputs are those that depend on an input; the others are in `fixed`: the module's output of this
    number is this constant, parameter or buffer.  `replaced` has what took the place of a whole parameter, by its
    ``id``, if planning sharded it.
    """

    module: nn.Module
    traced: Traced
    plan: Plan
    fixed: Mapping[int, str]
    stored: Stored
    replaced: Mapping[int, nn.Parameter] = field(default_factory=dict[int, nn.Parameter])


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
    agree(group, lambda: _refuse_hidden_gradients(graph))
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
    shards = options.shard and trains
    stored = agree(group, lambda: stored_parameters(module, session.mesh, shards=shards))
    if shards:
        traced = _with_loss(traced, inputs)
    spec = agree(group, lambda: training_spec(module, options.optimizer))
    training = replace(spec.on_device(session.communicator.device.type), is_training=trains)
    is_free = shards and len(stored) < len(list(module.parameters()))
    constraints = agree(group, lambda: _constraints(options, traced.program, stored, is_free=is_free, trains=trains))
    limit = None if options.memory is None else agree(group, lambda: read_bytes(options.memory or 0))
    most = SearchRequest().max_microbatches if traced.program.loss else 1
    request = SearchRequest(limit, training, constraints, max_microbatches=most, stored=stored, any_batch=True)
    names = tuple(layer.name for layer in traced.program.layers)  # which follow from how Dynamo calls the modules
    key = ((traced.program.fingerprint, names), trains, stored, *options.key)
    if options.shard:
        session.fine_mesh(options)  # all ranks open its groups here, and none waits for another with its errors
    if key not in session.plans:
        prices = session.prices(options)
        session.plans[key] = share(group, lambda: _decide(traced.program, prices, request, options, session, trace_s))
    planned = PlannedGraph(module, traced, session.plans[key], fixed, stored)
    return _sharded(planned, key, options, session) if is_free else planned


def _constraints(options: Options, program: Program, stored: Stored, *, is_free: bool, trains: bool) -> tuple[str, ...]:
    """What the search must respect: where parameters are no longer free to move, nothing about their storage.

    Raises:
        BackendError: microbatches are demanded, and it is not known which output is the loss.
    """
    kept = tuple(text for text in options.constraints if trains or not _MICROBATCHES.search(text))
    if trains and not program.loss and any(map(_MICROBATCHES.search, kept)):
        raise BackendError(
            "microbatches need a graph whose only differentiable output is one scalar, the loss, and whose inputs need "
            f"no gradient; this one puts out {len(program.outputs)}: compile a function that returns the loss alone, "
            "without graph breaks"
        )
    if is_free:
        return kept
    if options.shard:
        kept = tuple(part for text in kept for part in spell_out(text) if not _ZERO.search(part))
    is_whole = all(layout == (REPLICATE,) for _, _, layout in stored)
    return (*kept, "zero=0") if is_whole and "zero=0" not in kept else kept


def _sharded(planned: PlannedGraph, key: tuple[Any, ...], options: Options, session: Session) -> PlannedGraph:
    """`planned`, after its whole parameters were put where its plan stores them; the plan is kept for that too."""
    program, plan = planned.traced.program, planned.plan
    mesh = session.fine_mesh(options)
    whole = {name: x for name, x in planned.module.named_parameters() if not isinstance(x, DTensor)}
    sizes = tuple(mesh.shape)
    layouts = dict.fromkeys(whole, (REPLICATE,) * len(sizes)) | storage_layouts(program, plan, sizes)
    made = agree(session.group, lambda: shard_in_place(whole, layouts, mesh, session.communicator))
    session.replaced += [(name, weakref.ref(parameter)) for name, parameter in whole.items()]
    stored = stored_parameters(planned.module, session.mesh, shards=True)
    session.plans[*key[:2], stored, *key[3:]] = plan
    return replace(planned, stored=stored, replaced=made)


def _refuse_hidden_gradients(graph: CapturedGraph) -> None:
    for stack in function_gradients(graph.code):
        raise TraceError(
            f"{frame_of_text(stack) or 'the model'}: a gradient by torch.func (grad, vjp, jacrev), which a traced "
            "graph can't hold. Take torch.autograd.grad, after torch._dynamo.config.trace_autograd_ops = True, or keep "
            "it out of the graphs with torch.compiler.disable"
        )
    for stack in hidden_backwards(graph.code):
        raise TraceError(
            f"{frame_of_text(stack) or 'the model'}: a custom torch.autograd.Function in a graph inside of Dynamo's, "
            "or one that writes to its argument, whose backward does not show in a traced graph. Make it an op with "
            "torch.library.custom_op and register_autograd, or keep it out of the graphs with torch.compiler.disable"
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


def _with_loss(traced: Traced, inputs: Sequence[Tensor]) -> Traced:
    """`traced`, with its loss if there is no doubt which output that is: then it can run in microbatches."""
    program = traced.program
    differentiable = [name for name in program.outputs if program.values[name].requires_grad]
    is_known = len(differentiable) == 1 and not program.type_of(differentiable[0]).shape
    if not is_known or any(x.requires_grad for x in inputs):
        return traced
    return replace(traced, program=replace(program, loss=differentiable[0]))


def _compare_ranks(module: nn.Module, inputs: Sequence[Tensor], traced: Traced, session: Session) -> None:
    """Raise MeshError, on every rank, where inputs or constants differ, or parameters when they are first met."""
    group = session.group
    agree_equal(
        group, agree(group, lambda: digest_tensors(("input", x) for x in inputs)), "batches",
        "Pass the whole batch on every rank, not a share of it (no DistributedSampler, equal seeds to shuffle)",
    )  # fmt: skip
    names = {x: name for name, x in (*module.named_parameters(), *module.named_buffers())}
    members = session.unchecked(names)
    known = [*((names[x], x) for x in members if not isinstance(x, DTensor)), *traced.constants.items()]
    agree_tensors(group, lambda: known, "initial values of parameters or buffers", SAME_VALUES)


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
        _check_edit(plan, request, str(path))
        return plan
    result = search_compiled(options.compile, lambda own: search(program, world, prices, own), program, prices, request)
    result = replace(result, planning_s=(("trace", trace_s), *result.planning_s))
    session.num_searches += 1
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        result.save(path)
    return result


def _check_edit(plan: Plan, request: SearchRequest, path: str) -> None:
    """Raise unless parameters are stored where they are, and the graph runs in one piece."""
    layouts = {name: refine_layout(layout, mesh, plan.shared_mesh) for name, mesh, layout in request.stored}
    moved = [name for name, layout in plan.shared_storage if layouts.get(name, layout) != layout]
    if moved or plan.stages or plan.num_microbatches > request.max_microbatches:
        what = f"stores {moved[0]!r} elsewhere" if moved else "has stages or microbatches"
        raise BackendError(
            f"the plan {path} {what}, but backend='autopar' runs a graph in one piece on parameters that stay where "
            "they are: undo that edit, or use autopar.parallelize"
        )
