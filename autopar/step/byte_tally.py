"""Bytes by what they belong to, with their total: the states that a fold over a step keeps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["ByteTally", "TensorTally"]

Key = TypeVar("Key", bound=Hashable)


class ByteTally(Generic[Key]):
    """What is allocated, by key; `total_bytes` is the sum."""

    def __init__(self) -> None:
        """Nothing is allocated."""
        self.total_bytes = 0.0
        self._bytes: dict[Key, float] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._bytes

    def allocate(self, key: Key, num_bytes: float) -> None:
        """Count `key`, unless it is there already."""
        if key not in self._bytes:
            self._bytes[key] = num_bytes
            self.total_bytes += num_bytes

    def free(self, key: Key) -> float:
        """Stop counting `key`; its bytes, 0 if it is not there."""
        num_bytes = self._bytes.pop(key, 0.0)
        self.total_bytes -= num_bytes
        return num_bytes

    def clear(self) -> None:
        """Free everything."""
        self._bytes.clear()
        self.total_bytes = 0.0


class TensorTally(Generic[Key]):
    """Tensors that several owners keep: each is counted once, until the last of its owners releases it."""

    def __init__(self) -> None:
        """Nothing is kept."""
        self._sizes = ByteTally[Key]()
        self._owners: dict[Key, set[Hashable]] = {}
        self._owned: dict[Hashable, list[Key]] = {}

    @property
    def total_bytes(self) -> float:
        """The bytes of all tensors that someone keeps."""
        return self._sizes.total_bytes

    def keep(self, tensor: Key, owner: Hashable, num_bytes: float) -> None:
        """`owner` keeps `tensor`.  A tensor without bytes of its own (a view) is not counted."""
        if num_bytes:
            self._sizes.allocate(tensor, num_bytes)
            self._owners.setdefault(tensor, set()).add(owner)
            self._owned.setdefault(owner, []).append(tensor)

    def release(self, owner: Hashable) -> None:
        """`owner` keeps nothing any more."""
        for tensor in self._owned.pop(owner, ()):
            owners = self._owners.get(tensor, set())
            owners.discard(owner)
            if not owners and tensor in self._sizes:
                del self._owners[tensor]
                self._sizes.free(tensor)

    def clear(self) -> None:
        """Nobody keeps anything."""
        self._sizes.clear()
        self._owners.clear()
        self._owned.clear()
