"""The shards that several axes cut, and this rank's place among them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.communicator import Communicator
from autopar.placement import Axis

__all__ = ["Shards"]


@dataclass(frozen=True)
class Shards:
    """The shards that `axes` cut, outermost first (row-major), and what brings them together."""

    communicator: Communicator
    axes: tuple[Axis, ...]

    @property
    def count(self) -> int:
        """Into how many shards `axes` cut."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def index(self) -> int:
        """Which of them is this rank's."""
        index = 0
        for axis in self.axes:
            index = index * axis.size + axis.coordinate(self.communicator.rank)
        return index

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """All-reduce (``"sum"`` or ``"max"``) on each axis in turn."""
        for axis in self.axes:
            x = self.communicator.all_reduce(x, axis, "max" if op == "max" else "sum")
        return x

    def start_passing(self, x: Tensor, step: int = 1) -> Handle:
        """Start to give `x` to the shard `step` places on, 1 or -1, and to get that of the one before, round a ring.
        A ring of one keeps its own.

        On several axes, what has gone round a ring on the innermost one goes round one on those further out, too: a
        shard at the end of an inner ring takes what comes from there.
        """
        if not self.axes:
            return Handle(lambda: x)
        *outer, axis = self.axes
        place = axis.coordinate(self.communicator.rank)
        passing = self.communicator.start_permute(x, axis, (place + step) % axis.size, (place - step) % axis.size)
        if not outer:
            return passing

        def wait() -> Tensor:
            inside = passing.wait()
            further = Shards(self.communicator, tuple(outer)).start_passing(inside, step).wait()
            return further if place == (0 if step > 0 else axis.size - 1) else inside

        return Handle(wait)

    def exchange_mirrored(self, x: Tensor) -> Tensor:
        """The `x` of the shard that is as far from the last one as this one is from the first, which gets ours.

        Of a middle one its own.  Shapes are equal on all of them.
        """
        for axis in self.axes:
            mirrored = axis.size - 1 - axis.coordinate(self.communicator.rank)
            x = self.communicator.start_permute(x, axis, mirrored, mirrored).wait()
        return x
