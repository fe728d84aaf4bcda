"""Parameters and buffers that are different tensors on the same memory: each would change with the other."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from autopar.errors import ModelError

__all__ = ["check_memory"]


class _MemoryRange(NamedTuple):
    """The addresses of a tensor's first byte and of the byte after its last one, and whether its values change."""

    start: int
    end: int
    name: str
    changes: bool


def check_memory(model: nn.Module, written: Collection[str]) -> None:
    """Raise ModelError if a tensor that training changes shares memory with another one.

    One device changes both; a parallel program stores them apart.

    Args:
        model: a module.  Tensors that have no memory, on the meta device, are skipped.
        written: names of the buffers that a forward writes to.
    """
    untyped: Any = model
    named = cast("chain[tuple[str, Tensor]]", chain(untyped.named_parameters(), untyped.named_buffers()))
    places = sorted(
        _place(name, x, name in written)
        for name, x in named
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta and x.numel()
    )
    last: _MemoryRange | None = None  # the one that ends last of those so far
    last_changing: _MemoryRange | None = None
    for place in places:
        other = last if place.changes else last_changing
        if other is not None and other.end > place.start:
            raise ModelError(
                f"{other.name!r} and {place.name!r} are different tensors that share memory, so that on one device "
                "each changes with the other; a parallel model stores them apart. Register one tensor under both names "
                "(model.head.weight = model.embed.weight), or copy one of them (x.clone())"
            )
        last = max(last or place, place, key=_end)
        if place.changes:
            last_changing = max(last_changing or place, place, key=_end)


def _end(place: _MemoryRange) -> int:
    return place.end


def _place(name: str, x: Tensor, is_written: bool) -> _MemoryRange:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return _MemoryRange(start, start + (last + 1) * x.element_size(), name, is_written or x.requires_grad)
