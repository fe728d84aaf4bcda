"""What activations and their gradients take on one device group, as its actions run."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.action_lists import Action
from autopar.step.byte_tally import ByteTally, TensorTally
from autopar.step.layer_tensors import StepTensors, Tensor

__all__ = ["ActivationMemory"]


class ActivationMemory:
    """Activations that wait for a reader, their backward or the caller; gradients that wait; what is being sent.

    A layer keeps what it saves until its backward has run, and a stage what it receives as long.  All other values are
    kept until their last reader in the stage has run, or until they have been sent.
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
        self._sends: list[float] = []

    @property
    def saved_bytes(self) -> float:
        """Activations."""
        return self._kept.total_bytes + self._inside.total_bytes

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

    def free_saved(self, index: int, microbatch: int) -> None:
        """A layer's backward, both parts of it, has read what the layer saved."""
        self._kept.release((microbatch, "layer", index))
        self._inside.free((microbatch, index))
        self._branches.free((microbatch, index))

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
