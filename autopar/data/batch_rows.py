"""The rows of a batch: counts them, says which belong to a rank, and selects these from the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

__all__ = ["count_rows", "cut_rows", "own_rows"]


def own_rows(count: int, rank: int, size: int) -> slice:
    """Which of `count` rows part `rank` of `size` has: as equally many as possible, the first parts one more."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def count_rows(batch: Any) -> int | None:
    """Dim 0 of the first tensor in `batch` that has dims; None without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    parts = _parts(batch)
    return next((n for part in parts if (n := count_rows(part)) is not None), None)


def cut_rows(batch: Any, rows: slice, count: int) -> Any:
    """`batch` with these of its `count` rows, in tensors and in lists of as many entries (such as texts)."""
    if isinstance(batch, Tensor):
        return batch[rows] if batch.shape[:1] == (count,) else batch
    parts = _parts(batch)
    if not parts:
        return batch
    if isinstance(batch, list) and len(parts) == count and count_rows(parts) is None:
        return parts[rows]
    return _rebuilt(batch, [cut_rows(part, rows, count) for part in parts])


def _rebuilt(batch: Any, made: list[Any]) -> Any:
    kind: Any = batch.__class__
    if isinstance(batch, Mapping):
        return kind(dict(zip(cast("Mapping[Any, Any]", batch), made, strict=True)))
    if dataclasses.is_dataclass(kind):
        names = (field.name for field in dataclasses.fields(kind))
        return dataclasses.replace(batch, **dict(zip(names, made, strict=True)))
    return kind(*made) if hasattr(kind, "_fields") else kind(made)


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(cast("Mapping[Any, Any]", batch).values())
    if isinstance(batch, list | tuple):
        return list(cast("list[Any]", batch))
    return _fields(batch)


def _fields(batch: Any) -> list[Any]:
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    return []
