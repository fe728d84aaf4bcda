"""What a lowered program may ask of the other devices: the `Communicator` protocol, implemented twice.

`ProcessGroupCommunicator` talks through torch.distributed; `simulate` runs every rank as a thread of this
process.  Both know `Axis` objects, never process groups by name, so a program is the same on either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from torch import Tensor

from autopar.lower.communication.call_consensus import CallConsensus
from autopar.lower.communication.collectives import Collective, Handle, TracedCommunicator, Watch
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.simulated_ranks import CollectiveMismatchError, ThreadCommunicator, simulate
from autopar.placement import Axis

__all__ = [
    "Collective",
    "CollectiveMismatchError",
    "Communicator",
    "Handle",
    "ProcessGroupCommunicator",
    "ThreadCommunicator",
    "simulate",
]


class Communicator(Protocol):
    """Collectives on local tensors, along mesh axes, for one rank.

    The members of a collective are ``axis.group(rank)``, in coordinate order.  Operands may be non-contiguous
    and are never written to; results are contiguous and fresh, except on an axis of size 1, where nothing
    happens, nothing is recorded, and the operand itself may come back.  Sums of 16-bit floats accumulate in
    float32.  ``bool`` sums are "any".  Every ``start_*`` returns at once (where the backend can) and
    ``wait()`` gives the result; all members must start their collectives in the same order.
    """

    @property
    def rank(self) -> int:
        """This device's logical rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """Number of devices that the program runs on."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        ...

    @property
    def calls(self) -> CallConsensus | None:
        """Compares what ranks do, where they are processes of their own."""
        ...

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Create what collectives on `axes` need; every rank calls it with the same axes, in one order."""
        ...

    def recording(self) -> AbstractContextManager[list[Collective]]:
        """A context in which every collective of this rank is appended to the list that it yields."""
        ...

    def note(self, collectives: Iterable[Collective]) -> None:
        """Record collectives that a compiled program runs by itself."""
        ...

    def watching(self, watch: Watch) -> AbstractContextManager[None]:
        """A context in which `watch` gets every collective before it starts, but those of compiled layers."""
        ...

    def serving(self, category: str, layer: str) -> AbstractContextManager[None]:
        """A context whose collectives serve parameters of `layer`: ``"gather"`` or ``"reduce"``; for `watching`."""
        ...

    def traced(self) -> TracedCommunicator:
        """A communicator for the time in which a program is traced, to be compiled."""
        ...

    def all_gather(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """The members' `x` joined along `dim`."""
        ...

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """This coordinate's equal slice along `dim` of the members' sum."""
        ...

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The members' sum or elementwise maximum."""
        ...

    def all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        """Slice c of `split_dim` goes to coordinate c; the slices received are joined along `concat_dim`."""
        ...

    def broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Tensor:
        """The `x` of coordinate `source`; shape and dtype must be equal on all members."""
        ...

    def start_all_gather(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """`all_gather`, not waited for."""
        ...

    def start_reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """`reduce_scatter`, not waited for."""
        ...

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Handle:
        """`all_reduce`, not waited for."""
        ...

    def start_all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Handle:
        """`all_to_all`, not waited for."""
        ...

    def start_broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Handle:
        """`broadcast`, not waited for."""
        ...

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        """Send `x` to coordinate `to`, whose next receive from here along `axis` gets it.

        No other member takes part.  Two ranks must start the messages between them in one order, those of both
        directions together (with NCCL they run one after the other).  `x` must not be written to until the handle has
        been waited for, which must happen some time; its result is `x`.
        """
        ...

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        """Receive what coordinate `source` sends here next along `axis`, of that shape and dtype."""
        ...
