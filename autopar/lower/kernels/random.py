"""Random numbers that differ between shards, agree between replicas, and repeat.

Every draw of a forward pass has a seed of its own, derived from the pass's base seed, the op, the microbatch
and the shard.  So recomputing an op in backward draws the same numbers, in whatever order ops run.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.lower.communication.communicator import Communicator
from autopar.placement import Axis

__all__ = [
    "RandomState",
    "agree_base_seed",
    "derive_seed",
    "follow_first_rank",
    "generator_state",
    "generators_kept",
    "makes_generators",
    "random_scope",
    "resume_generator",
    "set_generator_state",
]

_MASK = (1 << 64) - 1
_scope_lock = threading.RLock()


def derive_seed(base: int, *parts: int) -> int:
    """Mix `base` and `parts`, in order, to a seed in [0, 2**63).

    Each part passes through splitmix64's finalizer.
    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    state = _mix(base & _MASK)
    for part in parts:
        state = _mix((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return state >> 1


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


@dataclass(frozen=True)
class RandomState:
    """The source of all randomness of one forward pass of one microbatch.

    Args:
        base_seed: equal on every rank, fresh for every forward pass; see `agree_base_seed`.
        device: where random tensors are drawn.
        microbatch: 0-based.
    """

    base_seed: int
    device: torch.device
    microbatch: int = 0

    def seed(self, op_index: int, shard: int) -> int:
        """The seed of the op at `op_index` (program-wide) on shard number `shard` (replicas share one)."""
        return derive_seed(self.base_seed, op_index, self.microbatch, shard)

    def generator(self, op_index: int, shard: int) -> torch.Generator:
        """A generator that starts at `seed`, for ops that take one (`autopar.dropout`)."""
        return torch.Generator(self.device).manual_seed(self.seed(op_index, shard))


def agree_base_seed(communicator: Communicator) -> int:
    """Draw a base seed from rank 0's default CPU generator for every rank.

    So ``torch.manual_seed`` on rank 0 makes a run repeatable, whatever the other ranks seeded: where their generators
    don't stand at the same place, they are told by one broadcast of 8 bytes.  Every process draws, so that those that
    were in step stay so.
    """
    seed = torch.zeros(1, dtype=torch.int64, device="cpu")
    if communicator.rank == 0 or communicator.calls is not None:
        seed = torch.randint(0, (1 << 63) - 1, (1,), dtype=torch.int64, device="cpu")
    if communicator.calls is not None and communicator.calls.is_in_step:
        return int(seed)
    everybody = Axis(communicator.world_size, 1)
    return int(communicator.broadcast(seed.to(communicator.device), everybody).item())


def follow_first_rank(communicator: Communicator) -> None:
    """Set torch's default generator of every process to where that of the first one stands; every rank calls it."""
    if communicator.calls is None or communicator.calls.is_in_step:
        return
    state = generator_state(communicator.device)
    shared = communicator.broadcast(state.to(communicator.device), Axis(communicator.world_size, 1))
    set_generator_state(shared.cpu(), communicator.device)


@contextmanager
def random_scope(seed: int, device: torch.device | str = "cpu") -> Generator[None]:
    """Inside, torch's default generator of `device` draws from `seed`.

    After, it goes on as if nothing had been drawn.  The generator is the process's, so one thread at a time
    is inside: never communicate there.
    """
    generator = _default_generator(torch.device(device))
    with _scope_lock:
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


def generator_state(device: torch.device | str) -> Tensor:
    """Where torch's default generator of `device` stands."""
    return _default_generator(torch.device(device)).get_state()


def generators_kept(device: torch.device) -> AbstractContextManager[None]:
    """A context after which torch's default generators of the host and of `device` stand where they did before."""
    torch_random: Any = torch.random  # incomplete annotations
    return torch_random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def set_generator_state(state: Tensor, device: torch.device | str) -> None:
    """Have torch's default generator of `device` go on from `state`, which is on the host."""
    _default_generator(torch.device(device)).set_state(state)


@contextmanager
def resume_generator(state: Tensor, device: torch.device | str) -> Generator[None]:
    """Inside, torch's default generator of `device` goes on from `state`, as another rank's did.

    After, if it stood there before, it has drawn what was drawn; else it goes on as if nothing had been.  One thread at
    a time is inside: never communicate there.
    """
    generator = _default_generator(torch.device(device))
    with _scope_lock:
        before = generator.get_state()
        generator.set_state(state)
        try:
            yield
        finally:
            if not torch.equal(before, state):
                generator.set_state(before)


@cache
def makes_generators(device: torch.device) -> bool:
    """Whether there can be other generators of `device` than its default one; not every plug-in has them."""
    try:
        torch.Generator(device)
    except (NotImplementedError, RuntimeError):
        return False
    return True


class _DefaultGenerator:
    """torch's default generator of a device whose module has functions for it, as torch asks of a plug-in."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def get_state(self) -> Tensor:
        return self._module.get_rng_state(self._device)

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self._device)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed_all(seed)


def _default_generator(device: torch.device) -> torch.Generator | _DefaultGenerator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.empty(0, device=device).device.index  # first of all: this is what makes the generators
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    return generators[index] if generators else _DefaultGenerator(device)
