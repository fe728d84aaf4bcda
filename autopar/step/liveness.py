"""How long the local tensors of a layer live, forward and backward, and the most that they take together.

Forward, a tensor lives from the op that makes it to the last one that reads it; what autograd saves, and what leaves
the layer, lives on.  Backward, ops run in reverse order: the gradient of a value lives from the backward of its last
reader to that of its producer, and what an op saved until its own backward has run.  A layer that recomputes makes
what it did not keep again first: all of it (its forward once more), or the results of some ops; one whose saved tensors
leave the device has them back (`activation_policies`).

What the layer holds (parameters, buffers, constants) is left out, but not what is cut or gathered from it for one op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.ops import family_of, result_order
from autopar.ops.memory_order import Order, in_order
from autopar.placement import LOCAL, Step
from autopar.program import Op
from autopar.step.activation_policies import ActivationPolicy, activation_policy
from autopar.step.local_layer import PlacedLayer
from autopar.step.local_program import Reshard, RunOp, local_program
from autopar.step.training import TrainingSpec
from autopar.step.value_flows import Flow

__all__ = ["RunningMemory", "input_key", "running_memory"]


@dataclass(frozen=True)
class RunningMemory:
    """Bytes that one microbatch takes in a layer.

    Args:
        saved: what it keeps from its forward to its backward, tensor by tensor; `input_key` of an input.
        extra_bytes: what its ops keep besides (statistics, masks).
        forward_bytes: the most in its forward, inputs and what it saves included.
        backward_bytes: the most in its backward, what it saved and the gradients of its outputs included.
        weight_bytes: the same, with the gradients of parameters that are there at that moment.
        inputs: bytes of each input as it arrives; 0 of what the caller holds.
        moved_bytes: what leaves the device for the time between.
        branch_bytes: gradients at which a way to a parameter begins, that a backward in two parts keeps for the second.
        outputs: per output the tensor's key, its bytes (0: a view of what is held or of an input of the caller), and
            the bytes of its gradient (0: it gets none).
    """

    saved: Mapping[str, float]
    extra_bytes: float
    forward_bytes: float
    backward_bytes: float = 0.0
    weight_bytes: float = 0.0
    branch_bytes: float = 0.0
    moved_bytes: float = 0.0
    inputs: Mapping[str, float] = field(default_factory=dict[str, float])
    outputs: tuple[tuple[str, float, float], ...] = ()

    @property
    def saved_bytes(self) -> float:
        """All that is kept."""
        return sum(self.saved.values()) + self.extra_bytes

    @property
    def transient_bytes(self) -> float:
        """The most at any moment beside what is saved; gradients of parameters apart."""
        return max(self.forward_bytes, self.backward_bytes) - self.saved_bytes


def input_key(name: str) -> str:
    """The key of a layer's input as it arrives."""
    return _text((name, "source", -1))


# A tensor in memory: (value, where on its way it was made, which local value that is).
_Key = tuple[str, str, int]


class _Point(NamedTuple):
    """Where a gradient arrives: of which value, at which point of its way; `num_bytes` of the value there."""

    key: _Key
    num_bytes: float
    is_held: bool


class _Place(NamedTuple):
    """A value at one point of its way: the tensor in memory, where its gradient arrives, how its elements lie."""

    key: _Key
    point: _Point
    order: Order


@dataclass
class _Node:
    """An op, or a move of a value: the tensors that it reads, makes (with bytes) and saves, by key.

    `targets` are where the gradients of what it makes arrive, `sources` where it sends those of what it reads.
    `forward_extra` and `backward_extra` are bytes besides, while it runs.  What `hands_on` gives its operands the very
    gradient that arrives; what `is_joint`, parts of it.  `op` is None of a move, which `is_local` without collectives.
    """

    reads: list[_Key]
    makes: dict[_Key, float]
    targets: list[_Point]
    sources: list[_Point]
    saves: list[_Key] = field(default_factory=list[_Key])
    saved_extra: float = 0.0
    forward_extra: float = 0.0
    backward_extra: float = 0.0
    hands_on: bool = False
    is_joint: bool = False
    op: Op | None = None
    is_local: bool = True

    def is_rerun(self, policy: ActivationPolicy) -> bool:
        """Whether a layer that reruns ops reruns it; moves inside a device with them."""
        return self.is_local if self.op is None else policy.is_rerun(self.op)


def running_memory(placed: PlacedLayer, hows: Iterable[str], training: TrainingSpec) -> dict[str, RunningMemory]:
    """What one microbatch takes, for each way to recompute."""
    return _Life(placed, fuses_attention=training.fuses_attention).memory(hows, training.is_training)


class _Life:
    """One layer's tensors and what runs on them, in order."""

    def __init__(self, placed: PlacedLayer, *, fuses_attention: bool) -> None:
        self.placed = placed
        self.fuses_attention = fuses_attention
        self.sizes: dict[_Key, float] = {}
        self.nodes: list[_Node] = []
        self.local = local_program(placed)
        self.places: dict[int, _Place] = {}
        for index in self.local.inputs:
            self._arrive(index)
        for index in self.local.held:
            self._hold(index)
        for each in self.local.instructions:
            if isinstance(each, RunOp):
                self._add_op(each)
            elif isinstance(each, Reshard):
                self._move(each)
            else:  # a view
                part = in_order(self.local.values[each.target].type.shape)
                self.places[each.target] = self.places[each.source]._replace(order=part)
        self.outputs = [
            (self.places[index], placed.flows[name])
            for index, name in zip(self.local.outputs, placed.layer.outputs, strict=True)
        ]

    # --- what runs

    def _arrive(self, index: int) -> None:
        """An input of the layer: a microbatch's share.  What the caller holds whole is not counted."""
        value, layout, time, tensor = self.local.values[index]
        view = self.placed.view
        key: _Key = (value.name, "source", -1)
        microbatch = view.value_type(self.placed.flows[value.name])
        share = microbatch.num_bytes / max(1, view.cut(value.type, time).num_bytes)
        num_bytes = tensor.num_bytes * share
        if value.name not in self.placed.program.inputs or any(p.is_shard for p in layout):
            self.sizes[key] = num_bytes
        self.places[index] = _Place(key, _Point(key, num_bytes, False), in_order(tensor.shape))

    def _hold(self, index: int) -> None:
        """What the layer holds, which is not counted."""
        value, _, _, tensor = self.local.values[index]
        key: _Key = (value.name, "held", -1)
        self.places[index] = _Place(key, _Point(key, tensor.num_bytes, True), in_order(tensor.shape))

    def _add_op(self, run: RunOp) -> None:
        placed, op, state = self.placed, run.op, run.state
        places = [self.places[index] for index in run.operands]
        trains = [placed.flows[name].value.requires_grad for name in op.operands]
        sources = [place.point for place, takes in zip(places, trains, strict=True) if takes]
        reads = [place.key for place in places]
        makes: dict[_Key, float] = {}
        targets: list[_Point] = []
        results: list[_Key] = []
        shape = state.operand_types[0].shape if places else ()
        for index, name, tensor in zip(run.results, op.results, state.result_types, strict=True):
            made: _Key = (name, "source", -1)
            point = _Point(made, tensor.num_bytes, False)
            part = tensor.shape
            is_view, order = result_order(op, shape, places[0].order, part) if places else (False, in_order(part))
            if is_view:
                made = reads[0]
            else:
                makes[made] = self.sizes[made] = tensor.num_bytes
            self.places[index] = _Place(made, point, order)
            results.append(made)
            if placed.flows[name].value.requires_grad:
                targets.append(point)
        trains = [placed.flows[name].value.requires_grad for name in op.operands]
        family, has_kernel = family_of(op.target), any(option.kernel for option in state.options)
        buffers = family.buffers(state.operand_types, state.result_types, trains, has_kernel)
        is_plain = bool(op.plain_saves or op.plain_saved_extra_bytes) and not self.fuses_attention
        saves, extra = (op.plain_saves, op.plain_saved_extra_bytes) if is_plain else (op.saves, op.saved_extra_bytes)
        kept = [(reads + results)[i] for i in saves if i or not buffers.kept]
        share = state.result_types[0].num_elements / max(1, placed.program.type_of(op.results[0]).num_elements)
        self.nodes.append(
            _Node(
                reads, makes, targets, sources, kept, extra * share + buffers.kept,
                forward_extra=buffers.forward, backward_extra=buffers.backward,
                hands_on=op.is_view or family.gradient != "own", is_joint=family.gradient == "parts",
                op=op,
            )
        )  # fmt: skip

    def _move(self, reshard: Reshard) -> None:
        before, point, order = self.places[reshard.source]
        value, _, _, tensor = self.local.values[reshard.target]
        if reshard.source in self.local.held and reshard.purpose == "copy":  # a slice of what is held: a view
            self.places[reshard.target] = self.places[reshard.source]
            return
        made: _Key = (value.name, reshard.purpose, reshard.target)
        num_bytes = float(tensor.num_bytes)
        stays = all(step.forward == "none" for step in reshard.steps)
        target = _Point(made, num_bytes, False)
        makes = {} if stays else {made: num_bytes}
        self.sizes.update(makes)
        self.nodes.append(
            _Node(
                [before], makes, [target] if value.requires_grad else [], [point] if value.requires_grad else [],
                forward_extra=_staging(reshard.steps, num_bytes, point.num_bytes, is_forward=True),
                backward_extra=_staging(reshard.steps, num_bytes, point.num_bytes, is_forward=False),
                hands_on=all(step.backward == "none" for step in reshard.steps),
                is_local=all(step.forward in LOCAL for step in reshard.steps),
            )
        )  # fmt: skip
        self.places[reshard.target] = _Place(
            before if stays else made, target, order if stays else in_order(tensor.shape)
        )

    # --- what is kept

    def _saves(self, policy: ActivationPolicy) -> tuple[dict[_Key, float], float]:
        """What is kept from forward to backward, and bytes besides."""
        everything = [key for node in self.nodes for key in node.saves]
        extra = sum(node.saved_extra for node in self.nodes)
        if policy.transfer_s is not None:
            return {}, 0.0
        if policy.keeps_inputs_only:
            read = {key for node in self.nodes for key in node.reads}
            kept = [key for index in self.local.inputs if (key := self.places[index].key) in read]
            return self._sized(kept), 0.0
        if policy.reruns is not None:
            everything = self._without_rerun(everything, policy)
        return self._sized(everything), extra

    def _sized(self, keys: Iterable[_Key]) -> dict[_Key, float]:
        return {key: self.sizes[key] for key in keys if key in self.sizes}

    def _without_rerun(self, wanted: Iterable[_Key], policy: ActivationPolicy) -> set[_Key]:
        """What to keep so that `wanted` can be had again by rerunning ops."""
        maker = {key: node for node in self.nodes for key in node.makes}
        kept: set[_Key] = set()
        seen: set[_Key] = set()
        waiting = list(wanted)
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            if key in maker and maker[key].is_rerun(policy):
                waiting += maker[key].reads
            else:
                kept.add(key)
        return kept

    def _arrived(self, key: _Key) -> bool:
        flow = self.placed.flows[key[0]]
        return key[1] == "source" and flow.source == "input"

    # --- how much there is when

    def memory(self, hows: Iterable[str], is_training: bool) -> dict[str, RunningMemory]:
        """See `running_memory`."""
        if not is_training:
            ahead = self._forward(set(), with_extra=False)
            return dict.fromkeys(
                hows, RunningMemory({}, 0.0, ahead, inputs=self._input_sizes(), outputs=self._leaving())
            )
        all_kept = activation_policy("none")
        everything, extra = self._saves(all_kept)
        all_bytes = sum(everything.values()) + extra
        whole = self._backward({}, all_kept)
        found: dict[str, RunningMemory] = {}
        for how in hows:
            policy = activation_policy(how)
            saved, own_extra = self._saves(policy)
            own_bytes = sum(saved.values()) + own_extra
            missing = {key: size for key, size in everything.items() if key not in saved}
            tally = self._backward(missing, policy) if missing and policy.reruns is not None else whole
            again = 0.0
            if policy.keeps_inputs_only:
                ahead = self._forward(set(), with_extra=False)
                again = self._forward(set(everything), with_extra=True) + tally.first
            else:
                ahead = self._forward(set(everything) | self._around_rerun(policy), with_extra=True)
            there = own_bytes if policy.stays else max(all_bytes, own_bytes)
            found[how] = RunningMemory(
                {_text(key): size for key, size in saved.items()},
                own_extra,
                max(ahead, own_bytes),
                max(again, there + tally.most),
                max(again, there + tally.most_with_weights),
                tally.branches,
                all_bytes if policy.transfer_s is not None else 0.0,
                self._input_sizes(),
                self._leaving(),
            )
        return found

    def _input_sizes(self) -> dict[str, float]:
        inputs = self.placed.layer.inputs
        return {name: self.sizes.get((name, "source", -1), 0.0) for name in inputs}

    def _leaving(self) -> tuple[tuple[str, float, float], ...]:
        """See `RunningMemory.outputs`."""
        ordered = sorted(self.outputs, key=lambda pair: pair[1].output)
        return tuple(
            (
                _text(place.key),
                self.sizes.get(place.key, 0.0),
                place.point.num_bytes if flow.value.requires_grad and _gets_gradient(self.placed, flow) else 0.0,
            )
            for place, flow in ordered
        )

    def _around_rerun(self, policy: ActivationPolicy) -> set[_Key]:
        """What rerun ops read and make, which the layer holds until its forward has run."""
        if policy.reruns is None:
            return set()
        return {key for node in self.nodes if node.is_rerun(policy) for key in (*node.reads, *node.makes)}

    def _forward(self, kept: set[_Key], *, with_extra: bool) -> float:
        """The most that there is while the layer runs, if `kept` is never given up."""
        last = {key: number for number, node in enumerate(self.nodes) for key in (*node.reads, *node.makes)}
        stay = kept | {place.key for place, _ in self.outputs}
        now = sum(size for key, size in self.sizes.items() if self._arrived(key))
        most = now
        for number, node in enumerate(self.nodes):
            now += sum(node.makes.values()) + (node.saved_extra if with_extra else 0.0)
            most = max(most, now + node.forward_extra)
            for key in {*node.reads, *node.makes}:
                if last[key] == number and key not in stay and key in self.sizes and not self._arrived(key):
                    now -= self.sizes[key]
        return most

    def _backward(self, dropped: Mapping[_Key, float], policy: ActivationPolicy) -> _Gradients:
        """The gradients of a backward; `most` counts what it gives up of what was kept.

        What was `dropped` is computed again all at once, for the first op that saved some of it, and is there as long
        as one needs any; so is what it is computed from.
        """
        ends = self._ends(dropped, policy)
        tally = _Gradients()
        for place, flow in self.outputs:
            if flow.value.requires_grad and _gets_gradient(self.placed, flow):
                tally.give(place.point, tally.make(place.point.num_bytes))
        freed = 0.0
        is_again = False
        for number in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[number]
            if not any(point.key in tally.pending for point in node.targets):
                continue
            if node.saves or node.saved_extra:
                tally.first = tally.first or tally.now
            if not is_again and not dropped.keys().isdisjoint(node.saves):
                is_again = True
                freed -= sum(dropped.values())
            tally.run(node, freed)
            freed += node.saved_extra + sum(self.sizes.get(key, 0.0) for key in ends.get(number, ()))
        return tally

    def _ends(self, dropped: Mapping[_Key, float], policy: ActivationPolicy) -> dict[int, list[_Key]]:
        """By node, what its backward gives up of what was saved: it is the last that needs it."""
        first: dict[_Key, int] = {}
        for number, node in enumerate(self.nodes):
            for key in node.saves:
                first.setdefault(key, number)
        if dropped:
            together = min(first[key] for key in dropped)
            first |= dict.fromkeys(first.keys() & (dropped.keys() | self._without_rerun(dropped, policy)), together)
        found: dict[int, list[_Key]] = {}
        for key, number in first.items():
            if not self._arrived(key):
                found.setdefault(number, []).append(key)
        return found


class _Gradients:
    """The gradients that wait at some moment of a backward pass; some share memory.

    Bytes: `first`, when something that was saved is asked for; `most` at any moment, `most_with_weights` with those of
    parameters; `branches`, those at which a way to a parameter begins.
    """

    def __init__(self) -> None:
        self.first = self.branches = 0.0
        self._branched: set[int] = set()
        self.pending: dict[_Key, int] = {}
        self.size: list[float] = []
        self.users: list[int] = []
        self.is_held: list[bool] = []
        self.now = self.weights = 0.0
        self.most = self.most_with_weights = 0.0

    def make(self, num_bytes: float) -> int:
        self.size.append(num_bytes)
        self.users.append(0)
        self.is_held.append(False)
        self.now += num_bytes
        return len(self.size) - 1

    def give(self, point: _Point, gradient: int) -> None:
        """`gradient` arrives at `point`, and is added to what is there."""
        self.users[gradient] += 1
        before = self.pending.get(point.key)
        if before is None:
            self.pending[point.key] = gradient
            if point.is_held and self.users[gradient] == 1:
                self.is_held[gradient] = True
                self.now -= self.size[gradient]
                self.weights += self.size[gradient]
            return
        if self.users[before] > 1:  # what others read can't be added to
            total = self.make(self.size[before])
            self.users[total] = 1
            self._drop(before)
            self.pending[point.key] = total
        self._drop(gradient)

    def run(self, node: _Node, freed: float) -> None:
        """The backward of one node."""
        arrived = [self.pending.pop(point.key) for point in node.targets if point.key in self.pending]
        if len({point.is_held for point in node.sources}) > 1 and not self._branched.issuperset(arrived):
            self.branches += sum(self.size[gradient] for gradient in arrived if gradient not in self._branched)
            self._branched.update(arrived)
        made = [
            (
                point,
                arrived[0]
                if node.hands_on and (node.is_joint or point.num_bytes == self.size[arrived[0]])
                else self.make(point.num_bytes),
            )
            for point in node.sources
        ]
        self._note(node.backward_extra - freed)
        for point, gradient in made:
            self.give(point, gradient)
            self._note(-freed)
        for gradient in arrived:
            self._drop(gradient)

    def _drop(self, gradient: int) -> None:
        self.users[gradient] -= 1
        if self.users[gradient] <= 0:
            if self.is_held[gradient]:
                self.weights -= self.size[gradient]
            else:
                self.now -= self.size[gradient]

    def _note(self, besides: float) -> None:
        self.most = max(self.most, self.now + besides)
        self.most_with_weights = max(self.most_with_weights, self.now + self.weights + besides)


def _text(key: _Key) -> str:
    return "/".join(map(str, key))


def _gets_gradient(placed: PlacedLayer, flow: Flow) -> bool:
    """Whether a gradient comes from outside the layer: not for what only the caller reads beside the loss."""
    program, name = placed.program, flow.value.name
    if not program.loss or name == program.loss:
        return True
    return name not in program.outputs or any(name in layer.inputs for layer in program.layers)


def _staging(steps: tuple[Step, ...], after: float, before: float, *, is_forward: bool) -> float:
    """Bytes of the buffers besides what is moved and what becomes of it.

    A gather that joins another dim than the first one makes room for what arrives before it is put in order, and so
    does what is cut along another dim before it is sent.
    """
    whole = max(after, before)
    extra = 0.0
    for step in steps:
        kind = step.forward if is_forward else step.backward
        dim = max(step.src.dim, step.dst.dim)
        if kind == "all_to_all" or (kind in ("all_gather", "reduce_scatter") and dim > 0):
            extra = max(extra, whole)
    return extra
