"""Measures ops on one device: forward and backward seconds over the work that `count_work` counts.

Each call is an op, as a trace would write it, beside a function that runs it.  The amount of work comes from the same
`count_work` that prices ops later, so that a measured op of the same size gets its measured time.

Several copies of a call run one after the other, each on operands of its own, and what they give is kept until one
backward has run through all of them.  So it is in a step: operands are not in the cache because the same call has just
read them, results go to memory that something else held before, forward makes the graph that backward needs, and what
entering autograd costs is paid once, not once an op: what a view's backward takes by itself is subtracted, and what it
takes as one of many is added.

On a CPU a few other ops run between two calls, as in a layer that uses an op several times.  What its first call in a
layer takes beyond that is measured apart (`first_call_probe`): the code of the op is then in a farther cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from autopar.cost.measure.calls import Call, make_calls
from autopar.cost.measure.first_calls import first_call_probes
from autopar.cost.measure.probe import Measurement, Probe
from autopar.cost.measure.surroundings import Surroundings, backward_node_s
from autopar.cost.measure.timing import Sample, median_of, sample
from autopar.cost.work import Work, count_work
from autopar.program import Op, Ref, TensorType

__all__ = ["op_probes", "time_chain"]

T = TypeVar("T")

_LEAST_S = 1e-8
_COPIES = 2, 6
_COPIES_BYTES = 2**23
"""What the copies of a call hold together, about: more than a core has to itself of the cache."""
_ROUNDS = 2, 40
_SHORT_S = 2e-4
_ADAM_BYTES = 28
"""AdamW in float32 reads parameter, gradient and two moments, and writes all but the gradient."""


def op_probes(device: torch.device, dtypes: tuple[str, ...], *, is_dense: bool = False) -> tuple[Probe, ...]:
    """What to measure of ops: matrix products and attention first, then what moves bytes.

    Args:
        device: where to run.
        dtypes: of matrix products and attention; other ops are measured in the first one.
        is_dense: sweep many shapes, instead of the few that a plan can wait for.
    """
    ops = (_sweep(name, makes, device) for name, makes in make_calls(device, dtypes, is_dense=is_dense).items())
    optimizer = Probe(("optimizer",), 2, partial(_measure_optimizer, device), 2.0, is_own_time=True)
    return (*ops, *first_call_probes(device, dtypes), optimizer)


def _sweep(name: str, makes: list[Callable[[torch.device], Call]], device: torch.device) -> Probe:
    has_backward = name not in _WITHOUT_BACKWARD
    keys = (f"{name}/forward", f"{name}/backward") if has_backward else (f"{name}/forward",)

    def measure(budget_s: float) -> Iterator[Measurement]:
        for make in makes:
            yield from _measure_call(name, make, device, budget_s / len(makes), has_backward)

    return Probe(keys, len(makes), measure, float(len(keys) * len(makes)), is_own_time=True)


def _measure_call(
    name: str, make: Callable[[torch.device], Call], device: torch.device, budget_s: float, has_backward: bool
) -> Iterator[Measurement]:
    call = make(device)
    result = call.run(*call.inputs)
    work = _work_of(call, result)
    each = sum(x.nbytes for x in (*call.inputs, result))
    count = max(_COPIES[0], min(_COPIES[1], _COPIES_BYTES // max(1, each)))
    del result
    calls = [call, *(make(device) for _ in range(count - 1))]
    forward, backward = time_chain(calls, device, budget_s, has_backward=has_backward)
    yield Measurement(f"{name}/forward", work.flops if work.is_counted_in_flops else max(1.0, work.num_bytes), forward)
    if has_backward:
        amount = work.backward_flops if work.is_counted_in_flops else max(1.0, work.backward_num_bytes)
        yield Measurement(f"{name}/backward", amount, backward)


def time_chain(
    calls: list[Call], device: torch.device, budget_s: float, *, has_backward: bool = True
) -> tuple[Sample, Sample]:
    """Seconds of the forward and of the backward of one of `calls`, which run one after the other.

    Args:
        calls: alike, with operands of their own; those of floating dtype take gradients.
        device: where they run.
        budget_s: seconds to spend, about.
        has_backward: whether to run backward.
    """
    leaves = [[x.requires_grad_(has_backward) for x in call.inputs if x.is_floating_point()] for call in calls]
    runs = [partial(call.run, *call.inputs) for call in calls]
    results = [run() for run in runs]
    gradients = [torch.ones_like(result) for result in results]
    passed = [torch.ones_like(own[0]) for own in leaves] if has_backward else []
    others = Surroundings(device) if device.type == "cpu" else None
    ahead, behind = (others.run_next, others.run_with_backward) if others else (None, None)
    is_short = False, False
    forward: list[float] = []
    backward: list[float] = []
    entering: list[float] = []
    stop = time.perf_counter() + budget_s
    num_rounds = 0
    while num_rounds < _ROUNDS[0] or (time.perf_counter() < stop and num_rounds < _ROUNDS[1]):
        results, seconds = _time_each(runs, ahead, is_short[0])
        forward += seconds
        if has_backward:
            # The gradient of a view, or of an operand by itself: what it takes to enter autograd and to come back.
            roots = [own[0].view_as(own[0]) if others else own[0] for own in leaves]
            enter = [
                partial(torch.autograd.grad, root, own[0], gradient)
                for root, own, gradient in zip(roots, leaves, passed, strict=True)
            ]
            entering += _time_each(enter, behind, is_short[1])[1]
            back = [
                partial(torch.autograd.grad, result, own, gradient)
                for result, own, gradient in zip(results, leaves, gradients, strict=True)
            ]
            backward += _time_each(back, behind, is_short[1])[1]
        num_rounds += 1
        is_short = median_of(forward).seconds < _SHORT_S, bool(backward) and median_of(backward).seconds < _SHORT_S
    skipped = len(calls)  # of the first round
    if not has_backward:
        return median_of(forward[skipped:]), Sample(_LEAST_S, 0.0)
    entry_s = statistics.median(entering[skipped:]) - (backward_node_s() if others else 0.0)
    return median_of(forward[skipped:]), _less(median_of(backward[skipped:]), entry_s)


def _less(taken: Sample, entry_s: float) -> Sample:
    return Sample(max(taken.seconds - entry_s, _LEAST_S), taken.spread)


def _time_each(
    runs: Sequence[Callable[[], T]], before: Callable[[], object] | None, is_short: bool
) -> tuple[list[T], list[float]]:
    """What `runs` give, and the seconds of each, with `before` done before each of them.

    Without it they follow each other, and the device works on all of them.  The clock of the thread takes its time; for
    short runs it is the usual one, which counts when other programs run, but seldom while this one does.
    """
    results: list[T] = []
    if before is None:
        torch.cuda.synchronize()
        started = time.perf_counter()
        results = [run() for run in runs]
        torch.cuda.synchronize()
        return results, [(time.perf_counter() - started) / len(runs)] * len(runs)
    clock = time.perf_counter if is_short else time.thread_time
    seconds: list[float] = []
    for run in runs:
        before()
        started = clock()
        result = run()
        seconds.append(clock() - started)
        results.append(result)
    return results, seconds


def _work_of(call: Call, result: Tensor) -> Work:
    refs = tuple(Ref(str(index)) for index in range(len(call.inputs)))
    op = Op("call", call.target, refs, call.kwargs, ("result",), saves=call.saves, is_view=call.is_view)
    return count_work(op, tuple(map(_type_of, call.inputs)), (_type_of(result),))


def _type_of(x: Tensor) -> TensorType:
    return TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))


_WITHOUT_BACKWARD = ("op/autopar.cross_entropy_denominator",)


def _measure_optimizer(device: torch.device, budget_s: float) -> Iterator[Measurement]:
    slice_s = budget_s / 2
    for num_elements in (2**14, 2**20):
        parameters = [torch.randn(num_elements // 8, device=device).requires_grad_() for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-9, foreach=True)
        step = cast(Callable[[], object], optimizer.step)  # pyright: ignore[reportUnknownMemberType]
        amount = float(num_elements * _ADAM_BYTES)
        yield Measurement("optimizer", amount, sample(step, device, slice_s))
