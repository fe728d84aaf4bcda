"""What the first call of an op in a layer takes beyond a later one: its code, and that around it, is in a far cache.

Measured on the smallest call of each family, after other ops, and after so many bytes were moved as a step moves
between two runs of a layer; what the same call takes among a few others is subtracted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.cost.measure.calls import Call, make_calls
from autopar.cost.measure.probe import Measurement, Probe
from autopar.cost.measure.surroundings import Entry, Surroundings
from autopar.cost.measure.timing import Sample, median_of

__all__ = ["first_call_probes"]

_BYTES = (2**17, 2**22)
"""Less than what a core's own caches hold, and more."""
_TRIALS = 3, 25
_LEAST_S = 1e-8


def first_call_probes(device: torch.device, dtypes: tuple[str, ...]) -> tuple[Probe, ...]:
    """One probe for each family of ops; none on a GPU, whose host runs ahead of it."""
    if device.type != "cpu":
        return ()
    families: dict[str, Callable[[torch.device], Call]] = {}
    for name, makes in make_calls(device, dtypes[:1], is_dense=False).items():
        families.setdefault(_family(name), makes[0])
    ops = (
        Probe((f"first/{name}/forward", f"first/{name}/backward"), len(_BYTES), partial(_measure, name, make),
              is_own_time=True)
        for name, make in families.items()
    )  # fmt: skip
    return (*ops, Probe(("first/program/forward",), len(_BYTES), _measure_program, is_own_time=True))


def _family(sweep: str) -> str:
    family, _, rest = sweep.partition("/")
    own = {"op": rest.partition("/")[0], "elementwise": "aten.mul", "view": "aten.transpose"}
    return own.get(family, family)


def _measure(name: str, make: Callable[[torch.device], Call], budget_s: float) -> Iterator[Measurement]:
    call = make(torch.device("cpu"))
    leaves = [x.requires_grad_() for x in call.inputs if x.is_floating_point()]
    gradient = torch.ones_like(call.run(*call.inputs))
    others, entry = Surroundings(torch.device("cpu")), Entry(torch.device("cpu"))

    def trial(num_bytes: int) -> tuple[float, float]:
        others.run_with_backward()
        if num_bytes:
            others.evict(num_bytes)
            others.run()
        else:
            call.run(*call.inputs)
            others.run_next()
        result, forward_s = _timed(lambda: call.run(*call.inputs))
        if not leaves:
            return forward_s, 0.0
        others.run_with_backward()
        if num_bytes:
            others.evict(num_bytes)
        for _ in range(2):
            entry.enter()
        return forward_s, _timed(lambda: torch.autograd.grad(result, leaves, gradient))[1]

    for num_bytes, (forward, backward) in _beyond(trial, budget_s):
        yield Measurement(f"first/{name}/forward", float(num_bytes), forward)
        yield Measurement(f"first/{name}/backward", float(num_bytes), backward)


def _measure_program(budget_s: float) -> Iterator[Measurement]:
    """Entering a layer's lowered program."""
    x = torch.ones(2, 2).requires_grad_()
    module = fx.symbolic_trace(_Nothing())
    others = Surroundings(torch.device("cpu"))

    def trial(num_bytes: int) -> tuple[float, float]:
        others.run_with_backward()
        if num_bytes:
            others.evict(num_bytes)
        others.run()
        run: Callable[[], Any] = (lambda: module(x, x, x)) if num_bytes else (lambda: None)
        return _timed(run)[1], 0.0

    for num_bytes, (forward, _) in _beyond(trial, budget_s):
        yield Measurement("first/program/forward", float(num_bytes), forward)


class _Nothing(nn.Module):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What it is given."""
        return x, y, z


def _beyond(
    trial: Callable[[int], tuple[float, float]], budget_s: float
) -> Iterator[tuple[int, tuple[Sample, Sample]]]:
    """The medians of `trial` after so many bytes less those after none, forward and backward."""
    taken: dict[int, list[tuple[float, float]]] = {num_bytes: [] for num_bytes in (0, *_BYTES)}
    stop = time.perf_counter() + budget_s
    count = 0
    while count <= _TRIALS[0] or (time.perf_counter() < stop and count <= _TRIALS[1]):
        for num_bytes, found in taken.items():
            found.append(trial(num_bytes))
        count += 1
    usual = [statistics.median(each[way] for each in taken[0][1:]) for way in (0, 1)]
    for num_bytes in _BYTES:
        samples = [median_of([each[way] for each in taken[num_bytes][1:]]) for way in (0, 1)]
        ahead, back = (
            Sample(max(_LEAST_S, sample.seconds - least), sample.spread)
            for sample, least in zip(samples, usual, strict=True)
        )
        yield num_bytes, (ahead, back)


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = run()
    return result, time.perf_counter() - started
