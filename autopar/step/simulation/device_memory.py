"""What one device group holds as its actions run: of activations and their gradients, and of parameters besides their
storage: copies to compute with, buffers of collectives, gradients.

Gradients of a layer's parameters are in one of these states:

- *unreduced*: gradients of the copies, until ``REDUCE``;
- *summed*: gradients of the copies that several microbatches add up (ZeRO-0 and 1), until ``REDUCE``;
- *reducing*: in the buffers of a reduction, until ``WAIT_REDUCE``;
- *reduced*: as the optimizer reads them.  Where parameters are stored in the host's memory they go there when they are
  final: behind their layer's last reduction, those of parameters that several layers share at the end of the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from autopar.schedules.action_lists import Action
from autopar.step.simulation.layer_bytes import LayerBytes, StepTensors, Tensor

__all__ = ["ActivationMemory", "ByteTally", "ParameterMemory", "TensorTally"]


Key = TypeVar("Key", bound=Hashable)


class ByteTally(Generic[Key]):
    """What is allocated, by key; `total_bytes` is the sum."""

    def __init__(self) -> None:
        """Nothing is allocated."""
        self.total_bytes = 0.0
        self._bytes: dict[Key, float] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._bytes

    def allocate(self, key: Key, num_bytes: float) -> None:
        """Count `key`, unless it is there already."""
        if key not in self._bytes:
            self._bytes[key] = num_bytes
            self.total_bytes += num_bytes

    def free(self, key: Key) -> float:
        """Stop counting `key`; its bytes, 0 if it is not there."""
        num_bytes = self._bytes.pop(key, 0.0)
        self.total_bytes -= num_bytes
        return num_bytes

    def clear(self) -> None:
        """Free everything."""
        self._bytes.clear()
        self.total_bytes = 0.0


class TensorTally(Generic[Key]):
    """Tensors that several owners keep: each is counted once, until the last of its owners releases it."""

    def __init__(self) -> None:
        """Nothing is kept."""
        self._sizes = ByteTally[Key]()
        self._owners: dict[Key, set[Hashable]] = {}
        self._owned: dict[Hashable, list[Key]] = {}

    @property
    def total_bytes(self) -> float:
        """The bytes of all tensors that someone keeps."""
        return self._sizes.total_bytes

    def keep(self, tensor: Key, owner: Hashable, num_bytes: float) -> None:
        """`owner` keeps `tensor`.  A tensor without bytes of its own (a view) is not counted."""
        if num_bytes:
            self._sizes.allocate(tensor, num_bytes)
            self._owners.setdefault(tensor, set()).add(owner)
            self._owned.setdefault(owner, []).append(tensor)

    def release(self, owner: Hashable) -> None:
        """`owner` keeps nothing any more."""
        for tensor in self._owned.pop(owner, ()):
            owners = self._owners.get(tensor, set())
            owners.discard(owner)
            if not owners and tensor in self._sizes:
                del self._owners[tensor]
                self._sizes.free(tensor)

    def clear(self) -> None:
        """Nobody keeps anything."""
        self._sizes.clear()
        self._owners.clear()
        self._owned.clear()


class ParameterMemory:
    """Copies and gradients of the layers' parameters.

    ``gradients`` has what is summed and what is reduced: both are kept until the end of the step.
    """

    def __init__(
        self,
        sizes: Sequence[LayerBytes],
        shared: Sequence[Mapping[str, float]],
        sums: Sequence[bool],
        sent_after: Sequence[int],
        *,
        adds: bool,
    ) -> None:
        """All per layer: its bytes; the gradients of the parameters that it shares with other layers; whether
        microbatches add up gradients of its copies; behind how many reductions gradients go to the host (0: never).

        `adds`: layers that share a parameter add their gradients as soon as they are reduced; else each has its own
        until the end of the step.
        """
        self._sizes, self._shared, self._sums, self._adds = sizes, shared, sums, adds
        self._left = list(sent_after)  # reductions until then
        self._copies = ByteTally[int]()
        self._unsharding = ByteTally[int]()
        self._gradients = ByteTally[Hashable]()
        self._unreduced = ByteTally[int]()
        self._reducing = ByteTally[int]()

    @property
    def gathered_bytes(self) -> float:
        """Copies, and what is on its way to become one."""
        return self._copies.total_bytes + self._unsharding.total_bytes

    @property
    def gradient_bytes(self) -> float:
        """Gradients that stay until the end of the step."""
        return self._gradients.total_bytes

    @property
    def transient_bytes(self) -> float:
        """Gradients that wait for their reduction, and what reductions take while they are under way."""
        return self._unreduced.total_bytes + self._reducing.total_bytes

    def unshard(self, index: int) -> None:
        """Start to gather a layer's parameters."""
        self._unsharding.allocate(index, self._sizes[index].coming_bytes)

    def wait_unshard(self, index: int) -> float:
        """The copies are there; returns the bytes of the buffers that they were copied out of."""
        if index not in self._unsharding:
            return 0.0
        self._unsharding.free(index)
        self._copies.allocate(index, self._sizes[index].copied_bytes)
        return self._sizes[index].taken_apart_bytes

    def reshard(self, index: int) -> None:
        """Free the copies."""
        self._copies.free(index)

    def has_final_gradients(self, index: int) -> bool:
        """Whether a layer's next backward makes gradients as the optimizer reads them: nothing reduces or adds them."""
        return not self._sizes[index].reduced_bytes and index not in self._gradients

    def add_gradients(self, index: int) -> None:
        """A layer's backward has made gradients of its copies."""
        if self._sums[index]:
            self._gradients.allocate(index, self._sizes[index].sum_bytes)
        elif self._sizes[index].reduced_bytes:
            self._unreduced.allocate(index, self._sizes[index].copy_gradient_bytes)
        else:  # what other layers have given already is added to theirs, and freed, by ``WAIT_REDUCE``
            self._reducing.allocate(index, self._term_bytes(index))
            self._finish(index)

    def reduced_bytes(self, index: int) -> tuple[float, float]:
        """What starting to reduce a layer's gradients takes at once: of buffers, and of gradients that stay."""
        sizes = self._sizes[index]
        if not sizes.reduced_bytes:
            return 0.0, 0.0
        term = self._term_bytes(index)
        cast = 0.0 if self._sums[index] else sizes.cast_bytes  # sums have the dtype of what is reduced
        return sizes.packed_bytes + cast + term, sizes.arriving_bytes - term

    def reduce(self, index: int) -> None:
        """A layer's gradients have been handed to their reduction."""
        sizes = self._sizes[index]
        if sizes.reduced_bytes:
            self._reducing.allocate(index, sizes.scattered_bytes + self._term_bytes(index))
            self._unreduced.free(index)
            if self._sums[index]:
                self._gradients.free(index)
                self._gradients.allocate(index, sizes.arriving_bytes)
            else:
                self._finish(index)

    def wait_reduce(self, index: int) -> None:
        """The reduced gradients are there, and go to the host if they are final."""
        self._reducing.free(index)
        self._left[index] -= 1
        if not self._left[index]:
            self._gradients.free(index)

    def sums(self, index: int) -> bool:
        """Whether microbatches add up the gradients of a layer's copies."""
        return self._sums[index]

    def finish(self, num_bytes: float) -> None:
        """Gradients are complete: so many bytes."""
        self._gradients.clear()
        self._gradients.allocate("complete", num_bytes)

    def _term_bytes(self, index: int) -> float:
        """The part of what a reduction brings that is added to a gradient that is there, and freed."""
        if self._sums[index]:
            return 0.0
        if index in self._gradients:
            return self._sizes[index].arriving_bytes
        return sum(num_bytes for name, num_bytes in self._shared[index].items() if name in self._gradients)

    def _finish(self, index: int) -> None:
        self._gradients.allocate(index, self._sizes[index].gradient_bytes)
        for name, num_bytes in self._shared[index].items():
            self._gradients.allocate(name if self._adds else (name, index), num_bytes)


class ActivationMemory:
    """Activations that wait for a reader, their backward or the caller; gradients that wait; what is being sent.

    A layer keeps what it saves until its backward has run, and a stage what it receives as long.  All other values are
    kept until their last reader in the stage has run, or until they have been sent.  What a layer offloads is in the
    host's memory from ``WAIT_OFFLOAD`` on; from ``FETCH`` on it has its place on the device as well, until the
    backward has run.
    """

    def __init__(self, tensors: StepTensors, ranges: Sequence[range], *, joins_outputs: bool) -> None:
        """`ranges` has the layers of each stage.

        `joins_outputs`: the caller's outputs are kept until the end of the step, and joined from those of microbatches.
        """
        self._tensors, self._ranges, self._joins_outputs = tensors, ranges, joins_outputs
        self._kept = TensorTally[tuple[int, Tensor]]()
        self._inside = ByteTally[tuple[int, int]]()
        self._gradients = ByteTally[tuple[int, str]]()
        self._branches = ByteTally[tuple[int, int]]()
        self._offloaded = ByteTally[tuple[int, int]]()
        self._fetched = ByteTally[tuple[int, int]]()
        self._sends: list[float] = []

    @property
    def saved_bytes(self) -> float:
        """Activations."""
        return self._kept.total_bytes + self._inside.total_bytes + self._fetched.total_bytes

    @property
    def host_bytes(self) -> float:
        """Activations in the host's memory."""
        return self._offloaded.total_bytes

    @property
    def gradient_bytes(self) -> float:
        """Gradients of activations that wait for a backward."""
        return self._gradients.total_bytes + self._branches.total_bytes

    @property
    def sent_bytes(self) -> float:
        """What is being sent."""
        return sum(self._sends)

    def begin_forward(self, action: Action) -> None:
        """A stage has received what it reads or hands on."""
        for name in self._tensors.received(action.stage):
            self._keep(name, action.microbatch, ("stage", action.stage))

    def forward(self, index: int, microbatch: int, *, saves: bool) -> None:
        """The forward of a layer has run."""
        layer = self._tensors.layers[index]
        if saves:
            for tensor, num_bytes in layer.saved:
                self._kept.keep((microbatch, tensor), (microbatch, "layer", index), num_bytes)
            self._inside.allocate((microbatch, index), layer.inside_bytes)
        for name in layer.outputs:
            self._keep(name, microbatch, ("value", name))
        for name in self._tensors.last_reads[index]:
            self._kept.release((microbatch, "value", name))

    def end_forward(self, action: Action) -> None:
        """A stage keeps what it sends, and what the caller gets at the end of the step."""
        for name in self._tensors.sent[action.stage]:
            self._keep(name, action.microbatch, ("send", action.stage))
        for index in self._ranges[action.stage]:
            for name in self._tensors.layers[index].outputs:
                if name not in self._tensors.returned or not self._joins_outputs:
                    self._kept.release((action.microbatch, "value", name))

    def begin_backward(self, action: Action) -> None:
        """The gradients of what a stage put out are there."""
        for name in (*self._tensors.sent[action.stage], *self._tensors.losses[action.stage]):
            self._allocate_gradient(name, action.microbatch)

    def backward(self, index: int, microbatch: int) -> None:
        """The ops of a layer's backward have run: gradients of its outputs are freed, those of its inputs wait."""
        layer = self._tensors.layers[index]
        for name in layer.outputs:
            self._gradients.free((microbatch, name))
        for name in layer.trained_inputs:
            self._allocate_gradient(name, microbatch)

    def keep_branches(self, index: int, microbatch: int, num_bytes: float) -> None:
        """A backward in two parts keeps gradients for the second one."""
        self._branches.allocate((microbatch, index), num_bytes)

    def offload(self, index: int, microbatch: int, num_bytes: float) -> None:
        """Start to copy what a layer saved to the host's memory."""
        self._offloaded.allocate((microbatch, index), num_bytes)

    def wait_offload(self, index: int, microbatch: int) -> None:
        """The copies are made."""
        self._kept.release((microbatch, "layer", index))
        self._inside.free((microbatch, index))

    def fetch(self, index: int, microbatch: int, num_bytes: float) -> None:
        """Start to copy it back."""
        self._fetched.allocate((microbatch, index), num_bytes)

    def wait_fetch(self, index: int, microbatch: int) -> None:
        """It is back."""
        self._offloaded.free((microbatch, index))

    def free_saved(self, index: int, microbatch: int) -> None:
        """A layer's backward, both parts of it, has read what the layer saved."""
        self._kept.release((microbatch, "layer", index))
        self._inside.free((microbatch, index))
        self._branches.free((microbatch, index))
        self._fetched.free((microbatch, index))

    def end_backward(self, action: Action) -> None:
        """A stage's backward, both parts of it, has read what the stage received."""
        self._kept.release((action.microbatch, "stage", action.stage))

    def send(self, action: Action) -> None:
        """Start to send activations or gradients, which takes until the send after the next one begins."""
        microbatch = action.microbatch
        if action.kind == "SEND_F":
            self._kept.release((microbatch, "send", action.stage))
            sizes = [self._tensors.outputs[name].num_bytes for name in self._tensors.sent[action.stage]]
        else:
            sizes = [self._gradients.free((microbatch, name)) for name in self._tensors.received(action.stage)]
        self._sends = [*self._sends[-1:], sum(sizes)]

    def end_sends(self) -> None:
        """All that was sent has arrived."""
        self._sends.clear()

    def free(self) -> None:
        """The step is over."""
        self._kept.clear()
        self._inside.clear()

    def _keep(self, name: str, microbatch: int, owner: tuple[str, str | int]) -> None:
        output = self._tensors.outputs[name]
        self._kept.keep((microbatch, output.tensor), (microbatch, *owner), output.num_bytes)

    def _allocate_gradient(self, name: str, microbatch: int) -> None:
        self._gradients.allocate((microbatch, name), self._tensors.outputs[name].gradient_bytes)
