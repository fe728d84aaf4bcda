"""The processes that measure at the same time, and how they agree."""

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
    """What agreeing needs of a communicator; `autopar.lower.communication.communicator.Communicator` has it."""

    @property
    def rank(self) -> int:
        """This process's rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes take part."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        ...

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Create what collectives on `axes` need; called on every rank in the same order."""
        ...

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The members' sum or maximum."""
        ...


@dataclass(frozen=True)
class Alone:
    """The `Ranks` of a single process."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Nothing to prepare."""

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Nothing to reduce."""
        return x


def max_over_ranks(ranks: Ranks, numbers: list[float]) -> list[float]:
    """The largest over all ranks of each of `numbers`; every rank gets the same."""
    if ranks.world_size == 1 or not numbers:
        return numbers
    mine = torch.tensor(numbers, dtype=torch.float64, device=ranks.device)
    largest = ranks.all_reduce(mine, Axis(ranks.world_size, 1), "max")
    return [float(number) for number in largest]


def share_text(ranks: Ranks, make: Callable[[], str]) -> str:
    """What rank 0's `make` gives, on every rank.

    Raises:
        ProfileError: on every rank, if `make` raised on rank 0.
    """
    text, cause = "", None
    if ranks.rank == 0:
        try:
            text = json.dumps({"text": make()})
        except Exception as error:  # noqa: BLE001  (whatever it is, the others must not wait for rank 0)
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
