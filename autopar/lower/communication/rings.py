"""Slices that travel round a ring of devices, overlapped with computing on the current one.

On one axis they go round a ring.  On several axes a ring of the inner ones runs for each step of one of the outer ones:
while a slice goes round the devices of a node, the next one is on its way from another node, so that a link between
nodes has as long for a slice as all steps inside of a node take, and all devices of a node use theirs.
Source of such double rings: Gu et al., "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context
Parallelism", 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.shards import Shards
from autopar.placement import Axis

__all__ = ["passing", "terms_of_passing"]


def passing(shards: Shards, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The number of each shard, this device's first, and the `x` of it."""
    return _passing(shards.communicator, shards.axes, x, 0)


def terms_of_passing(shards: Shards, x: Tensor, terms: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The sum over all devices of ``terms(number, x)`` of this device's `x`, which passes by all of them.

    Sums travel one device behind, each device adding its own, and go home with a step more.
    """
    return _terms(shards.communicator, shards.axes, x, 0, terms)


def _passing(talk: Communicator, axes: tuple[Axis, ...], x: Tensor, before: int) -> Iterator[tuple[int, Tensor]]:
    if not axes:
        yield before, x
        return
    axis, *inner = axes
    for step in range(axis.size):
        coming = _pass_on(talk, axis, x) if step + 1 < axis.size else None
        yield from _passing(talk, tuple(inner), x, _number(talk, axis, step, before))
        x = x if coming is None else coming.wait()


def _terms(
    talk: Communicator, axes: tuple[Axis, ...], x: Tensor, before: int, terms: Callable[[int, Tensor], Tensor]
) -> Tensor:
    if not axes:
        return terms(before, x)
    axis, *inner = axes
    carried: Handle | None = None
    for step in range(axis.size):
        coming = _pass_on(talk, axis, x) if step + 1 < axis.size else None
        own = _terms(talk, tuple(inner), x, _number(talk, axis, step, before), terms)
        carried = _pass_on(talk, axis, own if carried is None else own + carried.wait())
        x = x if coming is None else coming.wait()
    assert carried is not None
    return carried.wait()


def _number(talk: Communicator, axis: Axis, step: int, before: int) -> int:
    """Of the shard whose slice is here after so many steps on this axis."""
    return before * axis.size + (axis.coordinate(talk.rank) - step) % axis.size


def _pass_on(talk: Communicator, axis: Axis, x: Tensor) -> Handle:
    place = axis.coordinate(talk.rank)
    return talk.start_permute(x, axis, (place + 1) % axis.size, (place - 1) % axis.size)
