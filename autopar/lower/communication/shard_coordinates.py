"""Where this rank stands among the shards that several axes cut, outermost first (row-major)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.lower.communication.communicator import Communicator
from autopar.placement import Axis

__all__ = ["num_shards", "shard_coordinate"]


def num_shards(axes: Sequence[Axis]) -> int:
    """Into how many slices `axes` cut."""
    return math.prod(axis.size for axis in axes)


def shard_coordinate(communicator: Communicator, axes: Sequence[Axis]) -> int:
    """Which of these slices is this rank's."""
    coordinate = 0
    for axis in axes:
        coordinate = coordinate * axis.size + axis.coordinate(communicator.rank)
    return coordinate
