"""Which of a layer's tensors to keep for backward and which to compute again, for every price of memory.

Of the ops of a layer choose a set to rerun, such that every tensor that autograd saves is kept or made by one of them,
and so is all that these read.  At a price ``p`` of memory minimize::

    sum over rerun ops   forward seconds   +   p * sum over kept tensors   bytes

Both sums are cuts of one graph (`_minimum`), so its minimum cut is the exact optimum; prices from 0 to all give the
lower convex hull of (seconds, bytes).  It is found on the whole layer of one device: a sharding that divides all of it
alike changes no choice, and every choice is priced as it is sharded.

Where layers are compiled, ops have the seconds of their parts of kernels, and the tensors in question are those that
the compiler would keep: it computes others again by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx

from autopar.program import Layer, Op, Program
from autopar.step.activation_policies import can_rerun, rerun_policy_name
from autopar.step.costs.hull import HullPoint, follow_hull
from autopar.step.costs.op_seconds import op_seconds
from autopar.step.layer.local_layer import place_whole
from autopar.step.layer_tensors.fusion import fused_layer
from autopar.step.layer_tensors.tensor_graph import TensorGraph, TensorKey, TensorNode, tensor_graph
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec, own_training

__all__ = ["RerunChoice", "rerun_front", "spaced_choices"]

_networkx: Any = networkx  # it has no types

_MAX_CUTS = 12
"""A hull of a transformer's layer has 10 to 20 points; a cut takes about 10 ms."""

_UNIT_S = 1e-15
"""Of capacities, which are whole numbers: with rounded sums a cut may not be the least.  Ops take 1e-6 s and more."""


_SHARES = (0.7, 0.4, 0.15)
"""A search takes few points, because each is priced for every sharding; each saves about half of what is left."""


@dataclass(frozen=True)
class RerunChoice:
    """One point of the front.

    Args:
        policy: its name, for `LayerStrategy.recompute`.
        rerun_s: forward seconds of the ops that run again, of the whole layer on one device.
        kept_bytes: of the tensors that are kept, likewise.
    """

    policy: str
    rerun_s: float
    kept_bytes: float


def rerun_front(program: Program, layer: Layer, prices: Prices, training: TrainingSpec) -> tuple[RerunChoice, ...]:
    """The points of the lower convex hull of (seconds, bytes), from nothing rerun to all that can be.

    Args:
        program: that the layer is in.
        layer: the first of its kind.
        prices: of the devices.
        training: how it is trained.

    Returns:
        In order of seconds; of many points a part.  Nothing where no tensor is saved, or none can be computed again.

    Raises:
        MissingPriceError: an op has no price.
    """
    if not own_training(program, layer, training).reruns:
        return ()
    placed = place_whole(program, layer)
    times = op_seconds(placed, prices, training)
    seconds = {op.name: time.forward_s for op, time in zip(layer.ops, times, strict=True)}
    graph = tensor_graph(placed, fuses_attention=training.fuses_attention)
    saving = graph
    if training.compiled:
        saving = fused_layer(placed, fuses_attention=training.fuses_attention, is_training=True).graph
    saved = {key for node in saving.nodes for key in node.saves if key in graph.sizes}
    return _Hull(graph, seconds, saved).points()


def spaced_choices(front: tuple[RerunChoice, ...]) -> tuple[RerunChoice, ...]:
    """Some points of a front between its ends: those that keep nearest to `_SHARES` of what can be saved."""
    between = [choice for choice in front[1:-1] if choice.rerun_s > 0]
    if not between:
        return ()
    most, least = front[0].kept_bytes, front[-1].kept_bytes
    targets = [least + share * (most - least) for share in _SHARES]
    nearest = (min(between, key=lambda choice: abs(choice.kept_bytes - each)) for each in targets)
    return tuple(dict.fromkeys(nearest))


class _Hull:
    """The hull of one layer's choices."""

    def __init__(self, graph: TensorGraph, seconds: Mapping[str, float], saved: Set[TensorKey]) -> None:
        """`saved`: what is kept if nothing is computed again."""
        self.graph, self.seconds, self.saved = graph, seconds, saved
        self.maker: dict[TensorKey, Op | None] = {
            key: node.op for node in graph.nodes for key in node.makes if node.op is not None and can_rerun(node.op)
        }

    def points(self) -> tuple[RerunChoice, ...]:
        least_s = min((each for each in self.seconds.values() if each > 0), default=0.0)
        if not self.saved or not least_s:
            return ()
        dearest = 2 * sum(self.seconds.values())  # a byte costs more than all ops
        points = follow_hull(self._best_at, dearest, _MAX_CUTS)
        distinct = {point.num_bytes: point.choice for point in points.values()}
        return tuple(sorted(distinct.values(), key=lambda choice: (choice.rerun_s, -choice.kept_bytes)))

    def _best_at(self, price: float) -> HullPoint[RerunChoice]:
        choice = self._choice(self._minimum(price))
        return HullPoint(choice.rerun_s, choice.kept_bytes, choice)

    def _minimum(self, price: float) -> frozenset[str]:
        """The ops to rerun at this price of a byte."""
        flow = self._flow_network
        for _, _, edge in flow.edges(data=True):
            if "num_bytes" in edge:
                edge["capacity"] = round((price * edge["num_bytes"] + edge["seconds"]) / _UNIT_S)
        _, sides = _networkx.minimum_cut(
            flow, "source", "sink", flow_func=_networkx.algorithms.flow.shortest_augmenting_path
        )
        return frozenset(each for each in sides[0] if isinstance(each, str) and each != "source")

    @cached_property
    def _flow_network(self) -> Any:
        """The graph to cut: what an edge costs is ``num_bytes`` and ``seconds``; those without are never cut.

        On the source's side of the cut are the tensors that are needed and the ops that are rerun.  A needed tensor
        whose op is not costs its bytes, a rerun op its seconds; what a rerun op reads is needed, and views of what is
        computed again are, too.
        """
        flow = _networkx.DiGraph()
        for key, num_bytes in self.graph.sizes.items():
            if key in self.saved:
                flow.add_edge("source", key)
            op = self.maker.get(key)
            flow.add_edge(key, op.name if op else "sink", num_bytes=num_bytes, seconds=0.0)
        for node in self.graph.nodes:
            if node.op is None or not can_rerun(node.op):
                continue
            flow.add_edge(node.op.name, "sink", num_bytes=0.0, seconds=self.seconds[node.op.name])
            for key in node.reads if node.makes else ():
                if key in self.graph.sizes:
                    flow.add_edge(node.op.name, key)
            for maker in filter(None, map(self.maker.get, () if node.makes else node.reads)):
                flow.add_edge(maker.name, node.op.name)
        return flow

    def _choice(self, rerun: frozenset[str]) -> RerunChoice:
        """Of these ops, those of which something is needed: a cut may have others that cost nothing on its side."""
        needed, names = set(self.saved), set[str]()
        for node in reversed(self.graph.nodes):
            if node.op and node.op.name in rerun and not needed.isdisjoint(node.makes):
                names.add(node.op.name)
                needed.update(node.reads)
        made_again = {key for key, op in self.maker.items() if op is not None and op.name in names}
        kept = sum(self.graph.sizes.get(key, 0.0) for key in needed - made_again)
        ordered = [node.op.name for node in self.graph.nodes if node.op and self._runs(node, names, made_again)]
        policy = rerun_policy_name(ordered) if ordered else "none"
        return RerunChoice(policy, sum(self.seconds[name] for name in ordered), kept)

    @staticmethod
    def _runs(node: TensorNode, names: Set[str], made_again: Set[TensorKey]) -> bool:
        """Whether a node is one of `names`, or a view of what they make."""
        assert node.op is not None
        is_view = not node.makes and not made_again.isdisjoint(node.reads) and can_rerun(node.op)
        return node.op.name in names or is_view
