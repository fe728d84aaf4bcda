"""`parallelize` and `plan`: from the arguments of users to a parallel module or a plan, on all ranks alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.balance import Lengths
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.cost.measure import CACHE_DIR, profile_path
from autopar.cost.profile import LayerTime
from autopar.cost.profile_file import keep, load_profile
from autopar.host.default_device import on_host
from autopar.lower import ParallelModule
from autopar.lower.communication.consensus import SAME_VALUES, agree, agree_equal, agree_tensors, share
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.kernels.random import generator_state, generators_kept
from autopar.lower.parameters.materialize import Draws, Initializer, has_meta, record_draws
from autopar.lower.parameters.original_parameters import watch_optimizers
from autopar.plan import Plan
from autopar.planning.arguments import (
    check_constraints,
    layers_demanded,
    read_bytes,
    read_dtype,
    read_outputs,
    training_spec,
)
from autopar.planning.building import build, call_planner
from autopar.planning.call_traces import ExampleInputs, as_call, example_call, trace_model
from autopar.planning.caller_inputs import call_inputs, check_read_values, read_inputs
from autopar.planning.compiling import check_compiler, read_compile
from autopar.planning.document_lengths import ExpectedDocuments
from autopar.planning.expectations import read_expectations
from autopar.planning.given_plan import load_plan, with_prediction
from autopar.planning.imbalance import ExpectedRouting
from autopar.planning.length_plans import ExpectedLengths, check_rows, read_distribution, row_tracer
from autopar.planning.logits import search_plan
from autopar.planning.mesh_cluster import mesh_prices, read_cluster
from autopar.planning.mesh_ranks import is_first_rank, mesh_ranks
from autopar.planning.searching import finish, request_of, search_setup, with_trace_s
from autopar.planning.setup import Setup
from autopar.planning.timed_layers import FamilyTimer, LayerTimer, search_with_timed_layers
from autopar.program import Program
from autopar.search import SearchRequest
from autopar.step.plan_check import check_fit, check_same_decisions
from autopar.trace import LossFunction, Traced, as_batch, put_loss_inside
from autopar.user_text.progress import phase, shown

__all__ = ["parallelize", "plan"]

_CACHE = CACHE_DIR


@shown(here=is_first_rank)
@on_host()
def parallelize(  # noqa: PLR0913  (what a user may say)
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Tensor | ExampleInputs | None = None,
    *,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    initialize: Initializer | None = None,
    plan: Plan | str | Path | None = None,
    memory: float | str | None = None,
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
    precision: str | torch.dtype | None = None,
    constraints: str | Sequence[str] | None = None,
    compile: bool | None = None,
    profile: Profile | str | Path | Literal[False] | None = None,
    inputs: Literal["global", "local"] = "global",
    outputs: Literal["whole", "local"] | None = None,
    shapes: Sequence[Tensor | ExampleInputs] = (),
    imbalance: ExpectedRouting = None,
    lengths: ExpectedLengths = None,
    documents: ExpectedDocuments = None,
) -> ParallelModule:
    """Turn a single-device model into one that trains on every device of `mesh`, with the same loss and gradients.

    Call it on every rank.  Unless `plan` is given, rank 0 searches for the plan, with prices measured on this machine.

    Args:
        model: any ``nn.Module``, equal on every rank; it is not changed.  Parameters on the meta device get the values
            that building the model on one device of the mesh would draw (see `autopar.materialize`), from the state of
            rank 0's generator; each rank materializes one whole parameter at a time, and keeps its part.
        mesh: a DeviceMesh over all ranks, of any shape: the search chooses its own axes, and assumes that consecutive
            ranks of the mesh are nearest to each other.
        example_inputs: one global batch, as a tuple of positional or a dict of keyword arguments; a tensor is the only
            argument.  It may be left out for a model with ``dummy_inputs``.
        loss_fn: for a model that returns outputs, not a loss: any callable, which the training loop would call as
            ``loss_fn(outputs, target)``.  The parallel module is then called with the target as well,
            ``loss = model(*inputs, target=target)``.  In eval mode it returns the loss if there is a target, otherwise
            the model's outputs.
        example_target: for `loss_fn`, the target that belongs to `example_inputs`: a tensor, a tuple (several
            positional arguments of `loss_fn`) or a dict (keyword arguments).
        initialize: for parameters on the meta device, a function that `autopar.materialize` calls with every module.
        plan: a `Plan` or the path of a saved one, to run instead of searching.
        memory: bytes per device that the plan may use, as a number or as text such as ``"70GiB"``.
        optimizer: the optimizer that will train the parameters, for the memory of its state: a name such as
            ``"adamw"``, an optimizer class, or a function that makes an optimizer of parameters.  Make the optimizer
            after this call, with the parameters of the returned module.
        precision: dtype of compute (``"bf16"``); parameters and optimizer state keep their dtype.
        constraints: constraints of the search, such as ``"tensor=2"`` or ``"lm_head: replicate"``: one text or several.
        compile: whether each distinct layer program is compiled, once, with ``torch.compile``.  None: as `plan` says;
            if a plan is searched for, on GPUs if that is predicted to be faster, and never on CPUs.
        profile: measured prices, or the path of their file; None: earlier measurements of this machine, by
            ``python -m autopar.profile`` or an earlier run, and new ones of what is missing (in seconds; kept for the
            next run); False: estimates.
        inputs: the inputs with which every rank calls the module: the whole batch (``"global"``), or its own rows of it
            (``"local"``), as from ``DistributedSampler(dataset, model.data_parallel_size, model.data_rank)`` or
            `autopar.shard_dataloader`; `example_inputs` are one whole batch in both cases.  Losses and
            gradients are those of one device on the rows of all data ranks, in their order.
        outputs: the outputs that calls return in addition to the loss: plain whole tensors on every rank (``"whole"``),
            or this rank's parts (``"local"``): DTensors, with pipeline stages None on the ranks of other stages.  None:
            whole in eval mode, if they fit in memory in addition to what the plan needs; otherwise, and in training,
            they are gathered when they are first read, which every rank must do.
        shapes: other whole batches to plan training for now, like `example_inputs` (with `loss_fn` as dicts that have
            the ``"target"``, too).  Other shapes are planned at their first call (`ParallelModule.plan_for`).
        imbalance: for a mixture of experts, how unevenly rows are distributed over devices that share experts, for
            prices and memory: the rows of the busiest device relative to the mean (``1.5``), ``"lognormal:0.5"``, or
            the rows of each expert as in ``report.expert_rows`` (or a JSON file of that); None: evenly.  Results don't
            depend on it.
        lengths: the lengths of the training sequences, if they vary: an `autopar.balance.Lengths`, the path of a
            file with one length per line (or the columns ``quantile`` and ``tokens``), or ``{length: count}``.
            `example_inputs` are ``[rows, tokens]``, with rows as long as the longest sequence, and as many tokens as
            the sequences of a step have on average.  The plan is then a family of plans for rows of each length, over
            one storage of parameters, and `autopar.balanced` chooses the fastest one for every batch.  Unless
            `documents` says otherwise, documents have these lengths.
        documents: for rows that pack documents, their lengths, for prices: a number of tokens, a list of lengths,
            `autopar.balance.Lengths`, or a file of lengths; None: as in `example_inputs`.  Results don't depend on it.

    Returns:
        A module with the original's signature, outputs and parameter names.  Parameters are DTensors;
        `.plan` is the plan.

    Raises:
        AutoparError: one of its subclasses, on every rank, before any rank waits for another.

    Example:
        >>> model = autopar.parallelize(model, init_device_mesh("cuda", (8,)), {"input_ids": ids, "labels": ids})

        With the loss outside, ``loss = criterion(model(x), y)`` becomes ``loss = model(x, target=y)``:

        >>> criterion = nn.CrossEntropyLoss()
        >>> model = autopar.parallelize(model, mesh, (x,), loss_fn=criterion, example_target=y)
    """
    communicator = ProcessGroupCommunicator(mesh_ranks(mesh), mesh.device_type)
    group = communicator.process_group
    given_model, given_inputs = model, example_inputs
    model, example_inputs = agree(group, lambda: put_loss_inside(given_model, given_inputs, loss_fn, example_target))
    state = share(group, lambda: generator_state(communicator.device))
    given_plan, given_texts = plan, constraints
    distribution = agree(group, lambda: read_distribution(lengths))
    constraints = agree(group, lambda: check_constraints(model, given_texts, communicator.world_size))
    plan = loaded_plan = agree(group, lambda: load_plan(given_plan))
    loaded: Profile | Literal[False] | None = share(
        group, lambda: profile if profile is None or profile is False else load_profile(profile)
    )
    draws = agree(group, lambda: _record_draws(model, initialize, state))
    prepared, unadjusted = agree(
        group,
        lambda: _prepare(
            model,
            example_inputs,
            memory,
            optimizer,
            precision,
            Setup(
                constraints=constraints,
                device_type=mesh.device_type,
                expected=read_expectations(imbalance, distribution if documents is None else documents),
                num_layers=layers_demanded(constraints, communicator.world_size, loaded_plan),
            ),
        ),
    )
    # Ranks may have other examples; the first one's count.
    expected = share(group, lambda: prepared.expected.seeing(unadjusted, example_call(model, example_inputs)))
    setup = replace(prepared, draws=draws, expected=expected)
    traced = setup.expecting(unadjusted)
    agree_equal(group, _describe(model, traced), "models or example inputs",
                "Build the same on every rank; the global batch is the same everywhere")  # fmt: skip
    is_local, whole_outputs = agree(group, lambda: (read_inputs(inputs, traced), read_outputs(outputs)))
    compile_choice = agree(group, lambda: read_compile(compile))
    own_setup = replace(
        setup, training=replace(setup.training, gathers_outputs=bool(whole_outputs)), compile=compile_choice
    )  # fmt: skip
    setup = agree(group, lambda: _with_lengths(own_setup, distribution, model, example_inputs, traced))
    arguments = (*_describe_arguments(plan, profile, setup), f"inputs={inputs}", f"outputs={outputs}")
    agree_equal(group, arguments, "arguments of parallelize", "Pass the same arguments on every rank")
    agree_tensors(group, lambda: _state(model, traced), "initial values of parameters or buffers", SAME_VALUES)
    if plan is None:
        setup = replace(setup, compile=agree(group, lambda: check_compiler(compile_choice, mesh.device_type)))
        with generators_kept(communicator.device):  # ranks measure, and draw, differently
            prices = mesh_prices(loaded, communicator, mesh, setup.dtype, cache_dir=_CACHE)
            setup = setup.priced(prices)
            if profile is None:
                plan, traced, setup = _search_and_time(traced, communicator, setup, prices)
            else:
                plan = share(group, lambda: search_setup(traced.program, communicator.world_size, setup))
                traced = traced.decided_by(plan.decisions)
    else:
        local_plan = plan if compile_choice in (None, plan.compiled) else plan.with_decisions(compiled=compile_choice)
        traced = traced.decided_by(local_plan.decisions)
        agree(group, lambda: check_compiler(local_plan.compiled, mesh.device_type))
        agree(group, lambda: check_fit(local_plan, traced.program, communicator.world_size))
        plan = share(group, lambda: with_prediction(local_plan, traced.program, mesh, setup.training))
        agree(group, lambda: check_same_decisions(local_plan, communicator.rank, plan))
    chosen = plan
    setup = replace(setup, training=setup.training.by(plan.decisions))
    watch_optimizers(model.parameters())
    module = _agree_before_groups(
        communicator,
        lambda: build(
            model,
            traced,
            chosen,
            communicator,
            mesh,
            setup,
            planner=call_planner(
                model, traced, chosen, setup, lambda made: check_read_values(setup.expecting(made), is_local=is_local)
            ),
            compile_layers=chosen.compiled,
        ),
    )
    module.call_inputs = agree(
        group,
        lambda: call_inputs(
            model,
            example_inputs,
            traced.program,
            module.data_split,
            communicator,
            is_local=is_local,
            read_values=traced.read_values,
        ),
    )
    module.whole_outputs = whole_outputs
    mode, module.training = module.training, True
    for args, kwargs in agree(group, lambda: [as_call(as_batch(batch) or ()) for batch in shapes]):
        module.plan_for(*args, **kwargs)
    module.training = mode
    return module


@shown(here=is_first_rank)
@on_host()
def plan(  # noqa: PLR0913  (what a user may say)
    model: nn.Module,
    cluster: Cluster | DeviceMesh,
    example_inputs: Tensor | ExampleInputs | None = None,
    *,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    memory: float | str | None = None,
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
    precision: str | torch.dtype | None = None,
    constraints: str | Sequence[str] | None = None,
    compile: bool | None = None,
    profile: Profile | str | Path | Literal[False] | None = None,
    imbalance: ExpectedRouting = None,
    lengths: ExpectedLengths = None,
    documents: ExpectedDocuments = None,
) -> Plan:
    """Find the fastest plan that fits in memory, without a process group; the model may be on the meta device.

    Args:
        model: as in `parallelize`.
        cluster: the devices and links, or a DeviceMesh whose devices and links are looked up.
        example_inputs: as in `parallelize`.
        loss_fn: as in `parallelize`.
        example_target: as in `parallelize`.
        memory: as in `parallelize`.
        optimizer: as in `parallelize`.
        precision: as in `parallelize`.
        constraints: as in `parallelize`.
        compile: as in `parallelize`.
        profile: measured prices of this device, or the path of their file; without them prices are estimates, and the
            plan says so.
        imbalance: as in `parallelize`.
        lengths: as in `parallelize`.
        documents: as in `parallelize`.

    Returns:
        The plan.  ``print(plan)`` prints tables; ``plan.save(path)`` writes JSON.

    Raises:
        InfeasibleError: no plan fits; the message names the smallest memory that would suffice.
        AutoparError: the model, inputs, constraints or cluster can't be used.

    Example:
        >>> plan = autopar.plan(model, autopar.Cluster.of("h100", nodes=8), {"input_ids": ids, "labels": ids})
        >>> print(plan.headline)
        fp32 · ...
    """
    model, example_inputs = put_loss_inside(model, example_inputs, loss_fn, example_target)
    where = read_cluster(cluster)
    constraints = check_constraints(model, constraints, where.world_size)
    distribution = read_distribution(lengths)
    measured = load_profile(profile) if profile else None
    expected = read_expectations(imbalance, distribution if documents is None else documents)
    num_layers = layers_demanded(constraints, where.world_size)
    asked = Setup(constraints=constraints, device_type=where.device.type, expected=expected, num_layers=num_layers)
    setup, traced = _prepare(model, example_inputs, memory, optimizer, precision, asked)
    setup = replace(
        setup,
        compile=read_compile(compile),
        expected=expected.seeing(traced, example_call(model, example_inputs)),
    )
    traced = setup.expecting(traced)
    setup = _with_lengths(setup, distribution, model, example_inputs, traced)
    return search_setup(traced.program, where.world_size, setup.priced(ClusterPrices(where, measured)))


def _prepare(
    model: nn.Module,
    example_inputs: ExampleInputs | None,
    memory: float | str | None,
    optimizer: str | Callable[..., torch.optim.Optimizer],
    precision: str | torch.dtype | None,
    setup: Setup,
) -> tuple[Setup, Traced]:
    dtype = read_dtype(precision)
    training = training_spec(model, optimizer)
    memory_bytes = None if memory is None else read_bytes(memory)
    started = time.perf_counter()
    with phase("tracing the model"):
        traced = trace_model(
            model, example_inputs, dtype=dtype, device_type=setup.device_type, num_layers=setup.num_layers
        )
    trace_s = time.perf_counter() - started
    return replace(setup, dtype=dtype, memory_bytes=memory_bytes, training=training, trace_s=trace_s), traced


def _agree_before_groups(communicator: ProcessGroupCommunicator, make: Callable[[], ParallelModule]) -> ParallelModule:
    """What `make` makes on every rank; a rank that raises meets the others before they open groups for its axes."""
    with communicator.preparing_later():
        return agree(communicator.process_group, make)


def _record_draws(model: nn.Module, initialize: Initializer | None, state: Tensor) -> Draws | None:
    return replace(record_draws(model, initialize), state=state) if has_meta(model) else None


def _with_lengths(
    setup: Setup, lengths: Lengths | None, model: nn.Module, example_inputs: ExampleInputs | None, traced: Traced
) -> Setup:
    if lengths is None:
        return setup
    check_rows(traced.program, lengths.longest)
    return replace(setup, lengths=lengths, trace_rows=row_tracer(model, example_inputs, traced.program, setup))


def _search_and_time(
    traced: Traced,
    communicator: ProcessGroupCommunicator,
    setup: Setup,
    prices: ClusterPrices,
) -> tuple[Plan, Traced, Setup]:
    """Search on the first rank, and add the layers that it times on its device to its profile; all ranks call it.

    Returns the plan, what it runs, and the setup with the prices by which it was chosen.
    """
    known = dict(prices.profile.layers) if prices.profile else {}
    timed = dict(known)

    def timer(program: Program) -> LayerTimer:
        return LayerTimer(program, communicator.device, traced.constants, timed)

    def find(program: Program, request: SearchRequest) -> Plan:
        return search_with_timed_layers(program, communicator.world_size, prices, request, timer(program))

    def search_here() -> tuple[Plan, dict[str, LayerTime]]:
        request = request_of(setup)
        with phase(f"searching for a plan for {communicator.world_size} devices, and timing layers"):
            plan = search_plan(setup.compile, find, traced.program, prices, request, communicator.world_size)
        own = replace(setup, time_layers=FamilyTimer(prices, timer))
        plan = finish(with_trace_s(plan, own), traced.program, own, request)
        new = {key: layer for key, layer in timed.items() if key not in known}
        measured = prices.profile
        if new and measured is not None:
            path = profile_path(_CACHE, communicator.device, communicator.world_size)
            keep(path, lambda stored: (stored or measured).with_layers(new))
        return plan, timed

    plan, found = share(communicator.process_group, search_here)
    decided = traced.decided_by(plan.decisions)
    layers = LayerTimer(decided.program, communicator.device, known=found)
    return plan, decided, setup.priced(FamilyTimer(prices, lambda _: layers, left_s=0.0)(decided.program, plan))


def _describe(model: nn.Module, traced: Traced) -> str:
    program = traced.program
    inputs = (f"{name} {list(program.type_of(name).shape)} {program.type_of(name).dtype}" for name in program.inputs)
    count = sum(p.numel() for p in model.parameters())
    read = "".join(f" with {name} = {list(values)}" for name, values in traced.read_values.items())
    what = f"{type(model).__name__} of {count:,} parameters on {', '.join(inputs)}{read}"
    return f"{what} (fingerprint {program.fingerprint})"


def _state(model: nn.Module, traced: Traced) -> Iterable[tuple[str, Tensor]]:
    """All values that the program has from the model, which ranks compare."""
    buffers = sorted(model.named_buffers(), key=lambda named: named[0])  # of a set of names: in any order
    return (*model.named_parameters(), *buffers, *traced.constants.items())


def _describe_arguments(plan: object, profile: object, setup: Setup) -> tuple[str, ...]:
    """A text of each argument that must be equal on all ranks."""
    how = "searched for" if plan is None else "given"
    prices = "measured" if profile is None else "given" if profile else "estimated"
    training = (f"{field.name}={getattr(setup.training, field.name)}" for field in fields(setup.training))
    constraints = f"constraints={[*setup.constraints]}"
    return (
        f"a plan {how}",
        f"prices {prices}",
        f"compile={setup.compile}",
        f"memory={setup.memory_bytes}",
        *training,
        constraints,
        f"{setup.expected}",
        f"lengths: {setup.lengths}",
    )
