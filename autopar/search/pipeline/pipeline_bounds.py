"""Lower bounds on the step time of a pipeline whose layers are whole.

Before candidates are made, the least time of each layer on one device group is known; later, what candidates take
within the memory of a group.  A microbatch goes through all layers and back,
one after the other.  And the groups of a schedule work one after the other on a microbatch: group g begins when the
stages before its first have let one microbatch through, and (unless backward passes are split) ends as much before the
last of them as their backward takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.schedules import Shape
from autopar.search.chain.cost_tables import CostTables

__all__ = ["least_step_s", "least_within_s"]

Array = npt.NDArray[np.float64]

# Of all layers' bytes, relative to all their seconds: that of the best bound is nearly met by one of these.
_PRICES = (0.0, *(2.0**power for power in range(-8, 9)))
_ROUNDING = 1e-9  # relative: sums of bytes that are equal but for that are equal
_MAX_CUTS = 2000  # so many ways to cut are all looked at: milliseconds, for a bound that may save a search of seconds


def least_step_s(shape: Shape, forward_s: Array, total_s: Array, *, splits: bool = True) -> float:
    """No pipeline of this shape is faster.

    Args:
        shape: the pipeline, wherever it is cut.
        forward_s: per layer the least seconds on one device group of the forwards of all microbatches.
        total_s: the same of forwards and backwards.
        splits: whether layers can split their backward, if the schedule does.
    """
    if shape.num_stages > len(total_s):
        return math.inf
    splits &= shape.record.splits_backward
    waits_s = (forward_s if splits else total_s) / shape.num_microbatches
    bound_s = max(float(waits_s.sum()), _mean_s(shape, waits_s, total_s))
    if shape.num_stages == shape.num_groups and not splits:
        return max(bound_s, _least_in_turn_s(shape, total_s))
    if math.comb(len(total_s) - 1, shape.num_stages - 1) > _MAX_CUTS:
        return bound_s
    return max(bound_s, _least_of_cuts_s(shape, waits_s, total_s))


def _mean_s(shape: Shape, waits_s: Array, total_s: Array) -> float:
    """The longest group takes no less than the mean of them; before the first stage of group g there are at least the
    first g layers.
    """
    groups = shape.num_groups
    before_s = np.cumsum(waits_s)[: groups - 1]
    return float(total_s.sum() + before_s.sum()) / groups


def least_within_s(tables: CostTables, shape: Shape) -> float:
    """No pipeline of this shape that fits is faster; 0 unless each group has one stage and splits no backward.

    With seconds ``m`` for the whole limit, layers of a stage that fit take no less than the least of their ``seconds +
    m * bytes / limit``, less ``m``, whatever ``m`` is.
    """
    splits = shape.record.splits_backward and tables.splits_backward
    if shape.num_stages != shape.num_groups or shape.num_stages > len(tables.layers) or splits:
        return 0.0
    count, kinds = tables.num_microbatches, list(tables.distinct_layers)
    layers = [kinds.index(id(layer)) for layer in tables.layers]
    distinct = tables.distinct_layers.values()
    both_s = [each.forward_s + each.backward_s for each in distinct]
    work_s = [count * both + each.step_s for both, each in zip(both_s, distinct, strict=True)]
    waits_s = np.array([float(both.min()) for both in both_s])[layers]
    transient = np.array([float(each.transient_bytes.min()) for each in distinct])[layers]
    largest = np.maximum.accumulate(np.triu(np.broadcast_to(transient, (len(layers),) * 2)), axis=1)
    left_bytes = tables.limit_bytes - largest  # [start, stop] for what persists
    before = np.concatenate([[0.0], np.cumsum(waits_s)])[:-1, None]
    by_flight: dict[int, Array] = {}
    for in_flight, _ in set(shape.flights):
        held = [each.static_bytes + in_flight * each.saved_bytes for each in distinct]
        own_s = _spans(np.array([float(each.min()) for each in work_s])[layers])
        if math.isfinite(tables.limit_bytes):
            least_bytes = _spans(np.array([float(each.min()) for each in held])[layers])
            scale = float(own_s[0, -1]) / max(float(least_bytes[0, -1]), 1.0)
            for price in (scale * each for each in _PRICES):
                priced = [float((seconds + price * size).min()) for seconds, size in zip(work_s, held, strict=True)]
                own_s = np.maximum(own_s, _spans(np.array(priced)[layers]) - price * left_bytes)
            own_s = np.where(least_bytes > left_bytes * (1 + _ROUNDING), np.inf, own_s)
        own_s[np.tril_indices(len(layers), -1)] = np.inf
        by_flight[in_flight] = before + own_s
    return _least_of_longest_s([by_flight[flight.in_flight] for flight in shape.flights])


def _spans(each: Array) -> Array:
    """``[start, stop]``: the sum of all from one layer to the other."""
    until = np.cumsum(each)
    return until - np.concatenate([[0.0], until[:-1]])[:, None]


def _least_in_turn_s(shape: Shape, total_s: Array) -> float:
    """With one stage per group: over all cuts, the least of the longest group."""
    before = np.concatenate([[0.0], np.cumsum(total_s)])
    # [start, stop]: the wait for the stages before, and the stage's own work.
    took = before[:-1, None] / shape.num_microbatches + _spans(total_s)
    took[np.tril_indices(len(total_s), -1)] = np.inf
    return _least_of_longest_s([took] * shape.num_groups)


def _least_of_longest_s(took: Sequence[Array]) -> float:
    """Over all cuts into stages, the least of the longest stage, by dynamic programming; for each stage what it takes
    by its first and its last layer.
    """
    longest = took[0][0]
    for own in took[1:]:
        ahead = np.concatenate([[np.inf], longest[:-1]])
        longest = np.maximum(ahead[:, None], own).min(axis=0)
    return float(longest[-1])


def _least_of_cuts_s(shape: Shape, waits_s: Array, total_s: Array) -> float:
    """As `_least_in_turn_s`, of few cuts and any schedule."""
    owner = shape.groups
    least = math.inf
    for cuts in itertools.combinations(range(1, len(total_s)), shape.num_stages - 1):
        starts = (0, *cuts)
        works, waits = (np.add.reduceat(each, starts).tolist() for each in (total_s, waits_s))
        longest = max(
            sum(waits[: owner.index(group)]) + sum(w for w, own in zip(works, owner, strict=True) if own == group)
            for group in range(shape.num_groups)
        )
        least = min(least, longest)
    return least
