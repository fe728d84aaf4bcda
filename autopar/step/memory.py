"""What the memory of a device holds over a step: a walk through everything that its group does, in order.

The walk knows what the runtime keeps when (`autopar.lower`), and counts each tensor once:

- **parameters** as they are stored, buffers, constants (one part of a constant for all layers that read it so);
  **optimizer state**.
- **saved activations**: the batch, whole, as the caller holds it; what layers keep for their backward, and what is on
  its way from layer to layer; microbatches in flight; outputs beside the loss, which a step in microbatches keeps for
  the caller until it ends.
- **gathered parameters**: copies to compute with, of parameters that are gathered or cast.  ZeRO-3: of the layer that
  runs, and what arrives of the next one; below, from their first use to the end of the step.
- **gradients**: where parameters are stored, from the backward of their layer on; with several microbatches also the
  sums of what is not yet reduced.
- **transients**: the most that a layer holds while it runs beside what it saves (`liveness`), with the gradients of its
  parameters, what is on its way to be reduced of the layer behind it, and the gradients of activations that wait; at
  the end what the optimizer makes.
- **pipeline buffers**: what is being sent.
- **overhead**: what the caller says.

Gradients are taken not to be there when the step begins (``optimizer.zero_grad()``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.schedule import Action, ScheduleSource
from autopar.step.actions import step_actions
from autopar.step.layer_bytes import layer_bytes
from autopar.step.liveness import input_key
from autopar.step.parameter_bytes import shared_parameter_bytes
from autopar.step.planned_layers import PlannedLayers
from autopar.step.training import TrainingSpec
from autopar.timeline import Event, MemoryPoint

__all__ = ["Moment", "peak_bytes", "step_memory", "timed_memory"]


class Moment(NamedTuple):
    """What a device holds at one point of the walk: bytes in the order of `MEMORY_KINDS`.

    `part` is ``"forward"``, ``"backward"``, ``"begin"`` or ``"end"`` of the step; `is_after`: when the layer has run.
    """

    part: str
    stage: int
    layer: int
    microbatch: int
    is_after: bool
    num_bytes: tuple[float, ...]


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
    known = _Known(layers, training)
    actions = step_actions(layers.program, layers.decisions, training, schedules).listed
    return tuple(
        tuple(_Walk(known, group, any(a.kind == "I" for a in listed), overhead_bytes).run(listed))
        for group, listed in enumerate(actions)
    )


def peak_bytes(memory: Iterable[Moment]) -> float:
    """The most of all kinds together."""
    return max((sum(moment.num_bytes) for moment in memory), default=0.0)


class _Known:
    """What all groups share: the layers' bytes, and how values cross from layer to layer."""

    def __init__(self, layers: PlannedLayers, training: TrainingSpec) -> None:
        self.program, self.plan, self.training = layers.program, layers.decisions, training
        self.shared, self.strategies = layers.shared, layers.strategies
        self.ranges, self.groups = self.plan.ranges, self.plan.groups
        # Like each layer, with the names of values in `sizes`.
        self.like = [placed.layer for placed in layers.placed]
        self.sizes = layers.find("bytes", lambda placed: layer_bytes(placed, training))
        program = layers.program
        self.producer: dict[str, tuple[int, int]] = {}
        self.last_reader: dict[str, int] = {}
        for index, layer in enumerate(program.layers):
            self.producer.update({name: (index, position) for position, name in enumerate(layer.outputs)})
            self.last_reader.update(dict.fromkeys(layer.inputs, index))
        # By the first layer of each stage, what crosses the cut before it.
        self.crossing = {
            layers.start: [
                name
                for name, (index, _) in self.producer.items()
                if self.plan.stages and index < layers.start <= self.last_reader.get(name, -1)
            ]
            for layers in self.ranges
        }
        self.returned = {*program.outputs, *program.updates.values()}

    def is_as_produced(self, reader: int, position: int) -> bool:
        """Whether a layer reads an input in the layout in which it was put out."""
        name = self.program.layers[reader].inputs[position]
        index, output = self.producer[name]
        source, target = self.strategies[index], self.strategies[reader]
        return (source.mesh, source.outputs[output]) == (target.mesh, target.inputs[position])


# A tensor that is held: (microbatch, layer, key).
_Tensor = tuple[int, int, str]


class _Walk:
    """One device group's step."""

    def __init__(self, known: _Known, group: int, splits: bool, overhead_bytes: float) -> None:
        self.known = known
        self.group = group
        plan = known.plan
        self.is_single = plan.num_microbatches == 1 and not plan.stages
        self.own = [index for r, g in zip(known.ranges, known.groups, strict=True) if g == group for index in r]
        self.is_split = splits
        self.overhead = overhead_bytes
        self.held: dict[_Tensor, tuple[float, set[str]]] = {}
        self.owned: dict[tuple[int, str], list[_Tensor]] = {}
        self.saved = self.inside = self.gathered = self.gradients = 0.0
        self.pending: dict[tuple[int, str], float] = {}
        self.branches: dict[tuple[int, int], float] = {}
        self.sends: list[float] = []
        self.has_sum: set[int] = set()
        self.has_copy: set[int] = set()
        self.has_shared: set[str] = set()
        self.shared_gradients: dict[str, float] = {}
        self.moments: list[Moment] = []
        self.batch = known.training.batch_bytes(known.program)
        self.parameters, self.optimizer = self._standing()

    def run(self, listed: Sequence[Action]) -> list[Moment]:
        """The moments in order."""
        self._note(("begin", -1, -1, -1), 0.0, is_after=True)
        last = {action.stage: action for action in listed if action.kind in ("B", "W")}
        for action in listed:
            is_last = last.get(action.stage) == action
            if action.kind == "F":
                self._forward(action)
            elif action.kind in ("B", "I"):
                self._backward(action, is_last=is_last, is_whole=action.kind == "B" or not self._splits(action.stage))
            elif action.kind == "W" and self._splits(action.stage):
                self._weights(action)
            elif action.kind == "SEND_F":
                self._release(action.microbatch, f"send {action.stage}")
                self._send([self._output_bytes(name) for name in self._leaving(action.stage)])
            elif action.kind == "SEND_B":
                arriving = self._arriving(self.known.ranges[action.stage])
                self._send([self.pending.pop((action.microbatch, name), 0.0) for name in arriving])
        self._finish()
        return self.moments

    # --- what is there all the time

    def _standing(self) -> tuple[float, float]:
        program = self.known.program
        parts: dict[tuple[object, ...], float] = {}
        for index in self.own:
            layer, sizes = program.layers[index], self.known.sizes[index]
            real = dict(zip(self.known.like[index].held, layer.held, strict=True))
            for name, num_bytes in sizes.stored:
                parts[real[name], num_bytes if program.values[real[name]].role == "constant" else ""] = num_bytes
        parameters = sum(parts.values())
        optimizer = sum(self.known.sizes[index].optimizer_bytes for index in self.own)
        for name, where in self.known.shared.items():
            if any(name in program.layers[index].held for index in self.own):
                shared = shared_parameter_bytes(program.values[name], where, self.known.training)
                parameters += shared.stored_bytes
                optimizer += shared.optimizer_bytes
                if shared.gradient_bytes:
                    self.shared_gradients[name] = shared.gradient_bytes
        return parameters, optimizer

    # --- one layer after the other

    def _forward(self, action: Action) -> None:
        known, microbatch = self.known, action.microbatch
        layers = known.ranges[action.stage]
        for name in self._arriving(layers):
            self._hold((microbatch, *self._output(name)), f"stage {action.stage}", self._output_bytes(name))
        for index in layers:
            sizes, layer = known.sizes[index], known.program.layers[index]
            running = sizes.running
            where = "forward", action.stage, index, microbatch
            opening, window = self._open(index, index + 1 if index + 1 in layers else -1)
            if opening > window:
                self._note(where, self._moved_bytes(index), window=opening)
            above = max(0.0, running.forward_bytes - sum(running.inputs.values())) + self._moved_bytes(index)
            saved = min(above, self._saved_beside_inputs(index)) if known.training.is_training else 0.0
            self._note(where, above - saved, window=window, saved=saved)
            if known.training.is_training:
                self._keep(index, microbatch)
            for position, name in enumerate(layer.outputs):
                self._hold(
                    (microbatch, index, running.outputs[position][0]), f"value {name}", running.outputs[position][1]
                )
            for name in (*layer.inputs, *layer.outputs):
                if known.last_reader.get(name, -1) <= index and name not in known.returned:
                    self._release(microbatch, f"value {name}")
            self._note(where, 0.0, is_after=True)
        self._leave(action)

    def _leave(self, action: Action) -> None:
        """The end of a stage's forward: what is sent is kept until it is, what the caller gets until the end."""
        known, microbatch = self.known, action.microbatch
        for name in self._leaving(action.stage):
            self._hold((microbatch, *self._output(name)), f"send {action.stage}", self._output_bytes(name))
        for index in known.ranges[action.stage]:
            for name in known.program.layers[index].outputs:
                if name not in known.returned or self.is_single:
                    self._release(microbatch, f"value {name}")

    def _backward(self, action: Action, *, is_last: bool, is_whole: bool) -> None:
        known, microbatch = self.known, action.microbatch
        layers = known.ranges[action.stage]
        leaving = self._leaving(action.stage)  # their gradients are held until the whole stage has run
        for name in (*leaving, known.program.loss):
            if name in leaving or (name in known.producer and known.producer[name][0] in layers):
                self.pending.setdefault((microbatch, name), self._gradient_bytes(name))
        flying = 0.0  # of the layer behind
        for index in reversed(layers):
            where = "backward", action.stage, index, microbatch
            opening, window = self._open_again(index, index - 1 if index - 1 in layers else -1)
            if opening > window:
                self._note(where, flying, window=opening)
            stays = self._run_back(where, index, flying, window)
            self._pass_on(index, microbatch, leaving)
            if is_whole:
                self._drop(index, microbatch)
                flying = self._reduce(where, index, flying, window, stays=stays, is_last=is_last)
            else:
                self.branches[microbatch, index] = known.sizes[index].running.branch_bytes
            self._note(where, flying, is_after=True)
        for name in leaving:
            self.pending.pop((microbatch, name), None)
        if is_whole:
            self._release(microbatch, f"stage {action.stage}")

    def _run_back(self, where: tuple[str, int, int, int], index: int, flying: float, window: float) -> bool:
        """The layer's ops; whether the gradients of its parameters stay as they are: nothing reduces or adds them."""
        sizes = self.known.sizes[index]
        running = sizes.running
        there = running.saved_bytes + sum(gradient for _, _, gradient in running.outputs)
        above = max(0.0, running.backward_bytes - there)
        weights = max(0.0, running.weight_bytes - there - above) if sizes.copy_gradient_bytes else 0.0
        stays = not sizes.reduced_bytes and index not in self.has_sum
        self._note(
            where, above + flying + (0.0 if stays else weights), window=window, gradients=weights if stays else 0.0
        )
        return stays

    def _pass_on(self, index: int, microbatch: int, leaving: Sequence[str]) -> None:
        """The gradients of a layer's outputs are over, and those of its inputs wait."""
        known, layer = self.known, self.known.program.layers[index]
        for name in layer.outputs:
            if name not in leaving:
                self.pending.pop((microbatch, name), None)
        for name in layer.inputs:
            if known.program.values[name].requires_grad and name in known.producer:
                self.pending.setdefault((microbatch, name), self._gradient_bytes(name))

    def _gradient_bytes(self, name: str) -> float:
        index, position = self.known.producer[name]
        return self.known.sizes[index].running.outputs[position][2]

    def _reduce(
        self, where: tuple[str, int, int, int], index: int, flying: float, window: float, *, stays: bool, is_last: bool
    ) -> float:
        """Gradients of parameters set off, if they are to be reduced now.

        Returns:
            Bytes that are under way while the layer before computes, beside the gradients that they become.
        """
        sizes = self.known.sizes[index]
        goes = self.is_single or self.known.strategies[index].zero >= 2 or (is_last and not self.known.plan.stages)
        reduces = goes and sizes.reduced_bytes > 0.0
        # What comes is a gradient, or a term of one that is there.
        arriving = sizes.arriving_bytes if reduces else 0.0
        tied = self.has_shared.intersection(self.known.program.layers[index].held) if self.is_single else ()
        term = sum(self.shared_gradients[name] for name in tied) if reduces else 0.0
        if index in self.has_sum and not self._is_new_sum(index):
            term = arriving
        if not stays:
            packed = sizes.packed_bytes if reduces else 0.0
            above = flying + sizes.copy_gradient_bytes + packed + term
            self._note(where, above, window=window, gradients=arriving - term)
        self._settle(index, reduces=reduces)
        return sizes.scattered_bytes + term if reduces else 0.0

    def _weights(self, action: Action) -> None:
        for index in reversed(self.known.ranges[action.stage]):
            sizes = self.known.sizes[index]
            # Parameter by parameter, a gradient is added to those that are there.
            self._note(("backward", action.stage, index, action.microbatch), sizes.largest_bytes)
            self.branches.pop((action.microbatch, index), None)
            self._drop(index, action.microbatch)
            self._settle(index, reduces=False)
        self._release(action.microbatch, f"stage {action.stage}")

    # --- parameters

    def _splits(self, stage: int) -> bool:
        strategies = [self.known.strategies[index] for index in self.known.ranges[stage]]
        return self.is_split and all(s.recompute != "full" and s.zero < 3 for s in strategies)

    def _open(self, index: int, following: int) -> tuple[float, float]:
        """A layer's parameters for its forward: bytes of copies that don't stay and of what comes, while they are taken
        out of the buffer in which they came and while the layer runs.
        """
        sizes = self.known.sizes[index]
        if self.known.strategies[index].zero == 3:
            coming = self._coming(following)
            own = sizes.copied_bytes
            return own + sizes.taken_apart_bytes + coming, own + coming
        is_first = index not in self.has_copy
        self._copy(index)
        coming = self._coming(following)
        return (sizes.taken_apart_bytes if is_first else 0.0) + coming, coming

    def _open_again(self, index: int, following: int) -> tuple[float, float]:
        """The same for its backward: ZeRO-3 gathers anew."""
        if self.known.strategies[index].zero < 3:
            return 0.0, 0.0
        sizes = self.known.sizes[index]
        own, coming = sizes.copied_bytes, self._coming(following)
        return own + sizes.taken_apart_bytes, own + coming

    def _coming(self, index: int) -> float:
        """What is on its way of the layer that runs next, -1 for none."""
        if index < 0 or index in self.has_copy:
            return 0.0
        if self.known.strategies[index].zero < 2 and not self.is_single:
            self._copy(index)  # once a step, and waited for at once
            return 0.0
        return self.known.sizes[index].coming_bytes

    def _copy(self, index: int) -> None:
        """Copies that stay until the end of the step."""
        if index not in self.has_copy and self.known.strategies[index].zero < 3:
            self.has_copy.add(index)
            self.gathered += self.known.sizes[index].copied_bytes

    def _is_new_sum(self, index: int) -> bool:
        return not self.is_single and self.known.strategies[index].zero < 2

    def _settle(self, index: int, *, reduces: bool) -> None:
        """The gradients that a backward leaves."""
        sizes = self.known.sizes[index]
        is_first = index not in self.has_sum
        self.has_sum.add(index)
        if self._is_new_sum(index):
            self.gradients += sizes.sum_bytes if is_first and not reduces else 0.0
            if reduces:  # the last microbatch's: all of them at once
                self.gradients += sizes.arriving_bytes - (0.0 if is_first else sizes.sum_bytes)
            return
        if is_first:
            shared = self.shared_gradients.keys() & set(self.known.program.layers[index].held)
            # With microbatches each layer that reads a parameter has a sum of its own.
            new = shared - self.has_shared if self.is_single else shared
            self.has_shared |= new
            self.gradients += sizes.gradient_bytes + sum(self.shared_gradients[name] for name in new)

    def _finish(self) -> None:
        """What is done once, at the end."""
        end = "end", -1, -1, -1
        self._note(end, 0.0)
        self.sends.clear()
        if not self.is_single:
            joined = [self._joined_bytes(name) for name in dict.fromkeys(self.known.program.outputs)]
            # Microbatches' parts go as their outputs are joined.
            self._note(end, max(joined, default=0.0))
        if not self.known.training.is_training:
            return
        sizes = [self.known.sizes[index] for index in self.own]
        if self.known.plan.stages:
            self._reduce_sums(end)
        stored = sum(h.gradient_bytes for h in sizes) + sum(self.shared_gradients.values())
        self.gradients = stored
        self.held.clear()
        self.saved = self.inside = 0.0
        largest = max((h.largest_bytes for h in sizes), default=0.0)
        at_once = self.known.training.steps_at_once
        self.gathered = self.gathered if self.is_single else 0.0
        self._note(end, stored if at_once else 2 * largest)
        self._note(end, 0.0, is_after=True)

    def _reduce_sums(self, end: tuple[str, int, int, int]) -> None:
        """Sums become gradients layer by layer, the next one's on their way while one's are waited for."""
        before = 0.0
        for index in self.own:
            sizes = self.known.sizes[index]
            if self._is_new_sum(index) and sizes.reduced_bytes:
                self._note(end, before + sizes.packed_bytes, gradients=sizes.arriving_bytes)
                self.gradients += sizes.arriving_bytes - sizes.sum_bytes
                self._note(end, before + sizes.scattered_bytes)
                before = sizes.scattered_bytes
            else:
                before = 0.0

    def _joined_bytes(self, name: str) -> float:
        """Of an output whose microbatches are joined."""
        if name not in self.known.producer or self.known.producer[name][0] not in self.own:
            return 0.0
        return self.known.plan.num_microbatches * self._output_bytes(name)

    # --- activations

    def _identity(self, microbatch: int, index: int, position: int) -> _Tensor:
        """Which tensor an input of a layer is: what was put out, or one that was moved for it."""
        name = self.known.program.layers[index].inputs[position]
        first = self.known.like[index].inputs[position]
        if name not in self.known.producer or not self.known.is_as_produced(index, position):
            return microbatch, index, input_key(first)
        return microbatch, *self._output(name)

    def _output(self, name: str) -> tuple[int, str]:
        """The tensor in which a value leaves its layer: an earlier one where it only passes through."""
        index, position = self.known.producer[name]
        return index, self.known.sizes[index].running.outputs[position][0]

    def _output_bytes(self, name: str) -> float:
        index, position = self.known.producer[name]
        return self.known.sizes[index].running.outputs[position][1]

    def _moved_bytes(self, index: int) -> float:
        """Of a layer's inputs, those that were moved for it."""
        sizes = self.known.sizes[index].running.inputs.values()  # by position
        return sum(size for position, size in enumerate(sizes) if self._identity(0, index, position)[1] == index)

    def _keep(self, index: int, microbatch: int) -> None:
        """What a layer saves; by itself what other layers may hold as well."""
        running = self.known.sizes[index].running
        firsts = self.known.like[index].inputs
        inputs = {input_key(first): position for position, first in enumerate(firsts)}
        outputs = {key for key, _, _ in running.outputs}
        for key, num_bytes in running.saved.items():
            if key in inputs:
                self._hold(self._identity(microbatch, index, inputs[key]), f"layer {index}", num_bytes)
            elif key in outputs:
                self._hold((microbatch, index, key), f"layer {index}", num_bytes)
        self.inside += self._inside_bytes(index)

    def _inside_bytes(self, index: int) -> float:
        """What a layer saves that no other layer can hold."""
        running = self.known.sizes[index].running
        firsts = self.known.like[index].inputs
        shared = {input_key(first) for first in firsts} | {key for key, _, _ in running.outputs}
        return running.saved_bytes - sum(size for key, size in running.saved.items() if key in shared)

    def _saved_beside_inputs(self, index: int) -> float:
        running = self.known.sizes[index].running
        return running.saved_bytes - sum(running.saved.get(input_key(name), 0.0) for name in running.inputs)

    def _drop(self, index: int, microbatch: int) -> None:
        self._release(microbatch, f"layer {index}")
        self.inside -= self._inside_bytes(index)

    def _hold(self, tensor: _Tensor, owner: str, num_bytes: float) -> None:
        if not num_bytes:
            return
        if tensor not in self.held:
            self.held[tensor] = num_bytes, set()
            self.saved += num_bytes
        self.held[tensor][1].add(owner)
        self.owned.setdefault((tensor[0], owner), []).append(tensor)

    def _release(self, microbatch: int, owner: str) -> None:
        for tensor in self.owned.pop((microbatch, owner), ()):
            num_bytes, owners = self.held.get(tensor, (0.0, set[str]()))
            owners.discard(owner)
            if num_bytes and not owners:
                del self.held[tensor]
                self.saved -= num_bytes

    def _arriving(self, layers: range) -> Sequence[str]:
        """Values of earlier stages that these layers read or hand on."""
        return self.known.crossing[layers.start]

    def _leaving(self, stage: int) -> Sequence[str]:
        following = stage + 1
        return self._arriving(self.known.ranges[following]) if following < len(self.known.ranges) else ()

    def _send(self, sizes: Iterable[float]) -> None:
        """What is sent is there until it has arrived: taken to be so when the send after the next one begins."""
        self.sends = [*self.sends[-1:], sum(sizes)]

    # --- what there is

    def _note(
        self,
        where: tuple[str, int, int, int],
        transients: float,
        *,
        window: float = 0.0,
        gradients: float = 0.0,
        saved: float = 0.0,
        is_after: bool = False,
    ) -> None:
        part, stage, layer, microbatch = where
        waiting = sum(self.pending.values()) + sum(self.branches.values())
        sums = (
            self.parameters, self.gradients + gradients, self.optimizer,
            self.batch + self.saved + self.inside + saved, transients + waiting,
            self.gathered + window, sum(self.sends), self.overhead,
        )  # fmt: skip
        self.moments.append(Moment(part, stage, layer, microbatch, is_after, sums))


def timed_memory(
    memory: Sequence[Sequence[Moment]], events: Iterable[Event], step_s: float
) -> tuple[tuple[MemoryPoint, ...], ...]:
    """The moments at the times of their layers' events; what no event tells of comes with the moment before it."""
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
