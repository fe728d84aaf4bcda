"""Measures ops on one device: forward and backward seconds over the work that `count_work` counts.

Each call is an op, as a trace would write it, and a function that runs it.  The amount of work comes from the same
`count_work` that prices ops later, so that a measured op of the same size gets its measured time.

Several copies of a call run one after the other, each on operands of its own, and what they give is kept until one
backward has run through all of them.  So it is in a step: operands are not in the cache because the same call has just
read them, results go to memory that something else held before, forward makes the graph that backward needs, and what
entering autograd costs is paid once, not once an op: it is measured and subtracted.
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
from autopar.cost.measure.timing import LEAST_S, median_of, own_s
from autopar.ops import Work, count_work
from autopar.program import Op, Ref, TensorType

__all__ = ["op_probes", "time_chain"]

T = TypeVar("T")

_COPIES = 2, 6  # at least, at most: runs take turns, so that none finds its operands as it left them
_COPIES_BYTES = 2**23
"""What the copies of a call hold together, about: more than a core has to itself of the cache."""
_ROUNDS = 2, 40  # at least, at most; a first one more, which warms up
_WITHOUT_BACKWARD = ("op/autopar.cross_entropy_denominator",)


def op_probes(device: torch.device, dtypes: tuple[str, ...], *, is_dense: bool = False) -> tuple[Probe, ...]:
    """What to measure of ops: matrix products and attention first, then what moves bytes.

    Args:
        device: where to run.
        dtypes: of matrix products and attention; other ops are measured in the first one.
        is_dense: sweep many shapes, instead of the few that a plan can wait for.
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
    gradients = [torch.ones_like(run()) for run in runs]
    # The gradient of an operand by itself: what it takes to enter autograd and to come back.
    enter = [partial(torch.autograd.grad, own[0], own[0], torch.ones_like(own[0])) for own in leaves if has_backward]
    forward: list[float] = []
    backward: list[float] = []
    entering: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(forward) <= _ROUNDS[0] or (time.perf_counter() < stop and len(forward) <= _ROUNDS[1]):
        results, forward_s = _time_all(runs, device)
        forward.append(forward_s)
        if has_backward:
            back = [
                partial(torch.autograd.grad, result, own, gradient)
                for result, own, gradient in zip(results, leaves, gradients, strict=True)
            ]
            entering.append(_time_all(enter, device)[1])
            backward.append(_time_all(back, device)[1])
    if not has_backward:
        return median_of(forward[1:]), Sample(LEAST_S, 0.0)
    taken = median_of(backward[1:])
    return median_of(forward[1:]), Sample(max(taken.seconds - statistics.median(entering[1:]), LEAST_S), taken.spread)


def _time_all(runs: Sequence[Callable[[], T]], device: torch.device) -> tuple[list[T], float]:
    """What `runs` give, one after the other, and the seconds of one of them."""
    results: list[T] = []

    def run_all() -> None:
        results.extend(run() for run in runs)

    return results, own_s(run_all, device) / len(runs)


def _work_of(call: Call, result: Tensor) -> Work:
    refs = tuple(Ref(str(index)) for index in range(len(call.inputs)))
    op = Op("call", call.target, refs, call.kwargs, ("result",), saves=call.saves, is_view=call.is_view)
    return count_work(op, tuple(map(_type_of, call.inputs)), (_type_of(result),))


def _type_of(x: Tensor) -> TensorType:
    return TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))
