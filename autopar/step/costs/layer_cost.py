"""What one layer costs under a strategy: the one formula that search minimizes and the plan reports.

Seconds of a step with M microbatches::

      M * sum over ops      forward (twice if recomputed) + backward
    + M * sum over values   collectives source -> copy and copy -> each reader, forward, backward, recomputed
    +     sum over params   collectives storage -> copy, as often as the ZeRO level says (`parameter_times`)
    + M * sum over kernels  the collectives inside special kernels
    + M * copies of what is offloaded, as far as they take longer than the forward, and the backward
    + (M - 1) * sum over params   adding up its gradients (`gradient_sums_s`)
    +     sum over params   the optimizer (`optimizer_costs`)

Movements inside one device (slices, zero padding, masks) cost nothing here.  Bytes: see `parameter_costs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopar.placement import Links
from autopar.plan.prediction import LayerCost
from autopar.program import Op, Program, Value
from autopar.step.activation_policies import activation_policy, rerun_ops
from autopar.step.costs.op_seconds import op_seconds
from autopar.step.costs.optimizer_costs import optimizer_s
from autopar.step.costs.overlap_estimate import ComputingRuns, runs_concurrently
from autopar.step.costs.parameter_costs import brought_s, gradient_sums_s, memory_cost
from autopar.step.costs.piece_seconds import hidden_s
from autopar.step.layer.instructions import InParts, InPieces, LocalProgram, Reshard, RunOp, Single
from autopar.step.layer.kernel_parts import hidden_in_pauses_s
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.local_program import local_program
from autopar.step.layer.op_states import OpState, kernel_calls, kernel_hidden_s
from autopar.step.layer.value_flows import Flow
from autopar.step.layer_tensors.liveness import RunningMemory, running_memory
from autopar.step.layer_tensors.rerun_forward import NOTHING, LeftOut, left_out
from autopar.step.prices import CollectiveCall, PricedCollective, Prices, priced, reshard_calls, run_s
from autopar.step.training import TrainingSpec, is_differentiable, own_training

__all__ = [
    "are_rerun",
    "computing_runs",
    "computing_seconds",
    "is_layer_rerun",
    "is_rerun",
    "offload_s",
    "parameter_times",
    "placed_collectives",
    "placed_cost",
    "running_collectives",
    "running_costs",
    "storage_cost",
    "stored_collectives",
    "weight_share",
]


def parameter_times(zero: int, num_microbatches: int, training: TrainingSpec) -> tuple[int, int]:
    """How often per step a parameter is gathered, and how often its gradient is reduced.

    ZeRO-3 gathers for the forward and again for the backward of every microbatch; levels 2 and 3 reduce in
    every microbatch; the others gather and reduce once.
    """
    uses = 2 if training.is_training and training.reruns else 1
    reduces = num_microbatches if zero >= 2 else 1
    return (uses * num_microbatches if zero == 3 else 1), (reduces if training.is_training else 0)


def placed_collectives(
    placed: PlacedLayer, training: TrainingSpec, prices: Prices | None = None
) -> tuple[PricedCollective, ...]:
    """Every collective that one step of this layer runs, value by value; `prices` as in `running_collectives`."""
    training = own_training(placed.program, placed.layer, training)
    return (*stored_collectives(placed, training), *running_collectives(placed, training, prices))


def stored_collectives(placed: PlacedLayer, training: TrainingSpec) -> Iterator[PricedCollective]:
    """Those between the storage and the copy of parameters; `training` is the layer's own."""
    for flow in placed.read_flows():
        if flow.is_parameter:
            yield from _storage_collectives(placed, flow, training)


def running_collectives(
    placed: PlacedLayer, training: TrainingSpec, prices: Prices | None = None, *, reruns: bool | None = None
) -> Iterator[PricedCollective]:
    """All the others, also those of a forward that runs again (None: if the layer's does); `training` is its own.

    With `prices` they say how many of their seconds overlap with compute.
    """
    reruns = is_layer_rerun(placed.recompute, training) if reruns is None else reruns
    out = _left_out(placed, training) if reruns else NOTHING
    local = local_program(placed)
    for each in local.instructions:
        if isinstance(each, InPieces):
            yield from _in_pieces(placed, local, each, training, prices, reruns=reruns)
            continue
        pauses = each.pauses if isinstance(each, InParts) else ()
        for single in each.singles if isinstance(each, InParts) else (each,):
            if isinstance(single, Reshard):
                value = local.values[single.target].value
                again = reruns and single.target not in out.moved
                yield from _reshard_collectives(placed, single, value, training, reruns=again)
            elif isinstance(single, RunOp):
                own = pauses if isinstance(each, InParts) and single is each.run else ()
                yield from _kernel_collectives(placed, single, own, training, prices, reruns=reruns)


def _in_pieces(
    placed: PlacedLayer,
    local: LocalProgram,
    each: InPieces,
    training: TrainingSpec,
    prices: Prices | None,
    *,
    reruns: bool,
) -> Iterator[PricedCollective]:
    hidden = {} if prices is None else hidden_s(local, each, placed, prices, training)
    value = local.values[each.move.target].value
    for run in _reshard_collectives(placed, each.move, value, training, reruns=reruns):
        overlapped_s = hidden.get("backward" if run.phase == "backward" else "forward", 0.0) / each.count
        yield from (replace(run, num_bytes=run.num_bytes / each.count, hidden_s=overlapped_s),) * each.count


def _kernel_collectives(
    placed: PlacedLayer,
    each: RunOp,
    pauses: Sequence[Sequence[Single]],
    training: TrainingSpec,
    prices: Prices | None,
    *,
    reruns: bool,
) -> Iterator[PricedCollective]:
    """Those of an op's kernel, if it has one; `pauses` are what else runs between its parts."""
    count = placed.view.num_microbatches
    for call, overlapped_s in _kernel_calls(placed, each, pauses, prices, training):
        run = replace(priced(call, each.op.name, count, "kernel", each.index + 1), hidden_s=overlapped_s)
        if call.phase == "forward" or training.is_training:
            yield run
        if call.phase == "forward" and reruns:
            yield replace(run, phase="recompute")


def _kernel_calls(
    placed: PlacedLayer, run: RunOp, pauses: Sequence[Sequence[Single]], prices: Prices | None, training: TrainingSpec
) -> Iterable[tuple[CollectiveCall, float]]:
    """The collectives of an op's kernel, with the seconds of each that overlap with compute."""
    calls = tuple(kernel_calls(run.state, placed.mesh))
    hidden_s = [0.0] * len(calls)
    if prices is not None and pauses:
        hidden_s = hidden_in_pauses_s(calls, _pauses_s(placed, pauses, prices, training), prices)
    elif prices is not None and any(call.overlap_parts for call, _ in calls):
        differentiable = is_differentiable(placed.program, run.op, training)
        time = prices.op_s(run.op, run.state.work_types, run.state.result_types, differentiable)
        hidden_s = kernel_hidden_s(calls, {"forward": time.forward_s, "backward": time.backward_s}, prices)
    for (call, times), overlapped_s in zip(calls, hidden_s, strict=True):
        yield from ((call, overlapped_s),) * times


def _pauses_s(
    placed: PlacedLayer, pauses: Sequence[Sequence[Single]], prices: Prices, training: TrainingSpec
) -> dict[tuple[str, int], float]:
    """Seconds that the ops of each pause compute, by phase and number of the pause, from 1."""
    times = op_seconds(placed, prices, training)
    seconds: dict[tuple[str, int], float] = {}
    for number, pause in enumerate(pauses, 1):
        ops = [times[each.index] for each in pause if isinstance(each, RunOp)]
        seconds["forward", number] = sum(time.forward_s for time in ops)
        seconds["backward", number] = sum(time.backward_s for time in ops)
    return seconds


def _reshard_collectives(
    placed: PlacedLayer, reshard: Reshard, value: Value, training: TrainingSpec, *, reruns: bool
) -> Iterator[PricedCollective]:
    has_gradient = training.is_training and value.requires_grad
    if reshard.purpose == "output" and _is_only_returned(placed.program, value.name):
        has_gradient = False
    purpose = "parameter" if value.role == "parameter" else "activation"
    count = placed.view.num_microbatches
    for call in reshard_calls(reshard.steps, reshard.tensor.num_bytes, has_gradient=has_gradient):
        yield priced(call, value.name, count, purpose, reshard.before)
        if call.phase == "forward" and reruns:
            yield priced(call._replace(phase="recompute"), value.name, count, purpose, reshard.before)


def _is_only_returned(program: Program, name: str) -> bool:
    """Whether the caller alone reads a value other than the loss, so that no gradient comes from outside the layer."""
    if not program.loss or name in program.loss_terms or name not in program.outputs:
        return False
    return not any(name in layer.inputs for layer in program.layers)


def _storage_collectives(placed: PlacedLayer, flow: Flow, training: TrainingSpec) -> Iterator[PricedCollective]:
    """The collectives between a parameter's storage and its copy."""
    tensor = flow.value.type
    gathers, reduces = parameter_times(placed.zero, placed.view.num_microbatches, training)
    gradient_bytes = float(tensor.num_elements * training.sum_itemsize(tensor.dtype))
    has_gradient = training.is_training and flow.value.requires_grad
    calls = reshard_calls(
        placed.to_copy(flow), tensor.num_bytes, gradient_bytes=gradient_bytes, has_gradient=has_gradient
    )
    for call in calls:
        yield priced(call, flow.value.name, gathers if call.phase == "forward" else reduces, "parameter")


def placed_cost(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> LayerCost:
    """Seconds and bytes of this layer for one step on one device.

    The memory and the optimizer step of parameters in shared storage are not counted here: they are stored and updated
    once for the whole plan.

    Raises:
        MissingPriceError: an op or collective has no price.
    """
    running = running_costs(placed, (placed.recompute,), prices, training)[placed.recompute]
    stored = tuple(stored_collectives(placed, own_training(placed.program, placed.layer, training)))
    return running + storage_cost(placed, stored, prices, training)


def running_costs(
    placed: PlacedLayer, hows: Iterable[str], prices: Prices, training: TrainingSpec
) -> dict[str, LayerCost]:
    """The part of `placed_cost` that does not depend on storage, for each of these ways to recompute."""
    training = own_training(placed.program, placed.layer, training)
    count = placed.view.num_microbatches
    forward_s = [0.0] * len(placed.states)
    backward_s = weight_s = 0.0
    for index, (op, time) in enumerate(zip(placed.layer.ops, op_seconds(placed, prices, training), strict=True)):
        forward_s[index] = count * time.forward_s
        backward_s += count * time.backward_s
        weight_s += count * time.backward_s * weight_share(placed.program, op)
    activation_s = parameter_s = again_s = ahead_s = activations_ahead_s = 0.0
    runs = list(running_collectives(placed, training, prices, reruns=training.is_training and training.reruns))
    for run in runs:
        seconds = run.times * run_s(run, prices)
        if run.phase == "recompute":
            again_s += seconds
        elif run.purpose == "parameter":
            parameter_s += seconds
            weight_s += seconds if run.phase == "backward" else 0.0
        else:
            activation_s += seconds
            activations_ahead_s += seconds if run.phase == "forward" else 0.0
        ahead_s += seconds if run.phase == "forward" else 0.0
    costs: dict[str, LayerCost] = {}
    kept_bytes = count * _returned_bytes(placed) if count > 1 else 0.0
    for how, memory in running_memory(placed, hows, training).items():
        rerun = zip(are_rerun(placed, how, training), forward_s, strict=True)
        recompute_s = sum(seconds for is_again, seconds in rerun if is_again)
        recompute_s += again_s if is_layer_rerun(how, training) else 0.0
        copies_s = count * offload_s(memory, prices)
        # Copies go on while activations are communicated (`autopar.step.simulation.simulate.Streams`).
        leave_s, return_s = (
            prices.host.exposed_s(copies_s, overlapped_s)
            for overlapped_s in (
                sum(forward_s) + activations_ahead_s,
                backward_s + recompute_s + activation_s - activations_ahead_s,
            )
        )
        costs[how] = LayerCost(
            sum(forward_s), backward_s, recompute_s, activation_s,
            parameter_s, saved_bytes=memory.kept_bytes, transient_bytes=memory.transient_bytes + kept_bytes,
            forward_comm_s=ahead_s, weight_s=weight_s, split_bytes=memory.branch_bytes,
            leave_s=leave_s, return_s=return_s, host_bytes=memory.offloaded_bytes, copies_s=copies_s,
        )  # fmt: skip
    return costs


def computing_runs(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> tuple[ComputingRuns, ComputingRuns]:
    """What a layer computes between its collectives of activations, in one microbatch's forward and backward; what runs
    again in backward is not included.
    """
    training = own_training(placed.program, placed.layer, training)
    times = op_seconds(placed, prices, training)
    runs = list(running_collectives(placed, training, prices, reruns=False))
    ahead, back = ([run for run in runs if run.phase == phase] for phase in ("forward", "backward"))
    forward = _between(ahead, [time.forward_s for time in times], prices)
    backward = _between(back, [time.backward_s for time in times], prices)
    return forward, ComputingRuns(backward.of_all[::-1], backward.of_network[::-1])


def _between(runs: Sequence[PricedCollective], seconds: Sequence[float], prices: Prices) -> ComputingRuns:
    """The runs of compute of ops that take so many seconds, between these collectives."""
    of_all = _cut(seconds, {run.before for run in runs})
    inside = [run for run in runs if runs_concurrently(Links.NETWORK, run.axis.links(prices.devices_per_node))]
    if not inside:
        return ComputingRuns(of_all, of_all)
    longer = [*seconds, 0.0]
    for run in inside:
        longer[run.before] += run_s(run, prices)
    others = {run.before for run in runs} - {run.before for run in inside}
    return ComputingRuns(of_all, _cut(longer, others))


def _cut(seconds: Sequence[float], cuts: Iterable[int]) -> tuple[float, ...]:
    return tuple(sum(seconds[start:stop]) for start, stop in itertools.pairwise([0, *sorted(cuts), len(seconds)]))


def _returned_bytes(placed: PlacedLayer) -> float:
    """What one microbatch puts out for the caller, who gets it when the step is over."""
    leaving = (flow for flow in placed.flows.values() if flow.output >= 0 and flow.value.name in placed.program.outputs)
    return sum(placed.local_bytes(placed.view.value_type(f), placed.departures[f.output]) for f in leaving)


def storage_cost(
    placed: PlacedLayer, stored: Iterable[PricedCollective], prices: Prices, training: TrainingSpec
) -> LayerCost:
    """The part of `placed_cost` that depends on storage and ZeRO level: gathers and reductions of parameters (`stored`,
    as `stored_collectives` lists them), sums of their gradients, the optimizer, and the memory of parameters.
    """
    training = own_training(placed.program, placed.layer, training)
    count = placed.view.num_microbatches
    seconds = ahead_s = once_s = weight_s = 0.0
    for run in stored:
        each_s = prices.collective_s(run.kind, run.axis, run.num_bytes)
        seconds += run.times * each_s
        if run.phase == "forward" and placed.zero == 3:
            ahead_s += count * each_s
        elif run.phase == "backward" and placed.zero >= 2:
            weight_s += run.times * each_s
        else:
            once_s += run.times * each_s
    copy_s = brought_s(placed, prices, training)
    gathers, _ = parameter_times(placed.zero, count, training)
    seconds += gathers * copy_s
    if placed.zero == 3:
        ahead_s += count * copy_s
    else:
        once_s += copy_s
    sums_s = gradient_sums_s(placed, count, prices, training)
    return replace(
        memory_cost(placed, training),
        backward_s=sums_s,
        parameter_comm_s=seconds,
        forward_comm_s=ahead_s,
        step_comm_s=once_s,
        weight_s=weight_s + sums_s,
        optimizer_s=optimizer_s(placed, prices, training),
    )


def computing_seconds(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> Iterator[tuple[str, float]]:
    """Of each op of a layer: what its price rests on, and its seconds in a step, those of running it again included.

    Raises:
        MissingPriceError: an op has no price.
    """
    own = own_training(placed.program, placed.layer, training)
    times = op_seconds(placed, prices, training)
    for is_again, time in zip(are_rerun(placed, placed.recompute, own), times, strict=True):
        yield time.source, placed.view.num_microbatches * ((1 + is_again) * time.forward_s + time.backward_s)


def weight_share(program: Program, op: Op) -> float:
    """The estimated part of an op's backward that gives gradients of parameters.

    Half if something else takes a gradient as well: a product's two gradients are products of equal size.
    """
    taking = [program.values[name] for name in op.operands if program.values[name].requires_grad]
    weights = sum(value.role == "parameter" for value in taking)
    if not weights:
        return 0.0
    return 1.0 if weights == len(taking) else 0.5


def is_rerun(op: Op, state: OpState, recompute: str, training: TrainingSpec) -> bool:
    """Whether backward computes the op again, `left_out` apart; a compiler chooses by itself, unless ops are named."""
    return _reruns_any(recompute, training) and activation_policy(recompute).is_rerun(op, has_kernel=state.has_kernel)


def _reruns_any(recompute: str, training: TrainingSpec) -> bool:
    is_left = training.compiled and activation_policy(recompute).reruns is not None and not rerun_ops(recompute)
    return training.is_training and training.reruns and not is_left


def are_rerun(placed: PlacedLayer, recompute: str, training: TrainingSpec) -> list[bool]:
    """`is_rerun` of every op; without those that a compiled layer leaves out when its forward runs again."""
    policy = activation_policy(recompute)
    if not _reruns_any(recompute, training) or (policy.reruns is None and not policy.keeps_inputs_only):
        return [False] * len(placed.states)
    out = _left_out(placed, training).ops if policy.keeps_inputs_only else frozenset[int]()
    ops = enumerate(zip(placed.layer.ops, placed.states, strict=True))
    return [index not in out and policy.is_rerun(op, has_kernel=state.has_kernel) for index, (op, state) in ops]


def _left_out(placed: PlacedLayer, training: TrainingSpec) -> LeftOut:
    return left_out(placed, fuses_attention=training.fuses_attention) if training.compiled else NOTHING


def is_layer_rerun(recompute: str, training: TrainingSpec) -> bool:
    """Whether backward runs the layer's forward again, collectives included, but for `left_out`."""
    return training.is_training and training.reruns and activation_policy(recompute).keeps_inputs_only


def offload_s(memory: RunningMemory, prices: Prices) -> float:
    """Seconds in which what a layer of `memory` saves leaves the device in one microbatch; it comes back in as many."""
    return prices.host.copy_s(memory.offloaded_bytes, len(memory.saved))
