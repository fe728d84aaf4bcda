"""Lower bounds on the step time of a pipeline, which rule it out before its candidates are made.

Known of each layer is the least time that it takes on one device group.  A microbatch goes through all layers and back,
one after the other.  And the groups of a schedule work one after the other on a microbatch: group g begins when the
stages before its first have let one microbatch through, and (unless backward passes are split) ends as much before the
last of them as their backward takes.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt

from autopar.schedules import Shape

__all__ = ["least_step_s"]

Array = npt.NDArray[np.float64]

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


def _least_in_turn_s(shape: Shape, total_s: Array) -> float:
    """With one stage per group: over all cuts, the least of the longest group, by dynamic programming."""
    before = np.concatenate([[0.0], np.cumsum(total_s)])
    # [start, stop]: the wait for the stages before, and the stage's own work.
    took = before[:-1, None] / shape.num_microbatches + before[None, 1:] - before[:-1, None]
    took[np.tril_indices(len(total_s), -1)] = np.inf
    longest = took[0]
    for _ in range(shape.num_groups - 1):
        ahead = np.concatenate([[np.inf], longest[:-1]])
        longest = np.maximum(ahead[:, None], took).min(axis=0)
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
