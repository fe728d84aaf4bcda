"""Where to cut: dynamic programming over the layers, for the numbers that a pool of paths gives.

A stage is estimated by the best of the pool's paths, restricted to its layers, that fits with its microbatches in
flight; between two paths that are neighbours in the pool, as if its layers could be divided in any proportion.  With
u the seconds of a stage for one microbatch (what is done once per step shared out over them) the step takes about::

      (M - 1) * rounds * max over stages u + fill * sum over stages u

`fill` is 1 for GPipe and 1F1B; stages that take turns on a device group fill and drain it faster.  As Alpa does, the
largest u is a parameter, and for each bound on it the sum is minimised exactly.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.schedule import Shape
from autopar.search.stages.estimates import fill_share
from autopar.search.stages.problem import StageProblem

__all__ = ["Cut", "Pool", "choose_cuts", "make_pool"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_SLACK = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)  # bounds on the slowest stage, relative to the least possible
_WIDEST = 3.0  # no stage is longer than this share of the mean, unless there are few layers
_FEW = 40


@dataclass(frozen=True)
class Cut:
    """First layers of all stages and then the number of layers, and about how long a step takes."""

    bounds: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class Pool:
    """Paths in the order of ever less memory, and running sums over the layers of what they take.

    Args:
        paths: ``[path, layer]``, the candidate.
        sums: ``[3, path, layer + 1]``, running sums of: seconds of one microbatch with its share of what is done once
            per step, static bytes, saved bytes.
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

    def span(self, which: int) -> Array:
        """``[path, first layer, width - 1]``: a sum over so many layers, infinite behind the last one."""
        first = np.arange(self.num_layers)[:, None]
        stop = first + 1 + np.arange(self.widest)[None, :]
        found = self.sums[which][:, np.minimum(stop, self.num_layers)] - self.sums[which][:, first]
        return np.where(stop <= self.num_layers, found, np.inf)


def make_pool(problem: StageProblem, paths: Indices, num_stages: int) -> Pool:
    """What these paths take over all stretches of layers that may be one of `num_stages` stages."""
    unit_s, static, saved, transient = _along_paths(problem, paths)
    order: Indices = np.argsort(static.sum(axis=1) + saved.sum(axis=1) * problem.num_microbatches**0.5)[::-1]
    num_layers = paths.shape[1]
    widest = num_layers - num_stages + 1
    if num_layers > _FEW:
        fastest: list[float] = [0.0, *np.cumsum(unit_s.min(axis=0)).tolist()]
        most_s = _WIDEST * fastest[-1] / num_stages
        reach = [bisect.bisect_left(fastest, before_s + most_s) - start for start, before_s in enumerate(fastest[:-1])]
        widest = min(widest, max(reach) + 1)
    sums = np.zeros((3, len(paths), num_layers + 1))
    np.cumsum(np.stack([unit_s, static, saved])[:, order], axis=2, out=sums[:, :, 1:])
    largest = np.full((len(paths), num_layers, widest), np.inf)
    running = transient[order]
    for width in range(widest):
        if width:
            running = np.maximum(running[:, :-1], transient[order][:, width:])
        largest[:, : num_layers - width, width] = running
    return Pool(paths[order], sums, largest, _tied_bytes(problem, num_layers, widest))


def _along_paths(problem: StageProblem, paths: Indices) -> tuple[Array, Array, Array, Array]:
    """``[path, layer]``: seconds of one microbatch with its share of the rest; static, saved, transient bytes."""
    count = problem.num_microbatches
    unit_s, static, saved, transient = (np.zeros(paths.shape) for _ in range(4))
    for layer, table in enumerate(problem.tables):
        rows = paths[:, layer]
        unit_s[:, layer] = table.forward_s[rows] + table.backward_s[rows] + table.step_s[rows] / count
        static[:, layer] = table.static_bytes[rows]
        saved[:, layer] = table.saved_bytes[rows]
        transient[:, layer] = table.transient_bytes[rows]
    for move in (*problem.moves, *problem.skips):
        if move is not None:
            source = problem.tables[move.producer].state_out[paths[:, move.producer]]
            target = problem.tables[move.reader].state_in[paths[:, move.reader]]
            unit_s[:, move.reader] += (move.forward_s + move.backward_s)[source, target]
    return unit_s, static, saved, transient


def _tied_bytes(problem: StageProblem, num_layers: int, widest: int) -> Array:
    found = np.zeros((num_layers, widest))
    stop = np.arange(num_layers)[:, None] + np.arange(widest)[None, :]
    for tie in problem.ties:
        reads = np.zeros(num_layers + 1)
        reads[1:][list(tie.readers)] = 1
        total = np.cumsum(reads)
        found += tie.static_bytes * (total[np.minimum(stop + 1, num_layers)] > total[:num_layers, None])
    return found


def choose_cuts(
    problem: StageProblem, pool: Pool, shape: Shape, in_flight: tuple[int, ...], given: tuple[int, ...] = ()
) -> list[Cut]:
    """Ways to cut, the one that seems fastest first; only the given one if there is one.

    If nothing seems to fit, the one whose largest stage is smallest.
    """
    rounds = shape.num_stages // shape.num_groups
    budget = problem.limit_bytes / rounds
    by_flight = {count: _unit_seconds(pool, count, budget) for count in set(in_flight)}
    seconds = np.stack([by_flight[count] for count in in_flight])
    if given:
        bounds = (0, *given, pool.num_layers)
        return [Cut(bounds, 0.0)]
    least, _ = _divide(seconds, np.inf, sums=False)
    if not np.isfinite(least):
        sizes = np.stack([_sizes(pool, count).min(axis=0) for count in in_flight])
        return [Cut(_divide(sizes, np.inf, sums=False)[1], np.inf)]
    found: dict[tuple[int, ...], float] = {}
    for slack in _SLACK:
        total, bounds = _divide(seconds, least * slack * (1 + 1e-9), sums=True)
        slowest = max(
            float(seconds[index, start, stop - start - 1])
            for index, (start, stop) in enumerate(itertools.pairwise(bounds))
        )
        found[bounds] = (problem.num_microbatches - 1) * rounds * slowest + fill_share(shape) * total
    return [Cut(bounds, value) for bounds, value in sorted(found.items(), key=lambda item: item[1])]


def _unit_seconds(pool: Pool, in_flight: int, budget: float) -> Array:
    """``[first layer, width - 1]``: the least seconds that seem to fit."""
    seconds = pool.span(0)
    size = _sizes(pool, in_flight)
    found = np.where(size <= budget, seconds, np.inf).min(axis=0)
    if len(pool.paths) > 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = size[:-1] - size[1:]
            share = np.where((gap > 0) & (size[1:] <= budget), (budget - size[1:]) / gap, np.nan)
            between = seconds[1:] + np.clip(share, 0.0, 1.0) * (seconds[:-1] - seconds[1:])
        between[:, :, 0] = np.inf  # one layer can't be divided
        found = np.minimum(found, np.where(np.isfinite(between), between, np.inf).min(axis=0))
    return found


def _sizes(pool: Pool, in_flight: int) -> Array:
    """``[path, first layer, width - 1]``: bytes of a stage with so many microbatches in flight."""
    return pool.span(1) + in_flight * pool.span(2) + pool.largest + pool.tied_bytes


def _divide(seconds: Array, bound: float, *, sums: bool) -> tuple[float, tuple[int, ...]]:
    """The least sum (or else maximum) over the stages, each at most `bound`, and the bounds that give it."""
    num_stages, num_layers, widest = seconds.shape
    allowed = np.where(seconds <= bound, seconds, np.inf)
    # By last layer and width: what a stage that ends there takes, and where it began.
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
