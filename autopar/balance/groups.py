"""Groups of devices of several degrees for one batch: a few large ones for long sequences, many small ones for short.

Degrees divide each other, so that groups of falling degree lie side by side without crossing a larger one's borders.
For a target time each sequence needs some least degree; the largest go first, each degree gets as many groups as its
sequences fill, what is left in them goes to shorter sequences, and what is left of the devices becomes groups as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.balance.costs import GroupCost
from autopar.balance.exact import FEW, improve_exactly
from autopar.balance.packing import Packed, Places, even_out, longest_first

__all__ = ["Groups", "best_groups", "candidate_counts", "devices_bound"]

# Targets above the bound, the first of which that can be met is most often the best.
_TARGETS = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0)
_PLACES_TRIED = 5e7  # sequences times groups, in all trials: about a tenth of a second
_EVENED = 6  # of the trials: it takes longer than all else, and what is slower before is rarely the best after
_FEW_DEVICES = 8  # of which there are at most ten ways to form groups of 1, 2, 4 and 8


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of devices and the sequences of each.

    Args:
        degrees: ``[groups]`` the number of devices of each group, in falling order.
        packed: which group has which sequence, in which microbatch.
        microbatches: of each group, empty ones included.
        fixed_s: seconds of the step that don't depend on its sequences, the microbatches included.
        bound_s: a lower bound on the seconds of the group with the most work, for any groups.
        is_exact: whether no groups have a shorter step.
    """

    degrees: np.ndarray
    packed: Packed
    microbatches: int
    fixed_s: float
    bound_s: float
    is_exact: bool

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.packed.most_s + self.fixed_s


def devices_bound(work: np.ndarray, degrees: np.ndarray, devices: int) -> float:
    """No groups have less than this as the most work: of `work` ``[degrees, n]`` in seconds of groups, the mean over
    devices where each sequence is where it is cheapest, and the largest where it is fastest.
    """
    if not work.shape[1]:
        return 0.0
    return max(float((work * degrees[:, None]).min(axis=0).sum()) / devices, float(work.min(axis=0).max()))


def best_groups(costs: Sequence[GroupCost], devices: int, tokens: np.ndarray) -> Groups:
    """The groups with the shortest step found: the seconds of the group with the most work, and `Groups.fixed_s`.

    Every sequence fits in a group of the largest degree.
    """
    costs = sorted(costs, key=lambda cost: -cost.degree)
    degrees = np.array([cost.degree for cost in costs])
    work = np.array([np.where(tokens <= cost.tokens, cost.seconds(tokens), np.inf) for cost in costs])
    bound_s = devices_bound(work, degrees, devices)
    trials = sorted(_trials(costs, devices, tokens, work), key=lambda trial: trial.step_s)
    best = trials[0]  # groups of the largest degree alone are one
    for trial in trials[:_EVENED]:
        packed = even_out(trial.places, trial.packed, bound_s)
        best = min(best, _GroupTrial(trial.places, packed, trial.fixed_s), key=lambda each: each.step_s)
    places, packed, is_exact = best.places, best.packed, False
    is_work_alone = len({cost.step_s for cost in costs}) == 1 and not any(cost.microbatch_s for cost in costs)
    if len(tokens) <= FEW and devices <= _FEW_DEVICES and is_work_alone:
        places, packed, is_exact = _best_of_all(places, packed, degrees, devices)
    return Groups(degrees[places.kind], packed, places.rows, best.fixed_s, bound_s, is_exact)


def _trials(costs: Sequence[GroupCost], devices: int, tokens: np.ndarray, work: np.ndarray) -> Iterator[_GroupTrial]:
    """Groups with as many microbatches as could be worth it, fewer ones first; `costs` by falling degree."""
    degrees = np.array([cost.degree for cost in costs])
    best_s = np.inf
    spent = 0
    for counts in candidate_counts(work, degrees, devices):
        kind = np.repeat(np.arange(len(costs)), counts)
        used = sorted(set(kind.tolist()))
        least_s = devices_bound(work[used], degrees[used], devices)
        for rows, room, fixed_s in _microbatches([costs[int(index)] for index in kind], tokens):
            if least_s + fixed_s >= best_s or (best_s < np.inf and spent + len(kind) * len(tokens) > _PLACES_TRIED):
                break
            spent += len(kind) * len(tokens)
            places = Places(kind, rows, room, tokens, work)
            packed = longest_first(places)
            if packed is not None:
                trial = _GroupTrial(places, packed, fixed_s)
                best_s = min(best_s, trial.step_s)
                yield trial


@dataclass(frozen=True, eq=False)
class _GroupTrial:
    places: Places
    packed: Packed
    fixed_s: float

    @property
    def step_s(self) -> float:
        return self.packed.most_s + self.fixed_s


def _microbatches(groups: Sequence[GroupCost], tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray, float]]:
    """Numbers of microbatches from what tokens need at least to one for each sequence, the ``[groups]`` room of one,
    and seconds of a step that don't depend on its sequences: those of the slowest group.

    One without a limit of its room stands for all numbers where a microbatch costs nothing.
    """
    step_s, microbatch_s = (max(getattr(cost, what) for cost in groups) for what in ("step_s", "microbatch_s"))
    if not microbatch_s:
        yield 1, np.full(len(groups), np.inf), step_s
        return
    room = np.array([float(cost.tokens) for cost in groups])
    least = max(1, math.ceil(float(tokens.sum() / room.sum())))
    for count in range(least, max(least, len(tokens)) + 1):
        yield count, room, step_s + count * microbatch_s


def candidate_counts(work: np.ndarray, degrees: np.ndarray, devices: int) -> Iterator[tuple[int, ...]]:
    """How many groups of each degree, which fall, there could be, each way once: first those that would be done soon
    if work could be cut, then of few devices all others; `work` as in `devices_bound`.
    """
    likely = _candidates(work, degrees, devices, devices_bound(work, degrees, devices))
    others = _all_counts(tuple(int(degree) for degree in degrees), devices) if devices <= _FEW_DEVICES else ()
    return iter(dict.fromkeys(itertools.chain(likely, others)))


def _candidates(work: np.ndarray, degrees: np.ndarray, devices: int, bound_s: float) -> Iterator[tuple[int, ...]]:
    """How many groups of each degree there could be."""
    for target in _TARGETS:
        yield from _for_target(work, degrees, devices, target * bound_s)
    for index, degree in enumerate(degrees):
        yield tuple(int(devices // degree) * (index == other) for other in range(len(degrees)))


def _for_target(work: np.ndarray, degrees: np.ndarray, devices: int, target_s: float) -> Iterator[tuple[int, ...]]:
    """The groups that would be done in `target_s` if work could be cut; none where there are too few devices."""
    if not target_s or np.any(work.min(axis=0) > target_s):
        return
    needed = (work <= target_s).cumsum(axis=0).max(axis=0) - 1  # the least degree that is fast enough: the last index
    counts: list[int] = []
    spare_s = 0.0  # device seconds left in groups of larger degree
    for index, degree in enumerate(degrees):
        needed_s = float(work[index][needed == index].sum()) * degree
        groups = max(0, int(np.ceil((needed_s - spare_s) / (degree * target_s) - 1e-9)))
        spare_s += groups * degree * target_s - needed_s
        counts.append(groups)
    free = devices - int(np.dot(counts, degrees))
    if free < 0:
        return
    for first in range(len(degrees)):
        filled, left = list(counts), free
        for index in range(first, len(degrees)):
            filled[index] += left // int(degrees[index])
            left %= int(degrees[index])
        yield tuple(filled)


def _best_of_all(places: Places, packed: Packed, degrees: np.ndarray, devices: int) -> tuple[Places, Packed, bool]:
    """The best over all ways to form groups, of few devices for few sequences."""
    is_exact = True
    for counts in _all_counts(tuple(int(degree) for degree in degrees), devices):
        other = Places(np.repeat(np.arange(len(degrees)), counts), 1, np.inf, places.tokens, places.work)
        # What is to be beaten is the best of any groups: `load` says no more of it than its maximum.
        start = Packed(packed.group, packed.row, packed.load, packed.left)
        improved, is_whole = improve_exactly(other, start)
        is_exact = is_exact and is_whole
        if improved is not start and improved is not None:
            places, packed = other, improved
    return places, packed, is_exact


def _all_counts(degrees: tuple[int, ...], devices: int) -> Iterator[tuple[int, ...]]:
    if len(degrees) == 1:
        yield (devices // degrees[0],)
        return
    for count in range(devices // degrees[0] + 1):
        for rest in _all_counts(degrees[1:], devices - count * degrees[0]):
            yield (count, *rest)
