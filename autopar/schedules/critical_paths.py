"""Paths through a step of a schedule: chains of actions, each of which waits for the previous one.

For any costs of the stages, a step takes as long as its longest chain
(`autopar.schedules.action_lists.simulate_schedule`).  So each chain is a lower bound on the step that is linear in the
seconds of the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.schedules.action_lists import COMPUTE, COSTS, REACH, ScheduleActions, StageCost, seconds_of, wire
from autopar.schedules.packing import Packing

__all__ = ["SchedulePaths", "moments", "schedule_paths"]

Array = npt.NDArray[np.float64]

# Searches for longer chains, each of which costs as much as simulating the schedule: the fewest, which large schedules
# get; the most; nodes visited in all of them together (150,000 are about 0.1 s); and how many there are for each linear
# program, which costs as much as several.  Of 405B on 512 devices with 64 stages in 16 to 64 microbatches, bounds by
# the second kind are 1 to 2 % higher.
_ROUNDS = ((4, 24, 150_000, 1), (24, 120, 1_000_000, 20))
_AIM = 0.3  # where between the least that the chains so far allow and the shortest step so far the next is hoped for
_LEAST_SHARE = 1e-4  # of a stage
_TOLERANCE = 1e-3  # relative: smaller gains of a bound are not worth another chain
# Kind of action -> changes of the numbers of microbatches between forward and backward, and between I and W.
_CHANGES = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
_TIE = 1e-3  # weight of all stages in the choice of a stage's moment: breaks ties, and is too small to change it


class SchedulePaths(NamedTuple):
    """Chains of actions of a schedule.

    Args:
        counts: ``[path, stage, cost]``: how many F, B, I, W, SEND_F, SEND_B of each stage the path has.
        group: for each path, the device group that runs most of its actions.
        begins: for each path, the device group on which it begins.
    """

    counts: Array
    group: npt.NDArray[np.intp]
    begins: npt.NDArray[np.intp]


class _DependencyGraph(NamedTuple):
    """The dependency graph of a schedule, whose nodes are computing actions and transfers in topological order.

    Args:
        costs: the cost of each node, as in an event of `action_lists.Wiring`.
        inputs: the nodes that each node waits for.
        readers: the nodes that wait for each node.
        computed: for each device group, the nodes that it computes, in order.
    """

    costs: list[int]
    inputs: list[tuple[int, ...]]
    readers: list[list[int]]
    computed: list[list[int]]


@lru_cache(maxsize=64)
def schedule_paths(
    actions: ScheduleActions, num_stages: int, *, splits: bool = True, is_thorough: bool = False
) -> SchedulePaths:
    """Chains whose longest one is a good lower bound for many distributions of work over the stages.

    For each stage they include the longest chain to its first forward that then stays on its device group, the one that
    stays there up to its last backward, and the longest ones through either of these actions.  Further ones are the
    longest chains where work is distributed over the stages as is best by the chains so far; and those that begin with
    the first action of a device group, which may wait for something else than other groups (its parameters).

    Args:
        actions: the schedule.
        num_stages: its stages.
        splits: whether layers split their backward where the schedule does; else all of it is in I, as of compiled
            layers, and W takes no time.  All chains hold whatever layers take, but few are the longest for both.
        is_thorough: whether to look for more of them, which takes up to ten times as long.
    """
    graph = _build_graph(actions)
    # A backward takes twice the forward, half of it for parameters, and sends take almost no time.
    cost_s = seconds_of(StageCost(1.0, 2.0, 1.0 if splits else 0.0, 1e-6, 1e-6))
    node_s = [cost_s[cost % len(COSTS)] for cost in graph.costs]
    previous, following = _longest(node_s, graph.inputs)[0], _longest_onwards(node_s, graph.readers)
    chains: set[bytes] = set()
    alone: list[Array] = []
    for nodes in graph.computed:
        for first, last in _ends_of_stages(graph, nodes):
            on_group = nodes[nodes.index(first) :], nodes[: nodes.index(last) + 1]
            for middle in (*on_group, [first], [last]):
                chain = [*_follow(previous, middle[0]), *middle, *_follow(following, middle[-1])]
                chains.add(_count(graph, chain, num_stages).tobytes())
        last = max(nodes.index(last) for _, last in _ends_of_stages(graph, nodes))
        for middle in (nodes[:1], nodes[: last + 1]):
            alone.append(_count(graph, [*middle, *_follow(following, middle[-1])], num_stages))
    counts = np.stack([np.frombuffer(chain) for chain in sorted(chains)]).reshape(-1, num_stages, len(COSTS))
    fewest, most, num_nodes, in_program = _ROUNDS[is_thorough]
    rounds = max(fewest, min(most, num_nodes // len(graph.costs)))
    counts = _with_longest(graph, counts, np.array(cost_s), rounds, in_program)
    begins = np.concatenate([np.full(len(counts), _first_group(graph)), np.repeat(np.arange(len(actions)), 2)])
    counts = np.concatenate([counts, np.stack(alone).reshape(-1, num_stages, len(COSTS))])
    work = np.zeros((len(counts), len(actions)))
    for group, group_actions in enumerate(actions):
        stages = sorted({action.stage for action in group_actions})
        work[:, group] = counts[:, stages, : COSTS["W"] + 1].sum(axis=(1, 2))
    return SchedulePaths(counts, work.argmax(axis=1), begins)


@lru_cache(maxsize=64)
def moments(actions: ScheduleActions, num_stages: int) -> Array:
    """The moments of a step in which a device group, or one of its stages, has the most microbatches in flight.

    Returns ``[moment, stage, 2]``: how many microbatches of each stage of the group are between forward and backward,
    and how many are between the two parts of a split backward.
    """
    results: dict[bytes, Array] = {}
    for group_actions in actions:
        stages = sorted({action.stage for action in group_actions})
        now = np.zeros((num_stages, 2))
        most = dict.fromkeys((-1, *stages), -1.0)  # -1: all stages together
        best = dict.fromkeys(most, now)
        for stage, kind, _ in group_actions:
            if kind not in _CHANGES:
                continue
            now[stage] += _CHANGES[kind]
            for key in (-1, stage):
                total = float(now.sum()) if key < 0 else float(now[key].sum()) + _TIE * float(now.sum())
                if total > most[key]:
                    most[key], best[key] = total, now.copy()
        results.update({moment.tobytes(): moment for moment in best.values()})
    return np.stack(list(results.values()))


def _build_graph(actions: ScheduleActions) -> _DependencyGraph:
    wiring = wire(actions)
    graph = _DependencyGraph([], [], [], [[] for _ in range(wiring.num_groups)])
    links: list[int] = [-1] * wiring.num_links  # the last transfer over each link
    reached = [-1] * (wiring.num_actions + 1)  # SEND or RECV -> the last node of its group before it
    arrived = [-1] * (wiring.num_actions + 1)  # RECV -> the node of the transfer
    for event, index, actor, cost, read in wiring.events:
        node = len(graph.costs)
        if event == REACH:
            reached[index] = graph.computed[actor][-1] if graph.computed[actor] else -1
            continue
        if event == COMPUTE:
            inputs = (graph.computed[actor][-1] if graph.computed[actor] else -1, arrived[read])
            graph.computed[actor].append(node)
        else:
            inputs = (reached[index], reached[read], links[actor])
            links[actor] = arrived[index] = node
        graph.costs.append(cost)
        graph.inputs.append(tuple(dict.fromkeys(source for source in inputs if source >= 0)))
        graph.readers.append([])
        for source in graph.inputs[-1]:
            graph.readers[source].append(node)
    return graph


def _with_longest(graph: _DependencyGraph, counts: Array, cost_s: Array, rounds: int, in_program: int) -> Array:
    """The chains, and the longest ones where work is distributed so that the longest chain is nearly the shortest.

    The best shares for the chains so far jump between extremes, so each linear program is followed halfway; between two
    of them work is moved off the longest chain, in steps of Polyak's length for subgradients.
    """
    num_stages = counts.shape[1]
    stages, kinds = (np.array(graph.costs) // len(COSTS)), (np.array(graph.costs) % len(COSTS))
    shares = best_shares = np.full(num_stages, 1 / num_stages)
    least_s, best_s = 0.0, np.inf
    sums_s = counts @ cost_s
    program = Packing(sums_s, np.ones(len(counts)))
    for number in range(rounds):
        is_program = number % in_program == 0
        if is_program:
            amounts = program.solve()[0]
            least_s, shares = 1 / float(amounts.sum()), (amounts / amounts.sum() + best_shares) / 2
        chain, length_s = _longest_chain(graph, (shares[stages] * cost_s[kinds]).tolist())
        if length_s < best_s:
            best_shares, best_s = shares, length_s
        own = _count(graph, chain, num_stages).reshape(1, num_stages, -1)
        own_s = own[0] @ cost_s
        if length_s > float((sums_s @ shares).max()) * (1 + _TOLERANCE):
            counts, sums_s = np.concatenate([counts, own]), np.vstack([sums_s, own_s])
            program.add_limit(own_s, 1.0)
        elif is_program and np.abs(shares - best_shares).max() < _TOLERANCE:
            break
        slope_s = own_s - float(own_s.mean())
        if slope_s.any():
            step = (length_s - least_s - _AIM * (best_s - least_s)) / float(slope_s @ slope_s)
            shares = np.maximum(shares - step * slope_s, _LEAST_SHARE)
            shares /= shares.sum()
    return counts


def _first_group(graph: _DependencyGraph) -> int:
    """The device group that waits for no other before its first action, on which every longest chain begins."""
    return next(group for group, nodes in enumerate(graph.computed) if not graph.inputs[nodes[0]])


def _longest_chain(graph: _DependencyGraph, node_s: Sequence[float]) -> tuple[list[int], float]:
    """The longest chain and its length in seconds."""
    previous, total_s = _longest(node_s, graph.inputs)
    last = total_s.index(max(total_s))
    return [last, *_follow(previous, last)], total_s[last]


def _ends_of_stages(graph: _DependencyGraph, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """The first forward and the last backward of each stage of the device group that computes `nodes`."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in nodes:
        stage, kind = divmod(graph.costs[node], len(COSTS))
        if kind == COSTS["F"]:
            first.setdefault(stage, node)
        if kind != COSTS["W"]:
            last[stage] = node
    return [(node, last[stage]) for stage, node in first.items()]


def _longest(node_s: Sequence[float], inputs: Sequence[Sequence[int]]) -> tuple[list[int], list[float]]:
    """For each node, its predecessor on the longest chain that ends in it (-1: none), and the length of that chain."""
    total_s: list[float] = []
    previous: list[int] = []
    for seconds, nodes in zip(node_s, inputs, strict=True):  # 100,000 iterations in a large search: no calls in here
        best, best_s = -1, 0.0
        for node in nodes:
            if best < 0 or total_s[node] > best_s:
                best, best_s = node, total_s[node]
        previous.append(best)
        total_s.append(seconds + best_s)
    return previous, total_s


def _longest_onwards(node_s: Sequence[float], readers: Sequence[Sequence[int]]) -> list[int]:
    """For each node, its successor on the longest chain that starts from it (-1: none)."""
    last = len(node_s) - 1
    reversed_readers = [[last - node for node in nodes] for nodes in reversed(readers)]
    return [last - node if node >= 0 else -1 for node in reversed(_longest(node_s[::-1], reversed_readers)[0])]


def _follow(links: Sequence[int], node: int) -> Iterator[int]:
    """The nodes of the chain that starts at `node`, without `node` itself."""
    while links[node] >= 0:
        node = links[node]
        yield node


def _count(graph: _DependencyGraph, chain: Iterable[int], num_stages: int) -> Array:
    return np.bincount([graph.costs[node] for node in chain], minlength=num_stages * len(COSTS)).astype(np.float64)
