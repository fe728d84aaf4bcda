"""Measures how much a collective slows down compute that runs at the same time.

``interference = (seconds of compute with the collective - seconds without it) / seconds of the collective alone``

clipped to [0, 1]: 0 if neither affects the other, 1 if overlapping them gains nothing.  Compute consists of matrix
products, enough of them to outlast the collective; all ranks compute and communicate at the same time.  Seconds are
means over trials, because a step takes the sum of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator

import torch

from autopar.cost.collective_prices import COLLECTIVES
from autopar.cost.measure.collective_times import (
    Collectives,
    Waitable,
    num_bytes_of,
    probes_between_ranks,
    run_to_end,
    start_collective,
)
from autopar.cost.measure.probe import Measurement, Probe, Sample
from autopar.cost.measure.ranks import max_over_ranks
from autopar.cost.measure.timing import elapsed_s, median_of, synchronize
from autopar.placement import Axis

__all__ = ["interference_probes"]

_QUICK = {"cpu": (2**20,), "accelerator": (2**24,)}
_DENSE = {"cpu": (2**16, 2**18, 2**20, 2**22), "accelerator": (2**18, 2**22, 2**26)}
"""Elements of a buffer on its larger side."""
_WIDTH = {"cpu": 256, "accelerator": 4096}
"""Rows and columns of the products: large enough to keep the device busy."""
_COMPUTE_RATIO = 2.0
"""Compute takes this many times as long as the collective, so that all of the collective overlaps with it."""
_MIN_REPEATS, _MAX_REPEATS = 3, 15
_MAX_PRODUCTS = 10_000  # a bound for collectives that last much longer than a product


def interference_probes(
    communicator: Collectives,
    axes: Iterable[Axis],
    *,
    kinds: tuple[str, ...] = COLLECTIVES,
    is_dense: bool = False,
) -> tuple[Probe, ...]:
    """One probe for each kind of collective on each axis; all ranks must run the same probes."""
    sizes = (_DENSE if is_dense else _QUICK)["cpu" if communicator.device.type == "cpu" else "accelerator"]
    return probes_between_ranks(communicator, "interference", kinds, axes, sizes, _measure, share=2.0, is_reading=True)


def _measure(
    communicator: Collectives, kind: str, axis: Axis, sizes: tuple[int, ...], budget_s: float
) -> Iterator[Measurement]:
    for num_elements in sizes:
        start = start_collective(communicator, kind, axis, num_elements)[0]
        # A rank without part in a send loses nothing: the maximum over the ranks counts.
        lost_share = _lost_share(communicator, start, budget_s / len(sizes))
        key = f"interference/{kind}/{axis.size}/{axis.stride}"
        yield Measurement(key, num_bytes_of(axis, num_elements), lost_share)


def _lost_share(communicator: Collectives, start: Callable[[], Waitable | None], budget_s: float) -> Sample:
    """The seconds that compute loses, relative to those of the collective."""
    trials = _trials(communicator, start, budget_s)
    lost_s, collective_s = ([trial[i] for trial in trials] for i in (0, 1))
    low, _, high = statistics.quantiles([_share(*trial) for trial in trials], n=4)
    return Sample(_share(sum(lost_s), sum(collective_s)), high - low)


def _share(lost_s: float, collective_s: float) -> float:
    return min(1.0, max(0.0, lost_s / max(collective_s, 1e-9)))


def _trials(
    communicator: Collectives, start: Callable[[], Waitable | None], budget_s: float
) -> list[tuple[float, float]]:
    """(seconds that compute lost, seconds of the collective) of several trials, the same number on every rank."""
    device = communicator.device
    width = _WIDTH["cpu" if device.type == "cpu" else "accelerator"]
    x = torch.ones((width, width), dtype=torch.float32 if device.type == "cpu" else torch.bfloat16, device=device)
    out = torch.empty_like(x)
    product_s = median_of([elapsed_s(lambda: torch.mm(x, x, out=out), device) for _ in range(5)]).seconds
    alone_s = _collective_s(communicator, start)
    [product_s] = max_over_ranks(communicator, [product_s])
    num_products = max(1, min(_MAX_PRODUCTS, math.ceil(_COMPUTE_RATIO * alone_s / product_s)))

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(x, x, out=out)

    def trial() -> tuple[float, float]:
        collective_s = _collective_s(communicator, start, repeats=1)
        compute_s = elapsed_s(compute, device)
        handles: list[Waitable | None] = []

        def both() -> None:
            handles.append(start())
            compute()

        max_over_ranks(communicator, [0.0])  # so that all ranks start at the same time
        together_s = elapsed_s(both, device)
        for handle in filter(None, handles):
            handle.wait()
        synchronize(device)
        return together_s - compute_s, collective_s

    repeats = int(budget_s / ((2 * _COMPUTE_RATIO + 2) * max(alone_s, 1e-6)))
    return [trial() for _ in range(max(_MIN_REPEATS, min(_MAX_REPEATS, repeats)))]


def _collective_s(communicator: Collectives, start: Callable[[], Waitable | None], repeats: int = 3) -> float:
    """Seconds of the collective alone, on the slowest rank."""
    times: list[float] = []
    for _ in range(repeats):
        max_over_ranks(communicator, [0.0])  # so that all ranks start at the same time
        times.append(elapsed_s(lambda: run_to_end(start), communicator.device))
    return max_over_ranks(communicator, [median_of(times).seconds])[0]
