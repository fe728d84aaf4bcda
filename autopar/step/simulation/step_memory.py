"""What the memory of a device holds over a step: a fold over the actions of its group (`simulation.actions`).

The actions say when parameters are gathered and freed, and when gradients are reduced; this file says what each kind of
action allocates and frees.  A device holds

- **parameters** as they are stored, buffers, constants (one part of a constant for all layers that read it so);
  **optimizer state**.
- **saved activations** (`device_memory`): the batch, whole, as the caller holds it; what layers save for their
  backward; values on their way from layer to layer; with several microbatches also outputs other than the loss, until
  the step ends.
- **gathered parameters** (`device_memory`): copies to compute with, of parameters that are gathered or cast, and the
  buffers in which they arrive.
- **gradients** where parameters are stored, from the backward of their layer on; with several microbatches also the
  sums of what is not yet reduced.
- **transients**: the most that a layer allocates while it runs, without what it saves (`liveness`), gradients that wait
  for a backward or a reduction, buffers of reductions, and at the end what the optimizer allocates, and what is
  gathered for it.
- **pipeline buffers**: what is being sent.
- **overhead**: what the caller says.

Gradients are taken not to be there when the step begins (``optimizer.zero_grad()``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.schedules.action_lists import Action, ScheduleSource
from autopar.step.costs.optimizer_costs import whole_bytes
from autopar.step.costs.parameter_costs import ParameterBytes, shared_parameter_bytes
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.simulation.actions import LayerAction, StepActions, step_actions
from autopar.step.simulation.device_memory import ActivationMemory, ParameterMemory
from autopar.step.simulation.layer_bytes import LayerBytes, StepTensors, layer_bytes, step_tensors
from autopar.step.training import TrainingSpec
from autopar.timeline import Event, MemoryPoint

__all__ = ["Moment", "peak_bytes", "step_memory", "timed_memory"]


class Moment(NamedTuple):
    """What a device holds at one point of the step: bytes in the order of `MEMORY_KINDS`.

    `part` is ``"forward"``, ``"backward"``, ``"begin"`` or ``"end"`` of the step; `is_after`: when the layer has run;
    `host_bytes`: of a device in the host's memory.
    """

    part: str
    layer: int
    microbatch: int
    is_after: bool
    num_bytes: tuple[float, ...]
    host_bytes: float = 0.0


def step_memory(
    layers: PlannedLayers, training: TrainingSpec, schedules: ScheduleSource | None, overhead_bytes: float = 0.0
) -> tuple[tuple[Moment, ...], ...]:
    """Per device group, the moments of one step in order.

    Args:
        layers: of any plan.
        training: how it is trained.
        schedules: where action lists come from; needed for a plan with stages.
        overhead_bytes: of communicators and allocator, all the time.
    """
    actions = step_actions(layers.program, layers.decisions, training, schedules)
    sizes = layers.find("bytes", lambda placed: layer_bytes(placed, training))
    tensors = step_tensors(layers, sizes)
    return tuple(
        tuple(_GroupMemory(_GroupStorage(group, layers, training, sizes), actions, tensors, overhead_bytes).fold())
        for group in range(len(actions.listed))
    )


def peak_bytes(memory: Iterable[Moment]) -> float:
    """The most of all kinds together."""
    return max((sum(moment.num_bytes) for moment in memory), default=0.0)


class _GroupStorage:
    """What a device group stores, from step to step."""

    def __init__(self, group: int, layers: PlannedLayers, training: TrainingSpec, sizes: Sequence[LayerBytes]) -> None:
        program = layers.program
        self.number, self.layers, self.training, self.sizes = group, layers, training, sizes
        self.own = [index for index, own in enumerate(layers.group_of) if own == group]
        state = {name for index in self.own for name in program.layers[index].state}
        self.shared: dict[str, ParameterBytes] = {
            name: shared_parameter_bytes(program.values[name], where, training)
            for name, where in layers.shared.items()
            if name in state
        }
        self.parameter_bytes = sum(self._stored().values()) + sum(s.stored_bytes for s in self.shared.values())
        self.optimizer_bytes = sum(sizes[index].optimizer_bytes for index in self.own)
        self.optimizer_bytes += sum(shared.optimizer_bytes for shared in self.shared.values())
        self.host_bytes = sum(sizes[index].host_bytes for index in self.own)
        self.host_bytes += sum(shared.host_bytes for shared in self.shared.values())
        self.whole_bytes = sum(sizes[index].whole_bytes for index in self.own)
        self.whole_bytes += sum(
            whole_bytes(program.values[name], *layers.shared[name], training)
            for name, shared in self.shared.items()
            if shared.gradient_bytes
        )

    def _stored(self) -> dict[tuple[str, float], float]:
        """By name, what layers store; each part of a constant once."""
        program, stored = self.layers.program, dict[tuple[str, float], float]()
        for index in self.own:
            real = dict(zip(self.layers.placed[index].layer.state, program.layers[index].state, strict=True))
            for name, num_bytes in self.sizes[index].stored:
                is_constant = program.values[real[name]].role == "constant"
                stored[real[name], num_bytes if is_constant else 0.0] = num_bytes
        return stored

    def shared_gradients(self) -> list[dict[str, float]]:
        """Per layer of the plan, the gradients of the shared parameters that it reads."""
        sizes = {name: shared.gradient_bytes for name, shared in self.shared.items() if shared.gradient_bytes}
        return [{n: sizes[n] for n in layer.state if n in sizes} for layer in self.layers.program.layers]


class _GroupMemory:
    """The fold over one device group's actions."""

    def __init__(self, group: _GroupStorage, actions: StepActions, tensors: StepTensors, overhead_bytes: float) -> None:
        self.group, self.actions, self.tensors, self.overhead_bytes = group, actions, tensors, overhead_bytes
        self.sizes, self.training = group.sizes, group.training
        self.batch_bytes = group.training.batch_bytes(group.layers.program)
        joins = not actions.is_single
        self.activations = ActivationMemory(tensors, actions.ranges, joins_outputs=joins)
        sums = [joins and not policy.reduces_each for policy in actions.policies]
        many = actions.num_microbatches
        sent_after = [
            (many if policy.reduces_each else 1) if self.training.host_storage else 0 for policy in actions.policies
        ]
        self.parameters = ParameterMemory(
            group.sizes, group.shared_gradients(), sums, sent_after, adds=actions.is_single
        )
        self.moments: list[Moment] = []

    def fold(self) -> list[Moment]:
        """The moments in order."""
        begin, end = ("begin", -1), ("end", -1)
        self._note(begin, is_after=True)
        self._layer_actions(self.actions.begin(self.group.number), begin)
        for action in self.actions.listed[self.group.number]:
            self._action(action)
        self._note(end)
        self.activations.end_sends()
        if not self.actions.is_single:
            self._note(end, transients=self._joined_bytes())
        self._layer_actions(self.actions.end(self.group.number), end)
        if self.actions.is_training:
            self._optimize(end)
        return self.moments

    # --- actions

    def _action(self, action: Action) -> None:
        steps = tuple(self.actions.of(action))
        if action.kind in ("SEND_F", "SEND_B"):
            self.activations.send(action)
        elif action.kind == "F":
            self.activations.begin_forward(action)
            self._layer_actions(steps, ("forward", action.microbatch))
            self.activations.end_forward(action)
        elif steps:
            if action.kind != "W":
                self.activations.begin_backward(action)
            self._layer_actions(steps, ("backward", action.microbatch))
            if action.kind == "W" or not self.actions.is_split(action.stage):
                self.activations.end_backward(action)

    def _layer_actions(self, steps: Iterable[LayerAction], where: tuple[str, int]) -> None:
        for kind, index, microbatch in steps:
            if kind == "UNSHARD":
                self.parameters.unshard(index)
            elif kind == "WAIT_UNSHARD":
                self._wait_unshard(index, where)
            elif kind == "F":
                self._forward(index, where)
            elif kind == "RESHARD":
                self.parameters.reshard(index)
            elif kind == "REDUCE":
                self._reduce(index, where)
            elif kind == "WAIT_REDUCE":
                self.parameters.wait_reduce(index)
            elif kind == "W":
                self._backward_of_weights(index, where)
            elif kind in ("OFFLOAD", "WAIT_OFFLOAD", "FETCH", "WAIT_FETCH"):
                self._offload(kind, index, where, where[1] if microbatch < 0 else microbatch)
            else:  # "B" or "I"
                self._backward(index, where, is_whole=kind == "B")

    def _wait_unshard(self, index: int, where: tuple[str, int]) -> None:
        buffers = self.parameters.wait_unshard(index)
        if buffers:
            inputs = self.tensors.layers[index].resharded_bytes if where[0] == "forward" else 0.0
            self._note(where, transients=inputs, gathered=buffers)

    def _forward(self, index: int, where: tuple[str, int]) -> None:
        running, tensors = self.sizes[index].running, self.tensors.layers[index]
        above = max(0.0, running.forward_bytes - sum(running.inputs.values())) + tensors.resharded_bytes
        saved = min(above, tensors.own_saved_bytes) if self.training.is_training else 0.0
        self._note(where, index, transients=above - saved, saved=saved)
        self.activations.forward(index, where[1], saves=self.training.is_training)
        self._note(where, index, is_after=True)

    def _backward(self, index: int, where: tuple[str, int], *, is_whole: bool) -> None:
        sizes, running = self.sizes[index], self.sizes[index].running
        there = running.saved_bytes + sum(gradient for _, _, gradient in running.outputs)
        above = max(0.0, running.backward_bytes - there)
        weights = max(0.0, running.weight_bytes - there - above) if sizes.copy_gradient_bytes else 0.0
        stays = self.parameters.has_final_gradients(index)
        self._note(where, index, transients=above + (0.0 if stays else weights), gradients=weights if stays else 0.0)
        self.activations.backward(index, where[1])
        if not is_whole:
            self.activations.keep_branches(index, where[1], running.branch_bytes)
            self._note(where, index, is_after=True)
            return
        self.activations.free_saved(index, where[1])
        if not stays:
            self._note(where, index, transients=sizes.copy_gradient_bytes, is_after=True)
        self.parameters.add_gradients(index)
        if stays:
            self._note(where, index, is_after=True)

    def _offload(self, kind: str, index: int, where: tuple[str, int], microbatch: int) -> None:
        activations, num_bytes = self.activations, self.sizes[index].running.offloaded_bytes
        if kind == "OFFLOAD":
            activations.offload(index, microbatch, num_bytes)
            self._note(where, index, is_after=True)
        elif kind == "WAIT_OFFLOAD":
            activations.wait_offload(index, microbatch)
        elif kind == "FETCH":
            activations.fetch(index, microbatch, num_bytes)
        else:
            activations.wait_fetch(index, microbatch)

    def _backward_of_weights(self, index: int, where: tuple[str, int]) -> None:
        # Parameter by parameter, a gradient is added to those that are there.
        self._note(where, index, transients=self.sizes[index].largest_bytes)
        self.activations.free_saved(index, where[1])
        self.parameters.add_gradients(index)

    def _reduce(self, index: int, where: tuple[str, int]) -> None:
        # The step's last backward adds its gradients to their sums just now.
        added = self.sizes[index].copy_gradient_bytes if where[0] != "end" and self.parameters.sums(index) else 0.0
        buffers, gradients = self.parameters.reduced_bytes(index)
        self._note(where, index, transients=added + buffers, gradients=gradients, is_after=True)
        self.parameters.reduce(index)

    # --- the end

    def _joined_bytes(self) -> float:
        """The largest output of the program: its microbatches are freed as they are joined."""
        made = (self.tensors.outputs[n] for n in self.group.layers.program.outputs if n in self.tensors.outputs)
        sizes = (output.num_bytes for output in made if output.tensor[0] in self.group.own)
        return self.actions.num_microbatches * max(sizes, default=0.0)

    def _optimize(self, end: tuple[str, int]) -> None:
        """Gradients are complete, activations are freed, and the optimizer allocates its temporaries."""
        self.activations.free()
        own = [self.sizes[index] for index in self.group.own]
        shared = sum(each.gradient_bytes for each in self.group.shared.values())
        stored = sum(each.gradient_bytes for each in own) + shared
        largest = max((each.largest_bytes for each in own), default=0.0)
        there = self.training.host_storage  # where the optimizer's temporaries are, then
        self.parameters.finish(0.0 if there else stored)
        temporary = 0.0 if there else stored if self.training.steps_at_once else 2 * largest
        self._note(end, transients=temporary + self.group.whole_bytes, host=2 * largest if there else 0.0)
        self._note(end, is_after=True)

    def _note(
        self,
        where: tuple[str, int],
        layer: int = -1,
        *,
        transients: float = 0.0,
        gathered: float = 0.0,
        gradients: float = 0.0,
        saved: float = 0.0,
        host: float = 0.0,
        is_after: bool = False,
    ) -> None:
        """Note what there is, and what is there at this moment alone."""
        activations, parameters = self.activations, self.parameters
        num_bytes = (
            self.group.parameter_bytes,
            parameters.gradient_bytes + gradients,
            self.group.optimizer_bytes,
            self.batch_bytes + activations.saved_bytes + saved,
            activations.gradient_bytes + parameters.transient_bytes + transients,
            parameters.gathered_bytes + gathered,
            activations.sent_bytes,
            self.overhead_bytes,
        )
        part, microbatch = where
        host_bytes = self.group.host_bytes + activations.host_bytes + host
        self.moments.append(Moment(part, layer, microbatch, is_after, num_bytes, host_bytes))


def timed_memory(
    memory: Sequence[Sequence[Moment]], events: Iterable[Event], step_s: float
) -> tuple[tuple[MemoryPoint, ...], ...]:
    """Per device group, its moments at the times of their layers' events; those without an event have the time of the
    moment before.
    """
    spans: dict[tuple[int, str, int, int], tuple[float, float]] = {}
    for event in events:
        if event.stream != "compute" or event.category == "optimizer":
            continue
        part = "forward" if event.category == "forward" else "backward"
        key = event.group, part, event.layer, event.microbatch
        start_s, stop_s = spans.get(key, (event.start_s, event.stop_s))
        spans[key] = min(start_s, event.start_s), max(stop_s, event.stop_s)
    return tuple(tuple(_timed(group, moments, spans, step_s)) for group, moments in enumerate(memory))


def _timed(
    group: int,
    moments: Sequence[Moment],
    spans: Mapping[tuple[int, str, int, int], tuple[float, float]],
    step_s: float,
) -> Iterator[MemoryPoint]:
    now_s = 0.0
    for moment in moments:
        span = spans.get((group, moment.part, moment.layer, moment.microbatch))
        if moment.part == "end":
            now_s = step_s if moment.is_after else now_s
        elif span is not None:
            now_s = max(now_s, span[1] if moment.is_after else span[0])
        yield MemoryPoint(now_s, moment.num_bytes)
