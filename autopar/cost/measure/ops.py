"""Measures ops on one device: seconds of forward and backward over the work that `count_work` counts.

Each call consists of an op, as in a trace, and a function that runs it.  The amount of work comes from the same
`count_work` that prices ops later, so that an op of a measured size gets its measured time.

Several copies of a call run one after another, each on operands of its own, and their results are kept until their
backwards have run.  That is as in a step: operands aren't in the cache from a previous call, results are written to
memory that was used before, and forward builds the graph for backward.  The cost of entering autograd, which a step has
once and not for each op, is measured and subtracted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from autopar.cost.measure.op_calls import Call, make_calls
from autopar.cost.measure.probe import Measurement, Probe, Sample
from autopar.cost.measure.timing import MIN_S, QueuedTimer, median_of
from autopar.ops import Work, count_work
from autopar.program import Op, Ref, TensorType

__all__ = ["op_probes", "time_chain"]

T = TypeVar("T")

_COPIES = 2, 6  # the minimum keeps operands from being reused immediately, the maximum bounds memory and time
_COPIES_BYTES = 2**23
"""Approximate size of all copies of a call together: more than the cache of one core."""
_ROUNDS = 2, 40  # the minimum and maximum; one more warms up
_WITHOUT_BACKWARD = ("op/autopar.cross_entropy_denominator",)


def op_probes(device: torch.device, dtypes: tuple[str, ...], *, is_dense: bool = False) -> tuple[Probe, ...]:
    """The probes of ops: matrix products and attention first, then ops that move bytes.

    Args:
        device: the device to measure.
        dtypes: of matrix products and attention; other ops are measured in the first one.
        is_dense: sweep many shapes, instead of a few, for which planning can wait.
    """
    return tuple(_sweep(name, makes, device) for name, makes in make_calls(device, dtypes, is_dense=is_dense).items())


def _sweep(name: str, makes: list[Callable[[torch.device], Call]], device: torch.device) -> Probe:
    has_backward = name not in _WITHOUT_BACKWARD
    keys = (f"{name}/forward", f"{name}/backward") if has_backward else (f"{name}/forward",)

    def measure(budget_s: float) -> Iterator[Measurement]:
        for make in makes:
            yield from _measure_call(name, make, device, budget_s / len(makes), has_backward)

    return Probe(keys, len(makes), measure, float(len(keys) * len(makes)))


def _measure_call(
    name: str, make: Callable[[torch.device], Call], device: torch.device, budget_s: float, has_backward: bool
) -> Iterator[Measurement]:
    call = make(device)
    result = call.run(*call.inputs)
    work = _work_of(call, result)
    call_bytes = sum(x.nbytes for x in (*call.inputs, result))
    count = max(_COPIES[0], min(_COPIES[1], _COPIES_BYTES // max(1, call_bytes)))
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
    """Measure the seconds of the forward and of the backward of one of `calls`, which run one after another.

    Args:
        calls: equal calls, with operands of their own; floating-point operands require gradients.
        device: the device on which they run.
        budget_s: approximate seconds to spend.
        has_backward: whether to run backward.
    """
    leaves = [[x.requires_grad_(has_backward) for x in call.inputs if x.is_floating_point()] for call in calls]
    runs = [partial(call.run, *call.inputs) for call in calls]
    gradients = [torch.ones_like(run()) for run in runs]
    # The gradient of a leaf with respect to itself costs as much as entering autograd and returning from it.
    enter = [partial(torch.autograd.grad, xs[0], xs[0], torch.ones_like(xs[0])) for xs in leaves if has_backward]
    forward_times_s: list[float] = []
    backward_times_s: list[float] = []
    enter_times_s: list[float] = []
    time_forward, time_backward, time_entering = (QueuedTimer(device) for _ in range(3))
    stop = time.perf_counter() + budget_s
    while len(forward_times_s) <= _ROUNDS[0] or (time.perf_counter() < stop and len(forward_times_s) <= _ROUNDS[1]):
        results, forward_s = _time_all(runs, time_forward)
        forward_times_s.append(forward_s)
        if has_backward:
            backward_runs = [
                partial(torch.autograd.grad, result, xs, gradient)
                for result, xs, gradient in zip(results, leaves, gradients, strict=True)
            ]
            enter_times_s.append(_time_all(enter, time_entering)[1])
            backward_times_s.append(_time_all(backward_runs, time_backward)[1])
    forward = median_of(forward_times_s[1:])
    if not has_backward:
        return forward, Sample(MIN_S, 0.0)
    backward = median_of(backward_times_s[1:])
    backward_s = backward.seconds - statistics.median(enter_times_s[1:])
    return forward, Sample(max(backward_s, MIN_S), backward.spread)


def _time_all(runs: Sequence[Callable[[], T]], timer: QueuedTimer) -> tuple[list[T], float]:
    """Call all of `runs` in order, and return their results and the mean seconds of a call."""
    results: list[T] = []

    def run_all() -> None:
        results.extend(run() for run in runs)

    return results, timer(run_all) / len(runs)


def _work_of(call: Call, result: Tensor) -> Work:
    refs = tuple(Ref(str(index)) for index in range(len(call.inputs)))
    op = Op("call", call.target, refs, call.kwargs, ("result",), saves=call.saves, is_view=call.is_view)
    return count_work(op, tuple(map(_type_of, call.inputs)), (_type_of(result),))


def _type_of(x: Tensor) -> TensorType:
    return TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))
