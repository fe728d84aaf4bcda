"""Measures collectives on process groups, through the communicator that the program will use.

All groups of an axis run the same collective at the same time, as in a program, and the slowest rank counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from autopar.cost.collective_prices import COLLECTIVES
from autopar.cost.measure.probe import Measurement, Probe, Sample
from autopar.cost.measure.ranks import Ranks, max_over_ranks
from autopar.cost.measure.timing import elapsed_s, median_of
from autopar.placement import Axis

__all__ = [
    "Collectives",
    "Waitable",
    "all_axes",
    "collective_probes",
    "default_axes",
    "num_bytes_of",
    "probes_between_ranks",
    "run_to_end",
    "start_collective",
]

_QUICK = {"cpu": (2**8, 2**14, 2**18, 2**20), "accelerator": (2**10, 2**18, 2**22, 2**26)}
_DENSE = {
    "cpu": (*(4**power for power in range(4, 13)), 2**17, 2**19),  # 1 KiB to 64 MiB of float32
    "accelerator": tuple(4**power for power in range(4, 15)),  # 1 KiB to 1 GiB
}
"""Elements of a buffer on its larger side."""
_MIN_REPEATS = 5  # the smallest number with meaningful quartiles
_MAX_REPEATS = 100  # a bound for calls so short that the budget would allow very many


class Waitable(Protocol):
    """A collective that has been started."""

    def wait(self) -> Tensor:
        """Wait for its result and return it."""
        ...


class Collectives(Ranks, Protocol):
    """The methods of `autopar.lower.communication.communicator.Communicator` that measuring links needs."""

    def start_all_gather(self, x: Tensor, axis: Axis, dim: int) -> Waitable:
        """Concatenate the members' `x` along `dim`."""
        ...

    def start_reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Waitable:
        """Sum over the members, and return this coordinate's slice along `dim`."""
        ...

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Waitable:
        """The sum or maximum over the members."""
        ...

    def start_all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Waitable:
        """Send slice c of `split_dim` to coordinate c, and concatenate the received ones along `concat_dim`."""
        ...

    def start_broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Waitable:
        """The `x` of coordinate `source`."""
        ...

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Waitable:
        """Send `x` to coordinate `to`."""
        ...

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, axis: Axis, source: int) -> Waitable:
        """Receive a tensor from coordinate `source`."""
        ...


def default_axes(world_size: int) -> tuple[Axis, ...]:
    """Groups of consecutive ranks, of at most 5 sizes that divide the world, including the whole world."""
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    return tuple(Axis(size, 1) for size in dict.fromkeys([*sizes[:4], *sizes[-1:]]))


def all_axes(world_size: int, group_sizes: Iterable[int] | None = None) -> tuple[Axis, ...]:
    """All axes of meshes of `world_size` devices (size times stride divides it), of all sizes or of `group_sizes`."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    sizes = [size for size in divisors if size > 1 and (group_sizes is None or size in set(group_sizes))]
    return tuple(Axis(size, stride) for size in sizes for stride in divisors if world_size % (size * stride) == 0)


def collective_probes(communicator: Collectives, axes: Iterable[Axis], *, is_dense: bool = False) -> tuple[Probe, ...]:
    """One probe for each kind of collective on each axis; all groups of an axis run at the same time.

    All ranks must run the same probes: they make the same calls, and agree through the communicator on their number.

    Args:
        communicator: the communicator of the ranks.
        axes: groups to measure.
        is_dense: measure many sizes, instead of 4, for which planning can wait.
    """
    sizes = (_DENSE if is_dense else _QUICK)["cpu" if communicator.device.type == "cpu" else "accelerator"]
    return probes_between_ranks(communicator, "collective", COLLECTIVES, axes, sizes, _measure)


def probes_between_ranks(
    communicator: Collectives,
    family: str,
    kinds: Iterable[str],
    axes: Iterable[Axis],
    sizes: tuple[int, ...],
    measure: Callable[[Collectives, str, Axis, tuple[int, ...], float], Iterator[Measurement]],
    *,
    share: float = 1.0,
    is_reading: bool = False,
) -> tuple[Probe, ...]:
    """One probe ``<family>/<kind>/<n>/<stride>`` for each kind on each axis, with a point for each of `sizes`.

    `measure` takes communicator, kind, axis, sizes and the seconds to spend; `share` is the share of one point.
    """
    return tuple(
        Probe(
            (f"{family}/{kind}/{axis.size}/{axis.stride}",),
            len(sizes),
            partial(measure, communicator, kind, axis, sizes),
            share=share * len(sizes),
            is_local=False,
            is_reading=is_reading,
        )
        for axis in axes
        for kind in kinds
    )


def _measure(
    communicator: Collectives, kind: str, axis: Axis, sizes: tuple[int, ...], budget_s: float
) -> Iterator[Measurement]:
    for num_elements in sizes:
        passes = start_collective(communicator, kind, axis, num_elements)
        slice_s = budget_s / len(sizes) / len(passes)
        # Sends are measured in several passes, of which the slowest counts.
        slowest = max((_time(communicator, start, slice_s) for start in passes), key=lambda sample: sample.seconds)
        yield Measurement(f"collective/{kind}/{axis.size}/{axis.stride}", num_bytes_of(axis, num_elements), slowest)


def _time(communicator: Collectives, start: Callable[[], Waitable | None], budget_s: float) -> Sample:
    """The median time of several calls, with the same number of calls on every rank."""

    def time_call() -> float:
        return elapsed_s(lambda: run_to_end(start), communicator.device)

    time_call()
    [slowest_s] = max_over_ranks(communicator, [time_call()])
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, int(budget_s / max(slowest_s, 1e-9))))
    return median_of([time_call() for _ in range(repeats)])


def num_bytes_of(axis: Axis, num_elements: int) -> float:
    """The bytes of a buffer of `start_collective` on its larger side."""
    return 4.0 * _round_up(num_elements, axis.size**2)


def start_collective(
    communicator: Collectives, kind: str, axis: Axis, num_elements: int
) -> tuple[Callable[[], Waitable | None], ...]:
    """Return a function that starts a collective over `num_elements` float32.

    For sends it returns two functions: each coordinate sends to the next, as between stages, first the even ones, then
    the odd ones.  If all sent at the same time, a rank's send would wait for its own receive on backends that run them
    sequentially.  All-gather and reduce-scatter work on the second dim, as most collectives of a program do (of
    sequences, of parameters in one buffer), so that the copies that this needs are included.
    """
    whole = torch.ones(_round_up(num_elements, axis.size**2), device=communicator.device)
    matrix = whole.view(axis.size, -1)
    part = matrix[:, : matrix.shape[1] // axis.size].contiguous()
    if kind == "send":
        passes = (0, 1) if axis.size > 2 else (0,)
        return tuple(partial(_hop, communicator, axis, whole, first) for first in passes)
    calls: dict[str, Callable[[], Waitable]] = {
        "all_gather": lambda: communicator.start_all_gather(part, axis, 1),
        "reduce_scatter": lambda: communicator.start_reduce_scatter(matrix, axis, 1),
        "all_reduce": lambda: communicator.start_all_reduce(whole, axis),
        "all_to_all": lambda: communicator.start_all_to_all(matrix, axis, 0, 1),
        "broadcast": lambda: communicator.start_broadcast(whole, axis),
    }
    return (calls[kind],)


def _hop(communicator: Collectives, axis: Axis, x: Tensor, first: int) -> Waitable | None:
    """Coordinates `first`, `first` + 2, ... each send to the next; None on a rank that neither sends nor receives."""
    coordinate = axis.coordinate(communicator.rank)
    if coordinate % 2 == first and coordinate + 1 < axis.size:
        return communicator.start_send(x, axis, coordinate + 1)
    if coordinate % 2 != first and coordinate > 0:
        return communicator.start_receive(tuple(x.shape), x.dtype, axis, coordinate - 1)
    return None


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def run_to_end(start: Callable[[], Waitable | None]) -> None:
    """Start a collective of `start_collective`, and wait for it."""
    started = start()
    if started is not None:
        started.wait()
