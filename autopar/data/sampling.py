"""Samplers for one rank: they draw the same indices as a single device on every rank, and keep those of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from autopar.lower.kernels.random import random_scope
from autopar.lower.run.call_inputs import CallInputs

__all__ = ["AgreedDraws", "sampled"]

Take = Callable[[Any], Any]


def sampled(base: Any, draws: AgreedDraws, take: Take | None) -> Any:
    """A sampler of what `take` gives of the batches of `base`; None: of all there is."""
    return (_StatefulRows if hasattr(base, "state_dict") else _Rows)(base, draws, take)


@dataclass(frozen=True)
class AgreedDraws:
    """Makes what a sampler draws the same on all ranks."""

    inputs: CallInputs
    sampler: Any

    def __post_init__(self) -> None:
        generator: Any = getattr(self.sampler, "generator", None)
        if generator is not None and (seed := self.inputs.shared_seed(generator.get_state())) is not None:
            generator.manual_seed(seed)

    def begin(self, iterator: Iterator[Any]) -> Any:
        """The first of `iterator`, None at its end: samplers draw for a whole epoch when they begin."""
        draws = not isinstance(self.sampler, SequentialSampler) and getattr(self.sampler, "generator", None) is None
        seed = self.inputs.shared_seed(torch.get_rng_state()) if draws else None
        if seed is None:
            return next(iterator, None)
        torch.rand((), device="cpu")  # the next epoch is to find another state
        with random_scope(seed):
            return next(iterator, None)


class _Rows:
    """What `sampled` returns."""

    def __init__(self, base: Any, draws: AgreedDraws, take: Take | None) -> None:
        self.base = base
        self._draws = draws
        self._take = take

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.base)
        kind = _StatefulRowsIterator if hasattr(iterator, "state_dict") else _RowsIterator
        return kind(iterator, self._draws, self._take)


class _RowsIterator:
    def __init__(self, base: Any, draws: AgreedDraws, take: Take | None) -> None:
        self.base = base
        self._draws: AgreedDraws | None = draws
        self._take = take

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        draws, self._draws = self._draws, None
        batch: Any = next(self.base, None) if draws is None else draws.begin(self.base)
        if batch is None:
            raise StopIteration
        return batch if self._take is None else self._take(batch)


class _Stateful:
    """Has the state of `base`, which says where all ranks are."""

    base: Any

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


class _StatefulRows(_Rows, _Stateful):
    pass


class _StatefulRowsIterator(_RowsIterator, _Stateful):
    def update_state_dict(self) -> None:
        if hasattr(self.base, "update_state_dict"):
            self.base.update_state_dict()
