"""How long the local tensors of a layer live, forward and backward, and their peak memory.

Forward, a tensor lives from the op that makes it to the last one that reads it; what autograd saves, and the layer's
outputs, live on.  Backward, ops run in reverse order: the gradient of a value lives from the backward of its last
reader to that of its producer, and what an op saved until its own backward has run.  A layer that recomputes first
makes what it did not save again: all of it (its forward once more), or the results of some ops.  One that offloads what
it saved has it while it runs, forward and backward; `memory` has when it leaves and comes back.

Parameters, buffers and constants are left out, but not what is sliced or gathered from them for one op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from autopar.program import Op
from autopar.step.activation_policies import ActivationPolicy, activation_policy, rerun_ops
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer_tensors.fusion import fused_layer, rerunning_graph
from autopar.step.layer_tensors.gradient_tally import GradientTally
from autopar.step.layer_tensors.tensor_graph import (
    TensorGraph,
    TensorKey,
    TensorNode,
    origins,
    tensor_graph,
)
from autopar.step.training import TrainingSpec

__all__ = ["RunningMemory", "input_key", "running_memory"]


@dataclass(frozen=True)
class RunningMemory:
    """Bytes that one microbatch takes in a layer.

    Args:
        saved: what it saves from its forward to its backward, tensor by tensor; `input_key` of an input.
        extra_bytes: what else its ops save (statistics, masks).
        forward_bytes: the most in its forward, inputs and what it saves included.
        backward_bytes: the most in its backward, what it saved and the gradients of its outputs included.
        weight_bytes: the same, with the gradients of parameters that are there at that moment.
        inputs: bytes of each input as it arrives; 0 of what the caller keeps whole.
        is_offloaded: whether what it saves leaves the device between its forward and its backward.
        branch_bytes: gradients at which a way to a parameter begins, that a backward in two parts keeps for the second.
        outputs: per output the tensor's key, its bytes (0: a view of a parameter, a buffer or an input of the caller),
            and the bytes of its gradient (0: it gets none).
    """

    saved: Mapping[str, float]
    extra_bytes: float
    forward_bytes: float
    backward_bytes: float = 0.0
    weight_bytes: float = 0.0
    branch_bytes: float = 0.0
    is_offloaded: bool = False
    inputs: Mapping[str, float] = field(default_factory=dict[str, float])
    outputs: tuple[tuple[str, float, float], ...] = ()

    @property
    def saved_bytes(self) -> float:
        """All that is saved."""
        return sum(self.saved.values()) + self.extra_bytes

    @property
    def kept_bytes(self) -> float:
        """The part of it that stays on the device."""
        return 0.0 if self.is_offloaded else self.saved_bytes

    @property
    def offloaded_bytes(self) -> float:
        """The part of it that does not."""
        return self.saved_bytes - self.kept_bytes

    @property
    def transient_bytes(self) -> float:
        """The most at any moment besides what stays; gradients of parameters apart.

        While a layer runs, what a layer like it saved is on its way to the host's memory, or back.
        """
        return max(self.forward_bytes, self.backward_bytes) - self.kept_bytes + self.offloaded_bytes


def input_key(name: str) -> str:
    """The key of a layer's input as it arrives."""
    return _text((name, "source", -1))


def running_memory(placed: PlacedLayer, policies: Iterable[str], training: TrainingSpec) -> dict[str, RunningMemory]:
    """What one microbatch takes, for each of these ways to keep activations (names of `ActivationPolicy`)."""
    policies = tuple(policies)
    fuses, trains = training.fuses_attention, training.is_training
    if training.compiled:
        graph = fused_layer(placed, fuses_attention=fuses, is_training=trains).graph
    else:
        graph = tensor_graph(placed, fuses_attention=fuses)
    known = _known_memory(graph, trains)
    missing = [name for name in policies if name not in known]
    if missing and training.compiled:
        known.update(_compiled_memory(placed, graph, missing, training))
    elif missing:
        liveness = _Liveness(graph)
        known.update((name, liveness.memory(activation_policy(name), is_training=trains)) for name in missing)
    return {name: known[name] for name in policies}


@lru_cache(maxsize=256)  # as many as there are graphs that layers share
def _known_memory(graph: TensorGraph, is_training: bool) -> dict[str, RunningMemory]:
    """What was worked out of a graph, by policy; it grows."""
    return {}


def _compiled_memory(
    placed: PlacedLayer, graph: TensorGraph, policies: Sequence[str], training: TrainingSpec
) -> dict[str, RunningMemory]:
    """`running_memory` of a compiled layer, whose tensors are those of `graph` if nothing is named to run again."""
    fuses, trains = training.fuses_attention, training.is_training
    compiled = _Liveness(graph, is_compiled=True)
    memory: dict[str, RunningMemory] = {}
    by_reruns: dict[frozenset[str], tuple[_Liveness, frozenset[str]]] = {frozenset(): (compiled, frozenset())}
    for name in policies:
        named = frozenset(rerun_ops(name) if trains else ())
        if named not in by_reruns:
            rerunning, reruns = rerunning_graph(placed, named, fuses_attention=fuses)
            by_reruns[named] = _Liveness(rerunning, is_compiled=True, like=compiled), reruns
        liveness, reruns = by_reruns[named]
        memory[name] = liveness.memory(_compiled(activation_policy(name), reruns), is_training=trains)
    return memory


def _compiled(policy: ActivationPolicy, reruns: frozenset[str]) -> ActivationPolicy:
    """A way to keep activations where the compiler chooses which cheap ops run again: what it keeps is kept, but for
    results of the ops of these names.
    """

    def runs_again(op: Op) -> bool:
        return op.name in reruns

    return replace(policy, reruns=runs_again if reruns else None)


class _Liveness:
    """The lifetimes of one layer's tensors; those of gradients are the same as in `like`, which keeps others."""

    def __init__(self, graph: TensorGraph, *, is_compiled: bool = False, like: _Liveness | None = None) -> None:
        self.graph = graph
        self.is_compiled = is_compiled
        self._like = like
        self.arrived = frozenset(graph.inputs.values())
        self.saved = self._sized(key for node in graph.nodes for key in node.saves)  # if everything is kept
        self.extra_bytes = sum(node.saved_extra for node in graph.nodes)
        self._known: dict[tuple[bool, frozenset[int] | None], RunningMemory] = {}

    @cached_property
    def _without_backward(self) -> RunningMemory:
        outputs = tuple((_text(key), self.graph.sizes.get(key, 0.0), 0.0) for key, _, _ in self.graph.outputs)
        return RunningMemory({}, 0.0, self._forward_alone, inputs=self._inputs(), outputs=outputs)

    def memory(self, policy: ActivationPolicy, *, is_training: bool) -> RunningMemory:
        """Under this policy, which matters in training only."""
        if not is_training:
            return self._without_backward
        again = self._numbers_again(policy) if policy.reruns is not None else None
        key = policy.keeps_inputs_only, again
        if key not in self._known:
            self._known[key] = self._kept_memory(again, keeps_inputs_only=policy.keeps_inputs_only)
        return replace(self._known[key], is_offloaded=policy.offloads)

    def _kept_memory(self, again: frozenset[int] | None, *, keeps_inputs_only: bool) -> RunningMemory:
        """If these nodes run again (None: what autograd saves is kept), or all do; nothing is offloaded."""
        saved, extra_bytes = self._saved_by(again, keeps_inputs_only=keeps_inputs_only)
        saved_bytes, all_bytes = sum(saved.values()) + extra_bytes, sum(self.saved.values()) + self.extra_bytes
        missing = {key: size for key, size in self.saved.items() if key not in saved}
        most, most_with_weights = self._backward(missing, again) if missing and again is not None else self._whole_most
        rerun_bytes = 0.0
        if keeps_inputs_only:
            forward_bytes = self._forward_alone
            rerun_bytes = self._forward(set(self.saved), with_extra=True) + self._begin_bytes
        else:
            forward_bytes = self._forward(self.saved.keys() | self._around_rerun(again), with_extra=True)
        begin_bytes = max(all_bytes, saved_bytes) if keeps_inputs_only else saved_bytes
        return RunningMemory(
            {_text(key): size for key, size in saved.items()},
            extra_bytes,
            max(forward_bytes, saved_bytes),
            backward_bytes=max(rerun_bytes, begin_bytes + most),
            weight_bytes=max(rerun_bytes, begin_bytes + most_with_weights),
            branch_bytes=self._gradients.branches,
            inputs=self._inputs(),
            outputs=tuple(
                (_text(key), self.graph.sizes.get(key, 0.0), target.num_bytes if gets_gradient else 0.0)
                for key, target, gets_gradient in self.graph.outputs
            ),
        )

    @cached_property
    def _whole_most(self) -> tuple[float, float]:
        """Of a layer that recomputes nothing on the way."""
        return self._backward({}, frozenset())

    def _inputs(self) -> dict[str, float]:
        return {name: self.graph.sizes.get(key, 0.0) for name, key in self.graph.inputs.items()}

    # --- what is saved

    def _numbers_again(self, policy: ActivationPolicy) -> frozenset[int]:
        """The nodes that run again in backward."""
        return frozenset(number for number, node in enumerate(self.graph.nodes) if _is_rerun(node, policy))

    def _saved_by(
        self, again: frozenset[int] | None, *, keeps_inputs_only: bool
    ) -> tuple[dict[TensorKey, float], float]:
        """What stays on the device from forward to backward, and other bytes."""
        if keeps_inputs_only:
            read = {key for node in self.graph.nodes for key in node.reads}
            return self._sized(key for key in self.graph.inputs.values() if key in read), 0.0
        if again is not None:
            saved_keys = [key for node in self.graph.nodes for key in node.saves]
            return self._sized(self._without_rerun(saved_keys, again)), self.extra_bytes
        return self.saved, self.extra_bytes

    def _sized(self, keys: Iterable[TensorKey]) -> dict[TensorKey, float]:
        return {key: self.graph.sizes[key] for key in keys if key in self.graph.sizes}

    @cached_property
    def _makers(self) -> dict[TensorKey, TensorNode]:
        return {key: node for node in self.graph.nodes for key in node.makes}

    def _without_rerun(self, needed: Iterable[TensorKey], again: frozenset[int]) -> set[TensorKey]:
        """The tensors to keep so that running these nodes again gives `needed`."""
        ids = {id(self.graph.nodes[number]) for number in again}
        return origins(needed, self._makers, lambda node: id(node) in ids)

    def _around_rerun(self, again: frozenset[int] | None) -> set[TensorKey]:
        """What rerun ops read and make, which stays until the forward of an eager layer has run."""
        if again is None or self.is_compiled:
            return set()
        nodes = (self.graph.nodes[number] for number in again)
        return {key for node in nodes for key in (*node.reads, *node.makes)}

    # --- the most at any moment

    @cached_property
    def _forward_alone(self) -> float:
        """The most while the layer's forward runs, if nothing is kept."""
        return self._forward(set(), with_extra=False)

    @cached_property
    def _made(self) -> list[float]:
        """By node, bytes of what it makes."""
        return [sum(node.makes.values()) for node in self.graph.nodes]

    @cached_property
    def _lasts(self) -> list[list[TensorKey]]:
        """By node, the tensors that no later one reads, but what arrived or leaves."""
        nodes = self.graph.nodes
        last = {key: number for number, node in enumerate(nodes) for key in (*node.reads, *node.makes)}
        stay = self.arrived | {output.key for output in self.graph.outputs}
        return [
            [key for key in {*node.reads, *node.makes} if last[key] == number and key not in stay]
            for number, node in enumerate(nodes)
        ]

    def _forward(self, kept: set[TensorKey], *, with_extra: bool) -> float:
        """The most while the layer's forward runs, if `kept` is never freed."""
        nodes, sizes = self.graph.nodes, self.graph.sizes
        now = sum(sizes.get(key, 0.0) for key in self.arrived)
        most = now
        for node, made, lasts in zip(nodes, self._made, self._lasts, strict=True):
            now += made + (node.saved_extra if with_extra else 0.0)
            most = max(most, now + node.forward_extra)
            for key in lasts:
                if key not in kept:
                    now -= sizes.get(key, 0.0)
        return most

    @cached_property
    def _gradients(self) -> GradientTally:
        """The gradients of a backward, which are the same whatever is kept."""
        if self._like is not None:
            return self._like._gradients
        tally = GradientTally(self.arrived, is_compiled=self.is_compiled)
        for _, target, gets_gradient in self.graph.outputs:
            if gets_gradient:
                tally.give(target, tally.make(target.num_bytes))
        for number, node in reversed(tuple(enumerate(self.graph.nodes))):
            if any(target.key in tally.pending for target in node.targets):
                tally.run(number, node)
        return tally

    @cached_property
    def _begin_bytes(self) -> float:
        """Gradients that are there when something that was saved is first read."""
        nodes = self.graph.nodes
        reading = (moments for number, moments in self._gradients.moments if _reads_saved(nodes[number]))
        return next((now for (now, _, _), *_ in reading if now), 0.0)

    def _backward(self, dropped: Mapping[TensorKey, float], again: frozenset[int]) -> tuple[float, float]:
        """The most of gradients, those of parameters apart and included, less what was saved and is free by then.

        What was `dropped` is computed again all at once, for the first op that saved some of it, and stays until the
        last one has run; so does what it is computed from.
        """
        last_reads = self._last_reads(dropped, again)
        freed = most = most_with_weights = 0.0
        is_again = False
        for number, moments in self._gradients.moments:
            node = self.graph.nodes[number]
            if not is_again and not dropped.keys().isdisjoint(node.saves):
                is_again = True
                now, with_weights, _ = moments[0]
                delta = self._rerun_most(dropped, again) - freed
                most, most_with_weights = max(most, now + delta), max(most_with_weights, with_weights + delta)
                freed -= sum(dropped.values())
            for now, with_weights, extra in moments[1:]:
                delta = extra - freed
                most, most_with_weights = max(most, now + delta), max(most_with_weights, with_weights + delta)
            freed += node.saved_extra + sum(self.graph.sizes.get(key, 0.0) for key in last_reads.get(number, ()))
        return most, most_with_weights

    def _rerun_most(self, dropped: Mapping[TensorKey, float], again: frozenset[int]) -> float:
        """The most while `dropped` is computed again, in addition to what is there at its start."""
        kept = self._without_rerun(dropped, again)
        needed = set(dropped)
        nodes: list[TensorNode] = []
        for number in sorted(again, reverse=True):
            node = self.graph.nodes[number]
            if not needed.isdisjoint(node.makes):
                nodes.append(node)
                needed.update(key for key in node.reads if key not in kept)
        now = most = 0.0
        last = {key: number for number, node in enumerate(reversed(nodes)) for key in (*node.reads, *node.makes)}
        for number, node in enumerate(reversed(nodes)):
            now += sum(node.makes.values())
            most = max(most, now + node.forward_extra)
            done = (key for key in {*node.reads, *node.makes} if last[key] == number and key in needed)
            now -= sum(self.graph.sizes.get(key, 0.0) for key in done if key not in dropped)
        return most

    @cached_property
    def _first_saves(self) -> dict[TensorKey, int]:
        """By saved tensor, the first node that saves it: its backward is the last to read it."""
        first: dict[TensorKey, int] = {}
        for number, node in enumerate(self.graph.nodes):
            for key in node.saves:
                first.setdefault(key, number)
        return first

    def _last_reads(self, dropped: Mapping[TensorKey, float], again: frozenset[int]) -> dict[int, list[TensorKey]]:
        """By node, the saved tensors that its backward is the last to read."""
        first = self._first_saves
        if dropped:
            together = min(first[key] for key in dropped)
            first = first | dict.fromkeys(
                first.keys() & (dropped.keys() | self._without_rerun(dropped, again)), together
            )
        last_reads: dict[int, list[TensorKey]] = {}
        for key, number in first.items():
            if key not in self.arrived:
                last_reads.setdefault(number, []).append(key)
        return last_reads


def _is_rerun(node: TensorNode, policy: ActivationPolicy) -> bool:
    """Whether a layer that reruns ops reruns this one; moves inside a device are rerun with them."""
    return node.is_local if node.op is None else policy.is_rerun(node.op, has_kernel=node.has_kernel)


def _reads_saved(node: TensorNode) -> bool:
    return bool(node.saves or node.saved_extra)


def _text(key: TensorKey) -> str:
    return "/".join(map(str, key))
