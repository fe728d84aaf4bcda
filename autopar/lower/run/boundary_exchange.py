"""Sends and receives the values between pipeline stages.

A value crosses a cut with the layout that its layer puts it out in: this rank sends its local part to the rank with the
same place in the next stage's group, and gets the gradient of that part back.  Sends and receives only start; what was
received is waited for when it is read, what was sent when the step's actions have run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.failures import naming_failures
from autopar.lower.run.execution import Executor
from autopar.schedules.action_lists import Action

__all__ = ["BoundaryExchange"]


class BoundaryExchange:
    """The messages of one step of one rank."""

    def __init__(self, executor: Executor) -> None:
        """None is under way."""
        self._executor = executor
        self._sent: list[tuple[Action, Handle]] = []
        self._coming: dict[Action, dict[str, Handle]] = {}

    def send(self, action: Action, tensors: Iterable[Tensor]) -> None:
        """Start to send them; `action` is a SEND_F or SEND_B."""
        stages = self._executor.stages
        group = stages.groups[action.stage + (1 if action.kind == "SEND_F" else -1)]
        self._sent = [(before, handle) for before, handle in self._sent if not handle.is_done()]  # they hold tensors
        for tensor in tensors:
            self._sent.append((action, self._executor.communicator.start_send(tensor, stages.axis, group)))

    def receive(self, action: Action, names: Iterable[str]) -> None:
        """Start to receive these values, or their gradients; `action` is a RECV_F or RECV_B."""
        executor = self._executor
        stages = executor.stages
        group = stages.groups[action.stage + (-1 if action.kind == "RECV_F" else 1)]
        self._coming[action] = {
            name: executor.communicator.start_receive(*self._local_type(name), stages.axis, group) for name in names
        }

    def received(self, action: Action) -> Mapping[str, Tensor]:
        """What this `receive` brought, empty if there was none; waits for it."""
        return {name: handle.wait() for name, handle in self._coming.pop(action, {}).items()}

    def zeros(self, name: str) -> Tensor:
        """A gradient of a value that nothing flows to, as its peer awaits it."""
        shape, dtype = self._local_type(name)
        return torch.zeros(shape, dtype=dtype, device=self._executor.communicator.device)

    def wait(self) -> None:
        """Wait for what was sent."""
        for action, handle in self._sent:
            with naming_failures(self._executor.stages.who, action):
                handle.wait()
        self._sent.clear()

    def _local_type(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        executor = self._executor
        whole = executor.executable.program.type_of(name)
        dtype: torch.dtype = getattr(torch, whole.dtype)
        return executor.value_layouts[name].local_shape(whole.shape, executor.num_microbatches), dtype
