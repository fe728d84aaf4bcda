"""What every device group does in a step, in order: the one list that the runtime runs, the simulation times and memory
folds.

A schedule lists forwards, backwards, sends and receives by stage and microbatch (`autopar.schedules.action_lists`);
without stages it is a forward and a backward for every microbatch, or all forwards first where the loss is made of sums
over all of them (`Program.tail`).  `StepActions.of` says what such an action is layer
by layer:

- Forward: the next layer's parameters are unsharded while a layer computes.  What is unsharded once for several
  microbatches (ZeRO-0 and 1) is waited for in the first, and resharded in the last backward (outside training in the
  last forward, with stages at the end of the step).  With stages all groups unshard at once what they need for the
  whole step, before anything else (`begin`): else every stage would when the first microbatch comes by.
- Backward: the parameters of the layer before are unsharded while a layer computes, where ZeRO-3 needs them anew; a
  layer's gradients are reduced while the layer before computes.  What is reduced once (ZeRO-0 and 1) is so in the last
  microbatch, with stages at the end of the step (`end`).
- What a layer saves and offloads is copied to the host's memory while the next layer computes; then its place on the
  device is free.  It comes back while the layer behind runs its backward.  For the last layer of an action, the copy
  overlaps with the first layer of the group's next action, and the fetch with the last layer of the action before its
  backward, unless that is its own forward.
- A backward in two parts reduces behind the second one, and waits; a stage that would run something again for the
  second part (ZeRO-3, full recomputation) does everything in the first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from autopar.plan import Decisions, LayerStrategy
from autopar.program import Program
from autopar.schedules.action_lists import Action, ScheduleActions, ScheduleSource
from autopar.step.activation_policies import activation_policy, splits_backward
from autopar.step.training import TrainingSpec, own_training

__all__ = ["LayerAction", "LayerPolicy", "StepActions", "lone_copies", "step_actions"]


class LayerAction(NamedTuple):
    """One thing that a device group does for one layer.

    `kind` is ``"UNSHARD"`` (start to gather its parameters), ``"WAIT_UNSHARD"``, ``"F"``, ``"B"``, ``"I"`` or ``"W"``
    (as in `Action`), ``"RESHARD"`` (free the gathered parameters), ``"REDUCE"`` (start to reduce their gradients),
    ``"WAIT_REDUCE"``, ``"OFFLOAD"`` (start to copy what it saved to the host's memory), ``"WAIT_OFFLOAD"`` (free it on
    the device), ``"FETCH"`` (start to copy it back) or ``"WAIT_FETCH"``.  Gathered parameters are of no use to any
    action of the layer behind ``"RESHARD"`` until the next ``"UNSHARD"``.  `microbatch` is that of a copy which another
    action of the group leaves to this one; -1: that of the action.
    """

    kind: str
    layer: int
    microbatch: int = -1


class _HostCopies(NamedTuple):
    """Copies between device and host that neighboring actions of a group leave to each other.

    Args:
        leaves: what the last layer of a forward saves is copied during the next action.
        arrives: what the first layer of a backward needs is copied during the action before.
        offload: the layer and the microbatch of what leaves during this action, layer -1: none.
        fetch: those of what arrives.
    """

    leaves: bool = False
    arrives: bool = False
    offload: tuple[int, int] = (-1, -1)
    fetch: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class LayerPolicy:
    """When a layer's parameters are gathered and their gradients reduced.

    Args:
        unshards_each: anew for every forward (ZeRO-3).
        unshards_again: anew for every backward, too.
        reduces_each: their gradients in every microbatch (ZeRO-2 and 3).
        splits_backward: whether its backward can run in two parts.
        offloads: whether what it saves is in the host's memory between forward and backward.
    """

    unshards_each: bool
    unshards_again: bool
    reduces_each: bool
    splits_backward: bool
    offloads: bool = False

    @classmethod
    def of(cls, strategy: LayerStrategy, own: TrainingSpec) -> LayerPolicy:
        """The policy of a layer's strategy; `own` is its `own_training`."""
        keeps = own.is_training and own.reruns
        offloads = keeps and activation_policy(strategy.recompute).offloads
        splits = splits_backward(strategy, compiled=own.compiled)
        return cls(strategy.zero == 3, strategy.zero == 3 and keeps, strategy.zero >= 2, splits, offloads)


@dataclass(frozen=True)
class StepActions:
    """A step's actions.

    Args:
        listed: per device group its actions in order; without stages those of one group with one stage.
        ranges: per stage its layers.
        groups: per stage the device group that runs it.
        policies: one per layer.
        has_stages: whether there are pipeline stages.
        is_training: whether there are backwards.
        num_microbatches: of the step.
    """

    listed: ScheduleActions
    ranges: tuple[range, ...]
    groups: tuple[int, ...]
    policies: tuple[LayerPolicy, ...]
    has_stages: bool
    is_training: bool
    num_microbatches: int

    @property
    def is_single(self) -> bool:
        """Whether there is one microbatch and no stage, so that the backward is autograd's own."""
        return self.num_microbatches == 1 and not self.has_stages

    @property
    def unshards_first(self) -> bool:
        """Whether what is unsharded once a step is so in `begin`."""
        return self.has_stages and self.is_training

    @cached_property
    def _first_forwards(self) -> frozenset[Action]:
        first: dict[int, Action] = {}
        for action in self._all("F"):
            first.setdefault(action.stage, action)
        return frozenset(first.values())

    @cached_property
    def _last_forwards(self) -> frozenset[Action]:
        return frozenset({action.stage: action for action in self._all("F")}.values())

    @cached_property
    def _last_backwards(self) -> frozenset[Action]:
        # The first part of a backward in two is all of it where a stage is not split.
        ends = (a for a in self._all("BIW") if a.kind == "B" or (a.kind == "W") == self.is_split(a.stage))
        return frozenset({action.stage: action for action in ends}.values())

    @cached_property
    def _split_stages(self) -> frozenset[int]:
        """The stages whose backward runs in two parts."""
        listed = {action.stage for action in self._all("I")}
        return frozenset(
            stage for stage in listed if all(self.policies[index].splits_backward for index in self.ranges[stage])
        )

    def _all(self, kinds: str) -> Iterator[Action]:
        return (action for listed in self.listed for action in listed if action.kind in kinds)

    def is_split(self, stage: int) -> bool:
        """Whether the backward of `stage` runs in two parts."""
        return stage in self._split_stages

    def key(self, action: Action) -> tuple[object, ...]:
        """Actions with the same key are the same but for their microbatch."""
        is_last = action in self._last_forwards or action in self._last_backwards
        copies = self._copies.get(action, _HostCopies())
        copied = copies.leaves, copies.arrives, copies.offload[0], copies.fetch[0]
        return action.stage, action.kind, action in self._first_forwards, is_last, copied

    def own(self, group: int) -> Iterator[int]:
        """The layers that a device group runs, stage by stage."""
        return (index for layers, own in zip(self.ranges, self.groups, strict=True) if own == group for index in layers)

    def begin(self, group: int) -> Iterator[LayerAction]:
        """What a device group does before the first of its actions."""
        for index in self.own(group) if self.unshards_first else ():
            if not self.policies[index].unshards_each:
                yield LayerAction("UNSHARD", index)
                yield LayerAction("WAIT_UNSHARD", index)

    def end(self, group: int) -> Iterator[LayerAction]:
        """What a device group does after its last action: reductions, overlapped with waits for the ones before."""
        waiting: list[LayerAction] = []
        for index in self.own(group) if self.has_stages and self.is_training else ():
            if not self.policies[index].reduces_each:
                yield LayerAction("RESHARD", index)
                yield LayerAction("REDUCE", index)
                yield from waiting
                waiting = [LayerAction("WAIT_REDUCE", index)]
        yield from waiting

    @cached_property
    def _copies(self) -> dict[Action, _HostCopies]:
        """By action, what it leaves to its neighbors and does for them."""
        changes: dict[Action, dict[str, Any]] = {}
        for listed in self.listed if self.is_training else ():
            for kind, action, neighbor in _copies_of_neighbors([a for a in listed if self._computes(a)]):
                layer = self.ranges[action.stage][-1]
                if self.policies[layer].offloads:
                    is_offload, copied = kind == "OFFLOAD", (layer, action.microbatch)
                    changes.setdefault(action, {})["leaves" if is_offload else "arrives"] = True
                    changes.setdefault(neighbor, {})["offload" if is_offload else "fetch"] = copied
        return {action: _HostCopies(**own) for action, own in changes.items()}

    def _computes(self, action: Action) -> bool:
        return action.kind in ("F", "B", "I") or (action.kind == "W" and self.is_split(action.stage))

    def of(self, action: Action) -> Iterator[LayerAction]:
        """What an action is, layer by layer; nothing for sends and receives."""
        copies = self._copies.get(action)
        return self._alone(action) if copies is None else iter(_with_copies(list(self._alone(action)), copies))

    def _alone(self, action: Action) -> Iterator[LayerAction]:
        """What an action is if it makes its own copies and no others."""
        layers = self.ranges[action.stage]
        if action.kind == "F":
            is_last = action in self._last_forwards
            return self._forward(layers, is_first=action in self._first_forwards, is_last=is_last)
        is_last = action in self._last_backwards
        if action.kind == "B" or (action.kind == "I" and not self.is_split(action.stage)):
            return self._backward(layers[::-1], is_last=is_last)
        if action.kind in "IW" and self.is_split(action.stage):
            return self._backward_part(layers[::-1], action.kind, is_last=is_last)
        return iter(())

    def _forward(self, layers: Sequence[int], *, is_first: bool, is_last: bool) -> Iterator[LayerAction]:
        reshards = is_last and not self.is_training
        unshards_now = is_first and not self.unshards_first
        opened = 0
        leaving: list[LayerAction] = []
        for position, index in enumerate(layers):
            for ahead in layers[opened : position + 2]:  # this layer and the next one
                opened += 1
                policy = self.policies[ahead]
                if policy.unshards_each or unshards_now:
                    yield LayerAction("UNSHARD", ahead)
                    if not (self.is_single or policy.reduces_each):
                        yield LayerAction("WAIT_UNSHARD", ahead)
            yield LayerAction("WAIT_UNSHARD", index)
            yield LayerAction("F", index)
            if self.policies[index].unshards_each or reshards:
                yield LayerAction("RESHARD", index)
            yield from leaving
            leaving = []
            if self.policies[index].offloads and self.is_training:
                yield LayerAction("OFFLOAD", index)
                leaving = [LayerAction("WAIT_OFFLOAD", index)]
        yield from leaving

    def _backward(self, layers: Sequence[int], *, is_last: bool) -> Iterator[LayerAction]:
        reduces_rest = is_last and not self.has_stages
        opened = 0
        waiting: list[LayerAction] = []
        for position, index in enumerate(layers):
            for ahead in layers[opened : position + 2]:
                opened += 1
                if self.policies[ahead].unshards_again:
                    yield LayerAction("UNSHARD", ahead)
                if self.policies[ahead].offloads:
                    yield LayerAction("FETCH", ahead)
            if self.policies[index].unshards_again:
                yield LayerAction("WAIT_UNSHARD", index)
            if self.policies[index].offloads:
                yield LayerAction("WAIT_FETCH", index)
            yield LayerAction("B", index)
            reduces_now = self.policies[index].reduces_each or reduces_rest
            if self.policies[index].unshards_again or (
                is_last and reduces_now and not self.policies[index].unshards_each
            ):
                yield LayerAction("RESHARD", index)
            if reduces_now:
                yield LayerAction("REDUCE", index)
                yield from waiting
                waiting = [LayerAction("WAIT_REDUCE", index)]
            else:
                yield from waiting
                waiting = []
        yield from waiting

    def _backward_part(self, layers: Sequence[int], kind: str, *, is_last: bool) -> Iterator[LayerAction]:
        opened = 0
        for position, index in enumerate(layers):
            for ahead in layers[opened : position + 2] if kind == "I" else ():
                opened += 1
                if self.policies[ahead].offloads:
                    yield LayerAction("FETCH", ahead)
            if kind == "I" and self.policies[index].offloads:
                yield LayerAction("WAIT_FETCH", index)
            yield LayerAction(kind, index)
        for index in layers if kind == "W" else ():
            if self.policies[index].reduces_each:
                if is_last:
                    yield LayerAction("RESHARD", index)
                yield LayerAction("REDUCE", index)
                yield LayerAction("WAIT_REDUCE", index)


def _with_copies(steps: list[LayerAction], copies: _HostCopies) -> list[LayerAction]:
    """These actions of layers without the copies that neighbors make, and with those that are made for them."""
    computing = [step for step in steps if step.kind in ("F", "B", "I", "W")]
    if copies.leaves:
        steps = [step for step in steps if not (step.kind.endswith("OFFLOAD") and step.layer == computing[-1].layer)]
    if copies.arrives:
        steps = [step for step in steps if not (step.kind.endswith("FETCH") and step.layer == computing[0].layer)]
    if copies.offload[0] >= 0:
        behind = steps.index(computing[0]) + 1
        leaving, left = (LayerAction(kind, *copies.offload) for kind in ("OFFLOAD", "WAIT_OFFLOAD"))
        steps = [leaving, *steps[:behind], left, *steps[behind:]]
    if copies.fetch[0] >= 0:
        last = steps.index(computing[-1])
        coming, came = (LayerAction(kind, *copies.fetch) for kind in ("FETCH", "WAIT_FETCH"))
        steps = [*steps[:last], coming, steps[last], came, *steps[last + 1 :]]
    return steps


def _copies_of_neighbors(computing: Sequence[Action]) -> Iterator[tuple[str, Action, Action]]:
    """Which copies of a device group overlap with another one of its actions: the kind of copy, the action whose saved
    tensors it copies, and the action that it overlaps with.

    These are the offload behind a forward, unless its own backward follows directly, and the fetch for a backward,
    unless the action before it is its own forward, or the one that overlaps with the offload of the same tensors.
    """
    offloads: dict[Action, tuple[int, int]] = {}
    for action, behind in itertools.pairwise(computing):
        own, own_behind = (action.stage, action.microbatch), (behind.stage, behind.microbatch)
        if own == own_behind:
            continue  # a forward and its own backward, or the two parts of one
        if action.kind == "F":
            offloads[behind] = own
            yield "OFFLOAD", action, behind
        if behind.kind in ("B", "I") and offloads.get(action) != own_behind:
            yield "FETCH", behind, action


@lru_cache(maxsize=64)
def lone_copies(actions: ScheduleActions, num_stages: int) -> tuple[tuple[float, float], ...]:
    """Per stage, the share of microbatches whose copies to the host's memory at the end of its forward, and back before
    its backward, overlap with no neighboring action, if all stages split their backwards where the schedule does.
    """
    shares = [(0.0, 0.0)] * num_stages
    for listed in actions:
        computing = [action for action in listed if action.kind in ("F", "B", "I", "W")]
        overlapped = Counter((kind, action.stage) for kind, action, _ in _copies_of_neighbors(computing))
        for stage, count in Counter(action.stage for action in computing if action.kind in ("B", "I")).items():
            leaving, coming = ((count - overlapped[kind, stage]) / count for kind in ("OFFLOAD", "FETCH"))
            shares[stage] = leaving, coming
    return tuple(shares)


def _listed_alone(count: int, kinds: str, forwards_first: bool) -> tuple[Action, ...]:
    """Those without stages: a forward and a backward for every microbatch, in turns unless forwards come first."""
    if forwards_first:
        return tuple(Action(0, kind, index) for kind in kinds for index in range(count))
    return tuple(Action(0, kind, index) for index in range(count) for kind in kinds)


def step_actions(
    program: Program, decisions: Decisions, training: TrainingSpec, schedules: ScheduleSource | None
) -> StepActions:
    """The actions of a step.

    Args:
        program: that the decisions fit.
        decisions: of any plan.
        training: how it is trained.
        schedules: where the action lists of its schedule come from; needed for a plan with stages.
    """
    count, stages = decisions.num_microbatches, decisions.stages
    if stages:
        assert schedules is not None
        listed = decisions.shape.actions(schedules)
    else:
        listed = (_listed_alone(count, "FB" if training.is_training else "F", program.is_loss_late),)
    training = training.by(decisions)
    own = {layer.kind: own_training(program, layer, training) for layer in program.kinds}
    return StepActions(
        listed,
        decisions.ranges,
        decisions.groups,
        tuple(
            LayerPolicy.of(strategy, own[layer.kind])
            for layer, strategy in zip(program.layers, decisions.layer_strategies, strict=True)
        ),
        has_stages=bool(stages),
        is_training=training.is_training,
        num_microbatches=count,
    )
