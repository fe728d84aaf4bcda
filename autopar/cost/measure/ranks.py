"""The processes that measure at the same time, and how they exchange results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from autopar.errors import ProfileError
from autopar.placement import Axis

__all__ = ["Alone", "Ranks", "max_over_ranks", "share_text"]


class Ranks(Protocol):
    """The methods of `autopar.lower.communication.communicator.Communicator` that exchanging results needs."""

    @property
    def rank(self) -> int:
        """This process's rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """The number of processes."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        ...

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Create the process groups of `axes`; called on every rank in the same order."""
        ...

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The sum or maximum over the members."""
        ...


@dataclass(frozen=True)
class Alone:
    """The `Ranks` of a single process."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Do nothing: a single process needs no groups."""

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Return `x`."""
        return x


def max_over_ranks(ranks: Ranks, numbers: list[float]) -> list[float]:
    """The maximum over all ranks of each of `numbers`, on every rank."""
    if ranks.world_size == 1 or not numbers:
        return numbers
    local = torch.tensor(numbers, dtype=torch.float64, device=ranks.device)
    maximum = ranks.all_reduce(local, Axis(ranks.world_size, 1), "max")
    return [float(number) for number in maximum]


def share_text(ranks: Ranks, make: Callable[[], str]) -> str:
    """Call `make` on rank 0, and return its result on every rank.

    Raises:
        ProfileError: on every rank, if `make` raised on rank 0.
    """
    text, cause = "", None
    if ranks.rank == 0:
        try:
            text = json.dumps({"text": make()})
        except Exception as error:  # noqa: BLE001  (after any error, other ranks must not wait for rank 0)
            text, cause = json.dumps({"error": f"{error}"}), error
    shared = json.loads(_share(ranks, text))
    if "error" in shared:
        raise ProfileError(shared["error"]) from cause
    return shared["text"]


def _share(ranks: Ranks, text: str) -> str:
    data = text.encode() if ranks.rank == 0 else b""
    length = int(max_over_ranks(ranks, [float(len(data))])[0])
    codes = [float(code) for code in data] or [0.0] * length
    return bytes(int(code) for code in max_over_ranks(ranks, codes)).decode()
