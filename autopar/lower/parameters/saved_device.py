"""Tensors that lie on the host while they are saved, in a file as of one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.lower.once import once

__all__ = ["saved_on"]

# By the storage: memory that is used again belongs to another storage, which has no entry.
_TYPES: dict[int, tuple[StorageWeakRef, str]] = {}


def saved_on(x: Tensor, device_type: str) -> Tensor:
    """`x`, of which ``torch.save`` writes that it was on a device of this type, wherever it is.

    ``torch.load`` without `map_location` then puts it on the current device of that type, which each rank has for
    itself; what one rank saves as on ``cuda:0`` would be loaded there by all.
    """
    if x.device.type != device_type:
        _register()
        for key in [key for key, (storage, _) in _TYPES.items() if storage.expired()]:
            del _TYPES[key]
        storage: Any = StorageWeakRef(x.untyped_storage())
        _TYPES[storage.cdata] = storage, device_type
    return x


@once
def _register() -> None:
    # Before 10, the priority of torch's own answer for the host's memory; loading is left to torch.
    torch.serialization.register_package(5, _location_of, lambda storage, location: None)


def _location_of(storage: Any) -> str | None:
    """As torch calls it: with a typed or an untyped storage."""
    own: Any = StorageWeakRef(storage.untyped() if isinstance(storage, torch.TypedStorage) else storage)
    known = _TYPES.get(own.cdata)
    return None if known is None or known[0].expired() else known[1]
