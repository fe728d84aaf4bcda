"""Measures collectives on live process groups, through whatever communicator the program will use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor

from autopar.cost.measure.probe import Measurement
from autopar.cost.measure.timing import median_of, synchronize
from autopar.placement import Axis

__all__ = ["Collectives", "default_axes", "max_over_ranks", "measure_collectives", "share_text"]

_NUM_ELEMENTS = {"cpu": (2**8, 2**14, 2**18, 2**20), "cuda": (2**10, 2**18, 2**22, 2**26)}
_MIN_REPEATS = 4
_MAX_REPEATS = 20


class Collectives(Protocol):
    """What a measurement needs of a communicator; `autopar.lower.communicator.Communicator` has it."""

    @property
    def rank(self) -> int:
        """This process's rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes take part."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        ...

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Create what collectives on `axes` need; called on every rank in the same order."""
        ...

    def all_gather(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """The members' `x` joined along `dim`."""
        ...

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """This coordinate's slice along `dim` of the members' sum."""
        ...

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The members' sum or maximum."""
        ...

    def all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        """Slice c of `split_dim` goes to coordinate c."""
        ...

    def broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Tensor:
        """Coordinate `source`'s `x`."""
        ...


def default_axes(world_size: int) -> tuple[Axis, ...]:
    """Neighbouring groups of each size that divides the world: at most 5, the whole world included."""
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    return tuple(Axis(size, 1) for size in dict.fromkeys([*sizes[:4], *sizes[-1:]]))


def measure_collectives(communicator: Collectives, axes: Iterable[Axis], budget_s: float) -> Iterator[Measurement]:
    """Measure every kind on every axis at 4 sizes, all groups of an axis at the same time.

    All ranks make the same calls: how often to repeat is agreed on through the communicator.
    """
    axes = tuple(axes)
    communicator.prepare((Axis(communicator.world_size, 1), *axes))
    sizes = _NUM_ELEMENTS["cuda" if communicator.device.type == "cuda" else "cpu"]
    slice_s = budget_s / max(1, len(axes) * len(sizes) * 5)
    for axis in axes:
        for num_elements in sizes:
            yield from _measure_size(communicator, axis, num_elements, slice_s)


def _measure_size(communicator: Collectives, axis: Axis, num_elements: int, slice_s: float) -> Iterator[Measurement]:
    whole = torch.ones(_round_up(num_elements, axis.size**2), device=communicator.device)
    part = whole[: whole.numel() // axis.size].clone()
    matrix = whole.view(axis.size, -1)
    calls: dict[str, Callable[[], Tensor]] = {
        "all_gather": lambda: communicator.all_gather(part, axis, 0),
        "reduce_scatter": lambda: communicator.reduce_scatter(whole, axis, 0),
        "all_reduce": lambda: communicator.all_reduce(whole, axis),
        "all_to_all": lambda: communicator.all_to_all(matrix, axis, 0, 1),
        "broadcast": lambda: communicator.broadcast(whole, axis),
    }
    for kind, call in calls.items():
        times = _times(communicator, call, slice_s)
        amount = float(whole.numel() * whole.element_size())
        yield Measurement(f"collective/{kind}/{axis.size}/{axis.stride}", amount, median_of(times))


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def _times(communicator: Collectives, call: Callable[[], Tensor], slice_s: float) -> list[float]:
    call()
    [slowest_s] = max_over_ranks(communicator, [_time(communicator, call)])
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, int(slice_s / max(slowest_s, 1e-9))))
    return [_time(communicator, call) for _ in range(repeats)]


def _time(communicator: Collectives, call: Callable[[], Tensor]) -> float:
    synchronize(communicator.device)
    start = time.perf_counter()
    call()
    synchronize(communicator.device)
    return time.perf_counter() - start


def max_over_ranks(communicator: Collectives, numbers: list[float]) -> list[float]:
    """The largest over all ranks of each of `numbers`; every rank gets the same."""
    if communicator.world_size == 1:
        return numbers
    mine = torch.tensor(numbers, dtype=torch.float64, device=communicator.device)
    largest = communicator.all_reduce(mine, Axis(communicator.world_size, 1), "max")
    return [float(number) for number in largest]


def share_text(communicator: Collectives, text: str) -> str:
    """Rank 0's `text`, on every rank."""
    data = text.encode() if communicator.rank == 0 else b""
    length = int(max_over_ranks(communicator, [float(len(data))])[0])
    codes = [float(code) for code in data] or [0.0] * length
    return bytes(int(code) for code in max_over_ranks(communicator, codes)).decode() if length else ""
