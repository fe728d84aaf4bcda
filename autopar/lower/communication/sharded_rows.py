"""A batch that is sharded by rows: a layer that reads this rank's rows needs no gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.communication.moves import Move
from autopar.lower.compat import from_torch_placement
from autopar.placement import REPLICATE, Axis, Layout, shard
from autopar.step.layer.data_split import DataSplit

__all__ = ["ShardedRows", "Spans", "dtensor_spans"]

Spans = tuple[tuple[int, int], ...]
"""Per global rank, the rows that it has: first and last + 1."""


class ShardedRows(LateTensor):
    """Stands for a whole tensor, of which this rank has rows; reading other rows gathers it, on all ranks at once."""

    _rows: Tensor
    _spans: Spans

    @classmethod
    def of_rows(cls, rows: Tensor, spans: Spans, gather: Callable[[Tensor], Tensor]) -> Self:
        """A stand-in for ``gather(rows)``; `rows` need no gradient."""
        whole = torch.empty((), dtype=rows.dtype, device=rows.device)
        made = cls.of(whole.expand(max(stop for _, stop in spans), *rows.shape[1:]), lambda: gather(rows))
        made._rows, made._spans = rows, spans
        return made

    def part(self, moves: Sequence[Move], rank: int) -> tuple[Tensor, Sequence[Move]]:
        """A tensor of `rank`, and which of `moves` to run on it, for what `moves` would give of the whole."""
        cuts = tuple(move.axis for move in moves if move.kind == "slice" and move.dim == 0)
        if all(move.kind in ("slice", "none") for move in moves) and _are_local(self._spans, cuts):
            start, stop = _cut_rows(self._spans, cuts, rank)
            own = self._rows
            if stop - start < len(own):
                own = own[start - self._spans[rank][0] :][: stop - start].clone()  # a view would keep all of them
            return own, [move for move in moves if move.kind == "slice" and move.dim != 0]
        return self.whole(), moves

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func` of whole tensors, but for a cast, which is one of the rows; nothing here has a gradient."""
        if func is Tensor.detach:
            return args[0]
        if func is Tensor.untyped_storage:
            return args[0]._rows.untyped_storage()
        if func is Tensor.to and not kwargs and len(args) == 2 and isinstance(args[1], torch.dtype):
            sharded: ShardedRows = args[0]
            return sharded.of_rows(sharded._rows.to(args[1]), sharded._spans, lambda _: sharded.whole().to(args[1]))
        return super().__torch_function__(func, types, args, kwargs)


def dtensor_spans(x: DTensor, world_size: int) -> Spans:
    """Which rows of `x` each rank has; () unless all of them have equally many, and nothing else of it is cut."""
    ranks: list[int] = cast("Any", x.device_mesh.mesh).flatten().tolist()
    layout = tuple(from_torch_placement(placement, x.dim()) for placement in x.placements)
    known = tuple(placement for placement in layout if placement in (REPLICATE, shard(0)))
    split = DataSplit(tuple(x.device_mesh.shape), cast("Layout", known))
    if len(known) < len(layout) or len(ranks) != world_size or not x.dim() or x.shape[0] % split.size:
        return ()
    each = x.shape[0] // split.size
    numbers = {rank: split.rank_of(place) for place, rank in enumerate(ranks)}
    return tuple((numbers[rank] * each, (numbers[rank] + 1) * each) for rank in range(world_size))


def _cut_rows(spans: Spans, cuts: Sequence[Axis], rank: int) -> tuple[int, int]:
    """The rows of `rank` where a batch is cut on these axes, outermost first."""
    start, length = 0, max(stop for _, stop in spans)
    for axis in cuts:
        length //= axis.size
        start += axis.coordinate(rank) * length
    return start, start + length


@lru_cache(maxsize=1024)
def _are_local(spans: Spans, cuts: tuple[Axis, ...]) -> bool:
    """Whether every rank has the rows that it wants."""
    needed = (_cut_rows(spans, cuts, rank) for rank in range(len(spans)))
    pairs = zip(spans, needed, strict=True)
    return all(first <= start and stop <= last for (first, last), (start, stop) in pairs)
