"""Measures collectives on live process groups, through whatever communicator the program will use.

On a CPU each follows a moment of computing, as in a program: what counts is by how much it makes the two longer than
computing is priced.  Ranks come apart then, and find the threads that carry messages asleep, or without a core for a
slice of the scheduler's (4 ms): every few messages one waits that long.  A step has many of them, so a mean counts, not
a median.

Ranks that share cores come apart by whole slices, so their moment is one on average: behind a shorter one a small
collective takes half of what it takes in a step.  Its length changes from call to call, as in a step.  What it makes
the two longer by is then the processor seconds that all threads work for it, times the ranks of a core, and what cores
idle for.  The first is steady from call to call; the second is anything from 0 to a few slices, but hardly depends on
the bytes, so it is a mean over all sizes.  What programs of others work meanwhile counts as the second.

What the machine's host takes away now and then doesn't count: a moment in which this thread itself worked for much
longer than usual says nothing, nor a call that takes many times as long as those before.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from autopar.cost.collectives import COLLECTIVES
from autopar.cost.measure.probe import Measurement, Probe
from autopar.cost.measure.timing import LEAST_S, Sample, elapsed_s, mean_of, median_of
from autopar.errors import ProfileError
from autopar.placement import Axis

__all__ = [
    "Behind",
    "Collectives",
    "Moment",
    "Ranks",
    "Waitable",
    "all_axes",
    "collective_probes",
    "crowding_of",
    "default_axes",
    "max_over_ranks",
    "num_bytes_of",
    "probes_between_ranks",
    "run_to_end",
    "share_text",
    "start_collective",
    "times_behind",
]

_QUICK = {"cpu": (2**8, 2**14, 2**18, 2**20), "cuda": (2**10, 2**18, 2**22, 2**26)}
_DENSE = {
    "cpu": (*(4**power for power in range(4, 13)), 2**17, 2**19),  # 1 KiB to 64 MiB of float32
    "cuda": tuple(4**power for power in range(4, 15)),  # 1 KiB to 1 GiB
}
"""Elements of a buffer on its larger side."""
_MIN_REPEATS = 5
_MAX_REPEATS = 100
_SHARE = 4.0
"""Of the seconds to spend, for each size: a mean of what a scheduler delays needs many calls."""
_MOMENT_S = 1e-3
_PART_S = 4e-3 / 3  # of the moment of ranks that share cores
_PARTS = (1, 5, 2, 4, 3)
_DISTURBED = 1.5
_STOPPED = 5.0
_TRIES = 3
_WIDTH = 128  # of the products that a moment is filled with
_NUM_ALONE = 30


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Its result."""
        ...


class Ranks(Protocol):
    """The processes that measure at the same time, and how they agree."""

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

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The members' sum or maximum."""
        ...


class Collectives(Ranks, Protocol):
    """What a measurement needs of a communicator; `autopar.lower.communication.communicator.Communicator` has it."""

    def start_all_gather(self, x: Tensor, axis: Axis, dim: int) -> Waitable:
        """The members' `x` joined along `dim`."""
        ...

    def start_reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Waitable:
        """This coordinate's slice along `dim` of the members' sum."""
        ...

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Waitable:
        """The members' sum or maximum."""
        ...

    def start_all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Waitable:
        """Slice c of `split_dim` goes to coordinate c."""
        ...

    def start_broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Waitable:
        """Coordinate `source`'s `x`."""
        ...

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Waitable:
        """Send `x` to coordinate `to`."""
        ...

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, axis: Axis, source: int) -> Waitable:
        """Receive what coordinate `source` sends."""
        ...


def default_axes(world_size: int) -> tuple[Axis, ...]:
    """Neighbouring groups of each size that divides the world: at most 5, the whole world included."""
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    return tuple(Axis(size, 1) for size in dict.fromkeys([*sizes[:4], *sizes[-1:]]))


def all_axes(world_size: int, group_sizes: Iterable[int] | None = None) -> tuple[Axis, ...]:
    """Every axis of a mesh of so many devices: sizes and strides whose product divides them; or of `group_sizes`."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    sizes = [size for size in divisors if size > 1 and (group_sizes is None or size in set(group_sizes))]
    return tuple(Axis(size, stride) for size in sizes for stride in divisors if world_size % (size * stride) == 0)


def collective_probes(communicator: Collectives, axes: Iterable[Axis], *, is_dense: bool = False) -> tuple[Probe, ...]:
    """One probe for each kind on each axis, all groups of an axis at the same time.

    All ranks must measure the same ones: they make the same calls, and agree through the communicator how often.

    Args:
        communicator: between the ranks.
        axes: groups to measure.
        is_dense: at many sizes, instead of the 4 that a plan can wait for.
    """
    sizes = (_DENSE if is_dense else _QUICK)["cuda" if communicator.device.type == "cuda" else "cpu"]
    measure = partial(_measure, cache(partial(Moment.of, communicator)))
    return probes_between_ranks(communicator, "collective", COLLECTIVES, axes, sizes, measure, share=_SHARE)


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

    `measure` takes communicator, kind, axis, sizes and the seconds to spend; `share` is that of a point.
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
    get_moment: Callable[[], Moment],
    communicator: Collectives,
    kind: str,
    axis: Axis,
    sizes: tuple[int, ...],
    budget_s: float,
) -> Iterator[Measurement]:
    starts = [start_collective(communicator, kind, axis, num_elements) for num_elements in sizes]
    # A send is one of several passes; the slowest counts.
    slice_s = budget_s / len(starts[0])
    passes = [times_behind(get_moment(), communicator, each, slice_s) for each in zip(*starts, strict=True)]
    key = f"collective/{kind}/{axis.size}/{axis.stride}"
    for num_elements, found in zip(sizes, zip(*passes, strict=True), strict=True):
        slowest = max((behind.taken for behind in found), key=lambda sample: sample.seconds)
        yield Measurement(key, num_bytes_of(axis, num_elements), slowest)


def num_bytes_of(axis: Axis, num_elements: int) -> float:
    """Bytes of the buffers of `start_collective`, on their larger side."""
    return 4.0 * _round_up(num_elements, axis.size**2)


def start_collective(
    communicator: Collectives, kind: str, axis: Axis, num_elements: int
) -> tuple[Callable[[], Waitable | None], ...]:
    """What starts a collective over `num_elements` float32; for a send two: from even to odd coordinates, and back on.

    As between stages, each coordinate sends to the next.  To send all at once would let a rank's send wait for its own
    receive on backends that do one after the other.  Gathered and scattered is the second dim: what most collectives of
    a program do (of sequences, of parameters that travel together), with the copies that this takes.
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
    """Coordinates `first`, `first` + 2, ... each send to the next; None on a rank that has no part in it."""
    coordinate = axis.coordinate(communicator.rank)
    if coordinate % 2 == first and coordinate + 1 < axis.size:
        return communicator.start_send(x, axis, coordinate + 1)
    if coordinate % 2 != first and coordinate > 0:
        return communicator.start_receive(tuple(x.shape), x.dtype, axis, coordinate - 1)
    return None


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


@dataclass(frozen=True)
class Moment:
    """Computing for a moment, the same on all ranks; on a GPU, where another stream computes, nothing.

    Args:
        run: computes; so many times.
        own_s: seconds that a rank's thread works for it, once.
        crowding: how many ranks share a core.
        lengths: how many times in one call after the other, the same on all ranks.
    """

    run: Callable[[int], object]
    own_s: float
    crowding: float
    lengths: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, communicator: Collectives) -> Moment:
        """One for these ranks; all of them call it."""
        if communicator.device.type != "cpu":
            return cls(lambda times: None, 0.0, 1.0)
        crowding = crowding_of(communicator)
        x = torch.ones((_WIDTH, _WIDTH))
        out = torch.empty_like(x)
        [one_s] = max_over_ranks(communicator, [min(_own_times(lambda: torch.mm(x, x, out=out)))])
        length_s = _PART_S if crowding > 1.0 else _MOMENT_S
        count = max(1, round(length_s / one_s))

        def run(times: int) -> None:
            for _ in range(count * times):
                torch.mm(x, x, out=out)

        own_s = 0.0
        for _ in range(_TRIES):
            own_s = _mean_over_ranks(communicator, median_of(_own_times(lambda: run(1))).seconds)
            if own_s < _DISTURBED * max(length_s, one_s):
                break
        return cls(run, own_s, crowding, _PARTS if crowding > 1.0 else (1,))


def crowding_of(communicator: Ranks) -> float:
    """Threads of the ranks that run on this machine over its cores, at least 1, as `ClusterPrices.crowding`; 1 on a
    GPU."""
    if communicator.device.type != "cpu":
        return 1.0
    names = torch.zeros(communicator.world_size, dtype=torch.float64)
    names[communicator.rank] = mine = zlib.crc32(platform.node().encode())
    here = communicator.all_reduce(names, Axis(communicator.world_size, 1), "max") == mine
    return max(1.0, int(here.sum()) * torch.get_num_threads() / (os.cpu_count() or 1))


def _own_times(run: Callable[[], object]) -> list[float]:
    times: list[float] = []
    for _ in range(_NUM_ALONE):
        started = time.thread_time()
        run()
        times.append(time.thread_time() - started)
    return times


@dataclass(frozen=True)
class Behind:
    """A collective behind a moment.

    Args:
        taken: seconds by which it makes the moment longer.
        worked_s: seconds that all threads of a rank work for it, on average over ranks.
    """

    taken: Sample
    worked_s: float


def times_behind(
    moment: Moment, communicator: Collectives, starts: Sequence[Callable[[], Waitable | None]], budget_s: float
) -> list[Behind]:
    """Run each collective behind `moment`, one after the other, time and again, as often on every rank."""
    trials = _trials(moment, communicator, starts, budget_s)
    worked_s = [_mean_over_ranks(communicator, statistics.fmean(each.worked_s for each in own)) for own in trials]
    passed = [[each.passed_s for each in own] for own in trials]
    if moment.crowding <= 1.0:
        return [Behind(mean_of(own), each_s) for own, each_s in zip(passed, worked_s, strict=True)]
    busy_s = [moment.crowding * each_s for each_s in worked_s]
    # Not without the slowest: what threads of other ranks work comes in whichever call.  Of all ranks: groups that
    # measure side by side take cores from each other.
    idle = [passed_s - each_s for own, each_s in zip(passed, busy_s, strict=True) for passed_s in own]
    idle_s = _mean_over_ranks(communicator, statistics.fmean(idle))
    low_s, _, high_s = statistics.quantiles(idle, n=4)
    error_s = (high_s - low_s) / math.sqrt(len(idle))
    total_s = [max(LEAST_S, each_s + idle_s) for each_s in busy_s]
    return [Behind(Sample(all_s, error_s / all_s), each_s) for all_s, each_s in zip(total_s, worked_s, strict=True)]


@dataclass(frozen=True)
class _Trial:
    """By how many seconds a collective made a moment longer, and those that all threads of this process worked for it;
    whether nothing else came between."""

    passed_s: float
    worked_s: float
    is_calm: bool


def _trials(
    moment: Moment, communicator: Collectives, starts: Sequence[Callable[[], Waitable | None]], budget_s: float
) -> list[list[_Trial]]:
    """Of each collective; without those that were disturbed, and done again if most were.

    Ranks stay in step all the while: those that leave a meeting first would count what the others need to follow.
    """
    device = communicator.device
    is_cpu = device.type == "cpu"
    lengths = itertools.cycle(moment.lengths)

    def trial(start: Callable[[], Waitable | None], longest_s: float = math.inf) -> _Trial:
        length = next(lengths)
        usual_s = moment.own_s * length
        process_s, thread_s, own_s = time.process_time(), time.thread_time(), 0.0

        def both() -> None:
            nonlocal own_s
            moment.run(length)
            own_s = time.thread_time() - thread_s
            run_to_end(start)

        passed_s = elapsed_s(both, device)
        worked_s = time.process_time() - process_s - usual_s
        is_calm = not is_cpu or own_s < _DISTURBED * usual_s
        return _Trial(passed_s - usual_s * moment.crowding, worked_s, is_calm and passed_s < longest_s)

    for start in starts:
        trial(start)
    moment_s = moment.own_s * moment.crowding * max(moment.lengths)
    slowest = max_over_ranks(communicator, [trial(start).passed_s + moment_s for start in starts])
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, int(budget_s / max(sum(slowest), 1e-9))))
    found: list[list[_Trial]] = [[] for _ in starts]
    for _ in range(_TRIES):
        for start in starts:
            trial(start)
        for _ in range(repeats):
            for own, start, slowest_s in zip(found, starts, slowest, strict=True):
                own.append(trial(start, _STOPPED * slowest_s))
        calm = [[each for each in own if each.is_calm] for own in found]
        [missing] = max_over_ranks(communicator, [repeats / 2 - min(map(len, calm))])
        if missing <= 0:
            return calm
    return found


def run_to_end(start: Callable[[], Waitable | None]) -> None:
    """Start what `start_collective` gave, and wait for it."""
    under_way = start()
    if under_way is not None:
        under_way.wait()


def max_over_ranks(communicator: Ranks, numbers: list[float]) -> list[float]:
    """The largest over all ranks of each of `numbers`; every rank gets the same."""
    if communicator.world_size == 1 or not numbers:
        return numbers
    mine = torch.tensor(numbers, dtype=torch.float64, device=communicator.device)
    largest = communicator.all_reduce(mine, Axis(communicator.world_size, 1), "max")
    return [float(number) for number in largest]


def _mean_over_ranks(communicator: Ranks, number: float) -> float:
    mine = torch.tensor(number, dtype=torch.float64, device=communicator.device)
    return float(communicator.all_reduce(mine, Axis(communicator.world_size, 1))) / communicator.world_size


def share_text(communicator: Ranks, make: Callable[[], str]) -> str:
    """What rank 0's `make` gives, on every rank.

    Raises:
        ProfileError: on every rank, if `make` raised on rank 0.
    """
    text, cause = "", None
    if communicator.rank == 0:
        try:
            text = json.dumps({"text": make()})
        except Exception as error:  # noqa: BLE001  (whatever it is, the others must not wait for rank 0)
            text, cause = json.dumps({"error": f"{error}"}), error
    shared = json.loads(_share(communicator, text))
    if "error" in shared:
        raise ProfileError(shared["error"]) from cause
    return shared["text"]


def _share(communicator: Ranks, text: str) -> str:
    data = text.encode() if communicator.rank == 0 else b""
    length = int(max_over_ranks(communicator, [float(len(data))])[0])
    codes = [float(code) for code in data] or [0.0] * length
    return bytes(int(code) for code in max_over_ranks(communicator, codes)).decode()
