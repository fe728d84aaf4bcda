"""Paths through a step of a schedule: chains of actions each of which waits for the one before it.

A step is never shorter than such a chain (`autopar.schedules.action_lists.simulate_schedule`), whatever the stages
cost, and as long as the longest of them.  So each is a lower bound on the step that is linear in the seconds of the
stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.schedules.action_lists import COMPUTE, COSTS, REACH, ScheduleActions, StageCost, seconds_of, wire
from autopar.schedules.packing import pack

__all__ = ["SchedulePaths", "moments", "schedule_paths"]

Array = npt.NDArray[np.float64]

# What the chains are the longest for: a backward that takes twice the forward, half of it for parameters, and sends
# that take next to nothing.
_USUAL = StageCost(1.0, 2.0, 1.0, 1e-6, 1e-6)


_ROUNDS = 24  # to find long chains: each costs as much as simulating the schedule
_FEW_ROUNDS = 4  # of large schedules: 20 more raised bounds of zbv of 64 stages by 0.5 %, of 1F1B of 32 by 1 %
_SOON_DONE = 150_000  # nodes of all rounds: about 0.1 s
_NEAR = 1e-3
_HOLDS = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
_TIE = 1e-3  # of two moments that are alike for one stage, the one that holds more in all


class SchedulePaths(NamedTuple):
    """Chains of actions of a schedule.

    Args:
        counts: ``[path, stage, cost]``: how often each stage's F, B, I, W, SEND_F, SEND_B is in it.
        group: per path, the device group that does most of it.
    """

    counts: Array
    group: npt.NDArray[np.intp]


class _Graph(NamedTuple):
    """Per node what it costs, as an index, the nodes it waits for and those that wait for it; per device group the
    nodes that it computes, in order.
    """

    costs: list[int]
    waits: list[tuple[int, ...]]
    readers: list[list[int]]
    own: list[list[int]]


@lru_cache(maxsize=64)
def schedule_paths(actions: ScheduleActions, num_stages: int) -> SchedulePaths:
    """Per stage the chains that come to its first forward as late as can be and then stay on its device group, those
    that stay there up to its last backward, and the longest ones through either; then the longest ones where work is
    shared out among the stages as is best by the chains so far.
    """
    graph = _graph_of(actions)
    usual_s = seconds_of(_USUAL)
    took = [usual_s[cost % len(COSTS)] for cost in graph.costs]
    ahead, behind = _longest(took, graph.waits)[0], _longest_behind(took, graph.readers)
    chains: set[bytes] = set()
    for nodes in graph.own:
        for first, last in _ends_of_stages(graph, nodes):
            stays = nodes[nodes.index(first) :], nodes[: nodes.index(last) + 1]
            for middle in (*stays, [first], [last]):
                chain = [*_follow(ahead, middle[0]), *middle, *_follow(behind, middle[-1])]
                chains.add(_count(graph, chain, num_stages).tobytes())
    counts = np.stack([np.frombuffer(each) for each in sorted(chains)]).reshape(-1, num_stages, len(COSTS))
    counts = _with_longest(graph, counts, np.array(usual_s))
    work = np.zeros((len(counts), len(actions)))
    for group, listed in enumerate(actions):
        own = sorted({action.stage for action in listed})
        work[:, group] = counts[:, own, : COSTS["W"] + 1].sum(axis=(1, 2))
    return SchedulePaths(counts, work.argmax(axis=1))


@lru_cache(maxsize=64)
def moments(actions: ScheduleActions, num_stages: int) -> Array:
    """``[moment, stage, 2]``: how many microbatches are between forward and backward, and how many between the two
    parts of a backward, of the stages of one device group: when most are, and when most are in each of its stages.
    """
    found: dict[bytes, Array] = {}
    for listed in actions:
        stages = sorted({action.stage for action in listed})
        now = np.zeros((num_stages, 2))
        most = dict.fromkeys((-1, *stages), -1.0)
        best = dict.fromkeys(most, now)
        for stage, kind, _ in listed:
            if kind not in _HOLDS:
                continue
            now[stage] += _HOLDS[kind]
            for which in (-1, stage):
                total = float(now.sum()) if which < 0 else float(now[which].sum()) + _TIE * float(now.sum())
                if total > most[which]:
                    most[which], best[which] = total, now.copy()
        found.update({each.tobytes(): each for each in best.values()})
    return np.stack(list(found.values()))


def _graph_of(actions: ScheduleActions) -> _Graph:
    """Computing actions and transfers, in an order in which each comes after what it waits for."""
    wiring = wire(actions)
    graph = _Graph([], [], [], [[] for _ in range(wiring.num_groups)])
    links: list[int] = [-1] * wiring.num_links
    reached = [-1] * (wiring.num_actions + 1)  # the last node of the group when it came to a SEND or RECV
    arrived = [-1] * (wiring.num_actions + 1)  # by RECV, the node of the transfer
    for event, index, actor, cost, read in wiring.events:
        node = len(graph.costs)
        if event == REACH:
            reached[index] = graph.own[actor][-1] if graph.own[actor] else -1
            continue
        if event == COMPUTE:
            waits = (graph.own[actor][-1] if graph.own[actor] else -1, arrived[read])
            graph.own[actor].append(node)
        else:
            waits = (reached[index], reached[read], links[actor])
            links[actor] = arrived[index] = node
        graph.costs.append(cost)
        graph.waits.append(tuple(dict.fromkeys(other for other in waits if other >= 0)))
        graph.readers.append([])
        for other in graph.waits[-1]:
            graph.readers[other].append(node)
    return graph


def _with_longest(graph: _Graph, counts: Array, usual_s: Array) -> Array:
    """The chains, and the longest ones of the shares of work for which those before are shortest."""
    num_stages = counts.shape[1]
    stages, kinds = (np.array(graph.costs) // len(COSTS)), (np.array(graph.costs) % len(COSTS))
    centre, least_s = np.full(num_stages, 1 / num_stages), np.inf
    for _ in range(max(_FEW_ROUNDS, min(_ROUNDS, _SOON_DONE // len(graph.costs)))):
        sums = counts @ usual_s
        shares, _ = pack(sums, np.ones(len(counts)))
        # Between the best by these chains and the best that was timed: from the ends alone it is a long way.
        shares = (shares / shares.sum() + centre) / 2
        chain, length_s = _critical(graph, (shares[stages] * usual_s[kinds]).tolist())
        if length_s < least_s:
            centre, least_s = shares, length_s
        if length_s <= float((sums @ shares).max()) * (1 + _NEAR):
            if np.abs(shares - centre).max() < _NEAR:
                break
            continue
        counts = np.concatenate([counts, _count(graph, chain, num_stages).reshape(1, num_stages, -1)])
    return counts


def _critical(graph: _Graph, took: Sequence[float]) -> tuple[list[int], float]:
    """The longest chain, and how long it is."""
    came, total = _longest(took, graph.waits)
    last = total.index(max(total))
    return [last, *_follow(came, last)], total[last]


def _ends_of_stages(graph: _Graph, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """For each stage of a device group, which computes these nodes, its first forward and its last backward."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in nodes:
        stage, kind = divmod(graph.costs[node], len(COSTS))
        if kind == COSTS["F"]:
            first.setdefault(stage, node)
        if kind != COSTS["W"]:
            last[stage] = node
    return [(node, last[stage]) for stage, node in first.items()]


def _longest(took: Sequence[float], waits: Sequence[Sequence[int]]) -> tuple[list[int], list[float]]:
    """Per node the one before it on the longest chain up to it (-1: none), and how long that chain is."""
    total: list[float] = []
    came: list[int] = []
    for own_s, nodes in zip(took, waits, strict=True):  # a hundred thousand times in a large search: no calls in here
        best, best_s = -1, 0.0
        for node in nodes:
            if best < 0 or total[node] > best_s:
                best, best_s = node, total[node]
        came.append(best)
        total.append(own_s + best_s)
    return came, total


def _longest_behind(took: Sequence[float], readers: Sequence[Sequence[int]]) -> list[int]:
    """As `_longest`, of the chain from each node on: the one behind it."""
    last = len(took) - 1
    turned = [[last - node for node in nodes] for nodes in reversed(readers)]
    return [last - node if node >= 0 else -1 for node in reversed(_longest(took[::-1], turned)[0])]


def _follow(came: Sequence[int], node: int) -> Iterator[int]:
    """The nodes of a chain without this one, with which it begins."""
    while came[node] >= 0:
        node = came[node]
        yield node


def _count(graph: _Graph, chain: Iterable[int], num_stages: int) -> Array:
    return np.bincount([graph.costs[node] for node in chain], minlength=num_stages * len(COSTS)).astype(np.float64)
