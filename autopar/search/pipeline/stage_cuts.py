"""Where to cut layers into stages: dynamic programming over the layers.

A stage is estimated by the best of a few paths, restricted to its layers, that fits with its microbatches in flight;
between two paths that are neighbors in memory, as if its layers could be divided in any proportion.  With u the
seconds of a stage for one microbatch (what is done once per step shared out over them) the step takes about::

      (M - 1) * rounds * max over stages u + fill * sum over stages u

`fill` is what the schedule's list says of equal stages: 1 for GPipe and 1F1B; stages that take turns on a device group
fill and drain it faster.  As Alpa does, the largest u is a parameter, and for each bound on it the sum is minimized
exactly.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.schedules import Flight, Shape
from autopar.search.chain.cost_tables import CostTables

__all__ = ["PipelineCuts", "SpanCosts", "StageEstimates", "largest_first", "span_costs"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Bounds on the slowest stage, relative to the least possible: close to it where the best cuts are, and to three times
# as much for few microbatches, where the sum decides.
_SLACK = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)
# With many layers no stage is longer than this multiple of the mean: longer ones are never fast, and to look at all
# spans takes a time that grows with the square of the number of layers.
_WIDEST = 3.0
_FEW_LAYERS = 40


@dataclass(frozen=True)
class PipelineCuts:
    """A schedule with the layers cut into stages: `bounds` has the first layers of all stages, then the number of
    layers.
    """

    shape: Shape
    bounds: tuple[int, ...]

    def stages_of(self, group: int) -> tuple[tuple[int, int, Flight], ...]:
        """(first layer, one more than the last, microbatches in flight) of the stages of a device group."""
        stages = zip(itertools.pairwise(self.bounds), self.shape.flights, self.shape.groups, strict=True)
        return tuple((start, stop, flight) for (start, stop), flight, owner in stages if owner == group)


@dataclass(frozen=True, eq=False)
class SpanCosts:
    """What paths cost over spans of layers; paths come in the order of ever less memory.

    Args:
        paths: ``[path, layer]``, the candidate.
        sums: ``[4, path, layer + 1]``, running sums of: seconds of one microbatch with its share of what is done once
            per step, static bytes, saved bytes, bytes between the parts of a backward.
        largest: ``[path, first layer, width - 1]``, the largest transient of so many layers.
        tied_bytes: ``[first layer, width - 1]``, shared parameters that so many layers read.
    """

    paths: Indices
    sums: Array
    largest: Array
    tied_bytes: Array

    @property
    def num_layers(self) -> int:
        """Layers of the problem."""
        return self.paths.shape[1]

    @property
    def widest(self) -> int:
        """The most layers of a stage that are looked at."""
        return self.largest.shape[2]

    @property
    def seconds(self) -> Array:
        """``[path, first layer, width - 1]``: of one microbatch."""
        return self._over_spans(0)

    def size(self, flight: Flight, held_share: float) -> Array:
        """``[path, first layer, width - 1]``: bytes of a stage with such a share of so many microbatches in flight."""
        saved_bytes = flight.in_flight * self._over_spans(2) + (
            flight.split * self._over_spans(3) if flight.split else 0.0
        )
        return self._over_spans(1) + held_share * saved_bytes + self.largest + self.tied_bytes

    def _over_spans(self, which: int) -> Array:
        """A sum over so many layers, infinite behind the last one."""
        first = np.arange(self.num_layers)[:, None]
        stop = first + 1 + np.arange(self.widest)[None, :]
        total = self.sums[which][:, np.minimum(stop, self.num_layers)] - self.sums[which][:, first]
        return np.where(stop <= self.num_layers, total, np.inf)


def largest_first(tables: CostTables, paths: Indices) -> Indices:
    """The paths in the order of ever less memory, about as many microbatches being in flight as is usual."""
    _, static, saved, *_ = _along_paths(tables, paths)
    return paths[np.argsort(static.sum(axis=1) + saved.sum(axis=1) * tables.num_microbatches**0.5)[::-1]]


def span_costs(tables: CostTables, paths: Indices, num_stages: int) -> SpanCosts:
    """What these paths (`largest_first`) cost over all spans of layers that may be one of `num_stages` stages."""
    unit_s, static, saved, transient, split = _along_paths(tables, paths)
    num_layers = paths.shape[1]
    widest = num_layers - num_stages + 1
    if num_layers > _FEW_LAYERS:
        fastest: list[float] = [0.0, *np.cumsum(unit_s.min(axis=0)).tolist()]
        most_s = _WIDEST * fastest[-1] / num_stages
        reach = [bisect.bisect_left(fastest, before_s + most_s) - start for start, before_s in enumerate(fastest[:-1])]
        widest = min(widest, max(reach) + 1)
    sums = np.zeros((4, len(paths), num_layers + 1))
    np.cumsum(np.stack([unit_s, static, saved, split]), axis=2, out=sums[:, :, 1:])
    largest = np.full((len(paths), num_layers, widest), np.inf)
    running = transient
    for width in range(widest):
        if width:
            running = np.maximum(running[:, :-1], transient[:, width:])
        largest[:, : num_layers - width, width] = running
    return SpanCosts(paths, sums, largest, _tied_bytes(tables, num_layers, widest))


def _along_paths(tables: CostTables, paths: Indices) -> tuple[Array, Array, Array, Array, Array]:
    """``[path, layer]``: seconds of one microbatch with a share of the rest; static, saved, transient, split bytes."""
    unit_s, static, saved, transient, split = (np.zeros(paths.shape) for _ in range(5))
    for layer, costs in enumerate(tables.layers):
        rows = paths[:, layer]
        unit_s[:, layer] = tables.seconds(costs)[rows] / tables.num_microbatches
        static[:, layer] = costs.static_bytes[rows]
        saved[:, layer] = costs.saved_bytes[rows]
        transient[:, layer] = costs.transient_bytes[rows]
        split[:, layer] = costs.split_bytes[rows]
    for transfer in tables.all_transfers:
        source = tables.layers[transfer.producer].state_out[paths[:, transfer.producer]]
        target = tables.layers[transfer.reader].state_in[paths[:, transfer.reader]]
        unit_s[:, transfer.reader] += (transfer.forward_s + transfer.backward_s)[source, target]
    return unit_s, static, saved, transient, split


def _tied_bytes(tables: CostTables, num_layers: int, widest: int) -> Array:
    total_bytes = np.zeros((num_layers, widest))
    stop = np.arange(num_layers)[:, None] + np.arange(widest)[None, :]
    for tied in tables.tied:
        reads = np.zeros(num_layers + 1)
        reads[1:][list(tied.readers)] = 1
        total = np.cumsum(reads)
        total_bytes += tied.static_bytes * (total[np.minimum(stop + 1, num_layers)] > total[:num_layers, None])
    return total_bytes


@dataclass(frozen=True, eq=False)
class StageEstimates:
    """How long the stages of one shape take, wherever it is cut: estimates, until stages are solved.

    Args:
        shape: how it runs.
        num_microbatches: of a step.
        fill_share: as `Idle.fill_share`.
        seconds: ``[stage, first layer, width - 1]``, of one microbatch; infinite where a stage does not seem to fit.
        smallest_bytes: of the same stages, what they take at least.
        is_short_of_memory: whether with more memory some stages would seem faster.
    """

    shape: Shape
    num_microbatches: int
    fill_share: float
    seconds: Array
    smallest_bytes: Array
    is_short_of_memory: bool

    @classmethod
    def of(
        cls, tables: CostTables, spans: SpanCosts, shape: Shape, fill_share: float, held_share: float
    ) -> StageEstimates:
        """Those by the paths of `spans`; `held_share` is that of the group that has the largest."""
        flights, budget = shape.flights, tables.limit_bytes / (shape.num_stages // shape.num_groups)
        sizes = {flight: spans.size(flight, held_share) for flight in set(flights)}
        by_flight = {flight: _unit_seconds(spans, size, budget, tables.limit_bytes) for flight, size in sizes.items()}
        seconds = np.stack([by_flight[flight] for flight in flights])
        smallest = {flight: size.min(axis=0) for flight, size in sizes.items()}
        smallest_bytes = np.stack([smallest[f] for f in flights])
        is_short = bool((seconds > spans.seconds.min(axis=0)).any())
        return cls(shape, tables.num_microbatches, fill_share, seconds, smallest_bytes, is_short)

    def correct(
        self, tables: CostTables, cuts: PipelineCuts, path: Sequence[int], peaks_bytes: Sequence[float]
    ) -> None:
        """Stages take what the candidates of this path do, which were chosen for these cuts, and so do stages of the
        same layers elsewhere; those with fewer microbatches in flight take no longer.

        A stage that is alone on its device group is ruled out if its peak is above the limit.
        """
        unit_s = _along_paths(tables, np.array([path], dtype=np.intp))[0][0]
        layers, flights = [id(each) for each in tables.layers], self.shape.flights
        is_alone = self.shape.num_stages == self.shape.num_groups
        spans = itertools.pairwise(cuts.bounds)
        firsts_of: dict[tuple[int, ...], Indices] = {}
        for own, (start, stop), peak_bytes in zip(flights, spans, peaks_bytes, strict=True):
            seconds, width, fits = float(unit_s[start:stop].sum()), stop - start, peak_bytes <= tables.limit_bytes
            if not fits and not is_alone:
                continue
            if (kinds := tuple(layers[start:stop])) not in firsts_of:
                alike = [n for n in range(len(layers) - width + 1) if tuple(layers[n : n + width]) == kinds]
                firsts_of[kinds] = np.array(alike)
            of_width = self.seconds[:, :, width - 1]
            equal, fewer = self._stages_by_flight[own]
            of_width[np.ix_(equal, firsts_of[kinds])] = seconds if fits else np.inf
            if fits and len(fewer):
                places = np.ix_(fewer, firsts_of[kinds])
                of_width[places] = np.minimum(of_width[places], seconds)

    @cached_property
    def _stages_by_flight(self) -> dict[Flight, tuple[Indices, Indices]]:
        """The stages with as many microbatches in flight, and the others that have no more."""
        flights = self.shape.flights
        return {
            own: (
                np.array([stage for stage, each in enumerate(flights) if each == own], dtype=np.intp),
                np.array([stage for stage, each in enumerate(flights) if each != own and _has_no_more(each, own)],
                         dtype=np.intp),
            )
            for own in set(flights)
        }  # fmt: skip

    def ways_to_cut(self) -> list[tuple[float, PipelineCuts]]:
        """A few ways to cut with about how long a step takes, the one that seems fastest first.

        If nothing seems to fit, the one whose largest stage is smallest.
        """
        rounds = self.shape.num_stages // self.shape.num_groups
        least_s, _ = _divide(self.seconds, np.inf, sums=False)
        if not np.isfinite(least_s):
            return [(np.inf, PipelineCuts(self.shape, _divide(self.smallest_bytes, np.inf, sums=False)[1]))]
        step_s: dict[tuple[int, ...], float] = {}
        for slack in _SLACK:
            total_s, bounds = _divide(self.seconds, least_s * slack * (1 + 1e-9), sums=True)
            slowest_s = max(
                float(self.seconds[index, start, stop - start - 1])
                for index, (start, stop) in enumerate(itertools.pairwise(bounds))
            )
            step_s[bounds] = (self.num_microbatches - 1) * rounds * slowest_s + self.fill_share * total_s
        ranked = sorted(step_s.items(), key=lambda item: item[1])
        return [(value, PipelineCuts(self.shape, bounds)) for bounds, value in ranked]


def _has_no_more(flight: Flight, other: Flight) -> bool:
    return flight.in_flight <= other.in_flight and flight.split <= other.split


def _unit_seconds(spans: SpanCosts, size: Array, budget: float, limit_bytes: float) -> Array:
    """``[first layer, width - 1]``: the least seconds that seem to fit within a stage's share of the memory, `budget`.

    A layer that takes more by itself, as one with outputs for the caller may, takes from the shares of other stages.
    """
    seconds = spans.seconds
    least_s = np.where(size <= budget, seconds, np.inf).min(axis=0)
    if len(spans.paths) > 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = size[:-1] - size[1:]
            share = np.where((gap > 0) & (size[1:] <= budget), (budget - size[1:]) / gap, np.nan)
            between = seconds[1:] + np.clip(share, 0.0, 1.0) * (seconds[:-1] - seconds[1:])
        between[:, :, 0] = np.inf  # one layer can't be divided
        least_s = np.minimum(least_s, np.where(np.isfinite(between), between, np.inf).min(axis=0))
    smallest = size[:, :, 0].argmin(axis=0), np.arange(len(least_s)), 0
    is_alone = ~np.isfinite(least_s[:, 0]) & (size[smallest] <= limit_bytes)
    least_s[:, 0] = np.where(is_alone, seconds[smallest], least_s[:, 0])
    return least_s


def _divide(seconds: Array, bound: float, *, sums: bool) -> tuple[float, tuple[int, ...]]:
    """The least sum (or else maximum) over the stages, each at most `bound`, and the bounds that give it."""
    num_stages, num_layers, widest = seconds.shape
    allowed = np.where(seconds <= bound, seconds, np.inf)
    # By last layer and width: the cost of a stage that ends there, and its first layer.
    last, width = (grid.astype(np.intp) for grid in np.indices((num_layers, widest)))
    first = np.maximum(last - width, 0)
    is_inside = width <= last
    reached = np.full(num_layers + 1, np.inf)
    reached[0] = 0.0
    came: list[Indices] = []
    for stage in range(num_stages):
        own = np.where(is_inside, allowed[stage][first, width], np.inf)
        before = reached[first]
        total = before + own if sums else np.maximum(before, own)
        best = total.argmin(axis=1)
        came.append(best)
        reached = np.concatenate([[np.inf], total[np.arange(num_layers), best]])
    stop = num_layers
    bounds = [stop]
    for stage in reversed(range(num_stages)):
        stop -= 1 + int(came[stage][stop - 1])
        bounds.append(stop)
    return float(reached[-1]), tuple(reversed(bounds))
