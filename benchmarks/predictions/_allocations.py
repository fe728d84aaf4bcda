"""What a rank really allocates: every storage that an op makes, from birth to death, by what it was for."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.compat import DispatchMode, leaves_of, local_part_of

__all__ = ["AllocationTracker", "Usage"]

_torch: Any = torch


@dataclass(eq=False)
class _Block:
    """One storage: its bytes, when it was made and given up (counted in ops), and whether in a backward pass."""

    num_bytes: int
    born: int
    in_backward: bool
    died: int = -1
    kind: str = ""


@dataclass(frozen=True)
class Usage:
    """Bytes by kind: the most of each over the step, and all of them at the moment of the step's peak."""

    most: Mapping[str, float]
    at_peak: Mapping[str, float]

    @property
    def peak_bytes(self) -> float:
        """The most bytes at any moment."""
        return sum(self.at_peak.values())


class AllocationTracker(DispatchMode):
    """Watches all ops of this thread.  Storages that were there before count if they are `add`ed."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._blocks: list[_Block] = []
        self._known: dict[int, tuple[weakref.ref[Any], _Block]] = {}
        self._clock = 0
        self._turns: list[int] = []
        self._was_backward = False
        self._is_paused = False
        self._making = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and note what it returns; ops on DTensors are seen when they run on their local tensors."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        now = _is_in_backward()
        if now and not self._was_backward:
            self._turns.append(self._clock)
        self._was_backward = now
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            for leaf in leaves_of(result):
                if isinstance(leaf, Tensor) and not leaf.is_meta:
                    self.add(leaf, self._making)
        return result

    def add(self, tensor: Tensor, kind: str = "") -> None:
        """Count the tensor's storage from now on, as what it is for if `kind` says it."""
        storage = local_part_of(tensor).untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        known = self._known.get(key)
        if known is None or known[0]() is None:
            self._clock += 1
            block = _Block(storage.nbytes(), self._clock, self._was_backward)
            self._blocks.append(block)
            known = weakref.ref(storage, lambda _: self._bury(block)), block
            self._known[key] = known
        if kind and not known[1].kind:
            known[1].kind = kind

    @property
    def now(self) -> int:
        """The clock."""
        return self._clock

    @contextmanager
    def paused(self) -> Generator[None]:
        """Inside, ops are not watched: a simulated transport works otherwise than a real one."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def making(self, kind: str) -> Generator[None]:
        """Inside, all that ops make is of this kind."""
        before, self._making = self._making, kind
        try:
            yield
        finally:
            self._making = before

    def usage(self, kinds: Sequence[str], since: int = 0) -> Usage:
        """What was held from then on of these kinds.

        What has no kind of its own was saved if it was made in a forward pass and there when a backward began; else it
        was transient.
        """
        end = self._clock + 1
        changes: list[tuple[int, int, float, str]] = []
        for block in self._blocks:
            died = end if block.died < 0 else block.died
            if died <= since:
                continue
            kind = block.kind or self._usual_kind(block, died)
            if kind not in kinds:
                continue
            changes += [(max(block.born, since), 1, block.num_bytes, kind), (died, 0, -block.num_bytes, kind)]
        held = dict.fromkeys(kinds, 0.0)
        most, at_peak, peak = dict(held), dict(held), 0.0
        for _, _, num_bytes, kind in sorted(changes):
            held[kind] += num_bytes
            most[kind] = max(most[kind], held[kind])
            total = sum(held.values())
            if total > peak:
                peak, at_peak = total, dict(held)
        return Usage(most, at_peak)

    def _usual_kind(self, block: _Block, died: int) -> str:
        is_over_turn = any(block.born <= turn < died for turn in self._turns)
        return "saved activations" if is_over_turn and not block.in_backward else "transients"

    def _bury(self, block: _Block) -> None:
        self._clock += 1
        block.died = self._clock


def _is_in_backward() -> bool:
    """Whether autograd's engine runs this thread now."""
    return _torch._C._current_graph_task_id() != -1
