"""What each rank writes about a call before it makes it, and the comparison with what the first rank wrote."""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.lower.communication.call_differences import WITH_GRADIENT
from autopar.lower.communication.digests import digest_generators, digest_of, start_reading

__all__ = ["NO_INPUTS", "CallRecords", "Named", "Store"]

Named = Iterable[tuple[str, Tensor | float | str]]
NO_INPUTS: dict[str, Any] = {"forms": [], "plain": {}, "inputs": ["", {}], "host": {}}  # of a record

_KEPT_CALLS = 1000  # a rank may be ahead of others where calls don't communicate; then records are deleted
_NO_STEPS = 0, 0, ""  # how many steps optimizers made, a digest of their hyperparameters, and what the last one was
_LONGEST = 60  # characters of a plain argument in a record, and in an error
_FEW = 1024  # entries; of an input that is read in Python there are no more


class Store(Protocol):
    """A store of torch.distributed."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        ...

    def get(self, key: str) -> bytes:
        """Read what is there."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Count, from 0; the sum."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all have been written."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` where nothing is written (and `expected` is ``""``); what is there then."""
        ...

    def delete_key(self, key: str) -> bool:
        """Forget."""
        ...


class CallRecords:
    """The records of one rank.

    Attributes:
        compares_draws: whether ranks must draw the same numbers from the default random generators.
    """

    def __init__(self, stores: Sequence[Store], rank: int, device: torch.device) -> None:
        """`stores` are those in which ranks compare, that of all hosts last."""
        self.compares_draws = True
        self._stores = stores
        self._rank = rank
        self._device = device
        self._steps = _NO_STEPS
        self._written: deque[tuple[int, str, Store]] = deque()  # what this rank wrote: call, key, store
        self._late: dict[str, Callable[[], list[Any]]] = {}  # digests of the call before, by `peers`

    def note_step(self, numbers: Sequence[float], what: str) -> None:
        """An optimizer makes a step with these hyperparameters; `what` names it in errors."""
        count, digest, _ = self._steps
        # Rounded, as hosts of other processors compute schedules with other last bits; a sum, as optimizers of single
        # parameters may step in any order.
        rounded = " ".join(f"{number:.6g}" for number in numbers)
        self._steps = count + 1, (digest + zlib.crc32(rounded.encode())) % 2**32, what

    def make(self, call: str, inputs: Named, peers: str, *, waits: bool) -> dict[str, Any]:
        """The record of `call`, in which all ranks wait for each other or not: of its inputs and what came before."""
        given = list(inputs)
        tensors = [(name, x) for name, x in given if isinstance(x, Tensor)]
        digests = {name: digest_of(x) for name, x in tensors}
        return {
            "call": call,
            "forms": [[name, _form_of(x)] for name, x in tensors],
            "plain": {name: _text_of(x) for name, x in given if not isinstance(x, Tensor)},
            "inputs": self._digests(call, digests, peers, waits=waits),
            "host": {name: int(digests[name]) for name, x in tensors if _is_compared_first(x)},
            "random": digest_generators(self._device) if self.compares_draws else 0,
            "steps": self._steps,
        }

    def exchange(self, number: int, peers: str, mine: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """The rank that came to this call first, of this host or of all, and its record; None: it is this rank."""
        key, record = f"{number}{peers}", json.dumps([self._rank, mine])
        first: tuple[int, dict[str, Any]] | None = None
        for store in self._stores:
            rank, theirs = json.loads(store.compare_set(key, "", record))
            if rank != self._rank:
                first = rank, theirs
                break  # the first rank of this host compares with the others
            self._written.append((number, key, store))
        while self._written and self._written[0][0] <= number - _KEPT_CALLS:
            _, key, store = self._written.popleft()
            store.delete_key(key)
        return first

    def _digests(self, call: str, digests: Mapping[str, Tensor], peers: str, *, waits: bool) -> list[Any]:
        """``[the call that they are of, {input: digest}]``.

        On an accelerator, but in the first call, they are of the call before: nothing is waited for.
        """
        read = start_reading(list(digests.values()), self._device)

        def digests_of_call() -> list[Any]:
            return [call, dict(zip(digests, read(), strict=True))]

        if self._device.type == "cpu" or waits:
            self._late.pop(peers, None)  # of a call that may have failed on some ranks before they had its inputs
            return digests_of_call()
        before, self._late[peers] = self._late.get(peers), digests_of_call
        return before() if before else ["", {}]


def _form_of(x: Tensor) -> str:
    """Shape, dtype, and whether a gradient is wanted, which backward may have to communicate."""
    wants_gradient = x.requires_grad and torch.is_grad_enabled()
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}{WITH_GRADIENT if wants_gradient else ''}"


def _text_of(x: float | str) -> str:
    """`x` as text that differs where `x` does, and is short."""
    text = repr(x)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({zlib.crc32(text.encode()):08x})"


def _is_compared_first(x: Tensor) -> bool:
    """Whether it is few integers in the host's memory: they may decide what runs, and are compared before that does."""
    return x.device.type == "cpu" and x.numel() <= _FEW and not x.is_floating_point()
