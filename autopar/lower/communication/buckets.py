"""Move many tensors at once: equal collectives on one axis travel as one flat buffer.

Used for parameters (gathered before a layer) and their gradients (reduced after it).  Local moves run tensor
by tensor; wherever several tensors wait for the same kind of collective on the same axis, in the same dtype,
they share one.  The bytes recorded are the sum of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.lower.communication.collectives import Handle, merge_stack, split_stack
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.moves import COLLECTIVE_KINDS, Move, backward_moves, forward_moves, run_moves
from autopar.placement import Step

__all__ = ["BucketHandle", "start_gather_bucket", "start_reduce_bucket"]


def start_gather_bucket(
    xs: Sequence[Tensor], steps_list: Sequence[Sequence[Step]], communicator: Communicator, layer: str = ""
) -> BucketHandle:
    """Start the `forward` of each tensor's steps, outside autograd, with shared collectives.

    The first round of collectives is under way when this returns.  `layer` is the name of the layer that they are for.
    """
    return BucketHandle(xs, [forward_moves(steps) for steps in steps_list], communicator, ("gather", layer))


def start_reduce_bucket(
    gradients: Sequence[Tensor],
    steps_list: Sequence[Sequence[Step]],
    communicator: Communicator,
    layer: str = "",
    dtypes: Sequence[torch.dtype] | None = None,
) -> BucketHandle:
    """Start the `backward` of each gradient's steps in reverse, outside autograd, with shared collectives.

    The first round of collectives is under way when this returns.  `layer` is the name of the layer that they are for;
    `dtypes` are those in which gradients are reduced, if not in their own.
    """
    moves = [backward_moves(steps) for steps in steps_list]
    return BucketHandle(gradients, moves, communicator, ("reduce", layer), dtypes)


class BucketHandle:
    """Tensors on their way.  Every rank must start and wait for its buckets in the same order."""

    def __init__(
        self,
        xs: Sequence[Tensor],
        moves: Sequence[Sequence[Move]],
        communicator: Communicator,
        purpose: tuple[str, str],
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        """Start moving ``xs[i]`` by ``moves[i]``; `purpose` is passed to `Communicator.serving`; collectives move it
        in the dtype ``dtypes[i]``.
        """
        self._purpose = purpose
        self._dtypes = [x.dtype for x in xs] if dtypes is None else dtypes
        # Without those that are under way: their buffer is all that is kept of them.
        self._xs = {index: x.detach() for index, x in enumerate(xs)}
        self._left = [[move for move in own if _moves_something(move)] for own in moves]
        if len(self._xs) != len(self._left):
            raise ValueError(f"{len(self._xs)} tensors but {len(self._left)} lists of steps")
        self._communicator = communicator
        self._under_way = self._start_round()

    def wait(self) -> list[Tensor]:
        """The tensors after their moves, in the order given."""
        while self._under_way:
            for shared in self._under_way:
                buffer = shared.handle.wait()
                for index, x in zip(shared.indices, shared.unpack(buffer), strict=True):
                    self._xs[index] = x
            self._under_way = self._start_round()
        return [self._xs[index] for index in range(len(self._left))]

    def _start_round(self) -> list[_SharedCollective]:
        waiting: dict[tuple[Move, torch.dtype], list[int]] = {}
        for index, left in enumerate(self._left):
            while left and left[0].kind not in COLLECTIVE_KINDS:
                self._xs[index] = run_moves(self._xs[index], (left.pop(0),), self._communicator)
            if left:
                key = (Move(left[0].axis, left[0].kind, -1, -1), self._dtypes[index])
                waiting.setdefault(key, []).append(index)
        with self._communicator.serving(*self._purpose):
            return [self._start(move, indices, dtype) for (move, dtype), indices in waiting.items()]

    def _start(self, move: Move, indices: list[int], dtype: torch.dtype) -> _SharedCollective:
        moves = [self._left[index].pop(0) for index in indices]
        shapes = [self._xs[index].shape for index in indices]
        pack, unpack = _PACKERS[move.kind]
        packed = [pack(self._xs.pop(index), own) for index, own in zip(indices, moves, strict=True)]
        sizes = [piece.shape[-1] for piece in packed]
        flat = _side_by_side(packed, dtype)
        handle = _start_flat(flat, move, self._communicator)

        def unpack_all(buffer: Tensor) -> Iterable[Tensor]:
            pieces = torch.split_with_sizes(buffer, sizes, dim=-1)
            return [unpack(*args) for args in zip(pieces, shapes, moves, strict=True)]

        return _SharedCollective(indices, handle, unpack_all)


@dataclass(frozen=True)
class _SharedCollective:
    """One shared collective: whose tensors are in it, and how to take them out."""

    indices: list[int]
    handle: Handle
    unpack: Callable[[Tensor], Iterable[Tensor]]


def _side_by_side(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Along the last dim and in this dtype; a piece alone as it is, if it can be."""
    if len(pieces) == 1:
        return pieces[0].to(dtype)
    if all(piece.dtype == dtype for piece in pieces):
        return torch.cat(pieces, dim=-1)
    first, total = pieces[0], sum(piece.shape[-1] for piece in pieces)
    return torch.cat(pieces, dim=-1, out=first.new_empty((*first.shape[:-1], total), dtype=dtype))


def _moves_something(move: Move) -> bool:
    return move.kind != "none" and move.axis.size > 1


def _start_flat(flat: Tensor, move: Move, communicator: Communicator) -> Handle:
    """Run one collective on a buffer ``[total]``, or ``[size, total]`` where each coordinate has its row."""
    axis = move.axis
    if move.kind == "all_gather":
        return communicator.start_all_gather(flat, axis, 0).then(lambda got: got.view(axis.size, -1))
    if move.kind == "reduce_scatter":
        return communicator.start_reduce_scatter(flat, axis, 0).then(lambda got: got.view(-1))
    if move.kind == "all_to_all":
        return communicator.start_all_to_all(flat, axis, 0, 0)
    return communicator.start_all_reduce(flat, axis)


def _flatten(x: Tensor, move: Move) -> Tensor:
    return x.reshape(-1)


def _flatten_rows(x: Tensor, move: Move) -> Tensor:
    return split_stack(x, move.axis.size, move.to_dim).view(move.axis.size, -1)


def _join_gathered(rows: Tensor, shape: torch.Size, move: Move) -> Tensor:
    return merge_stack(rows.view(move.axis.size, *shape), move.dim)


def _join_exchanged(rows: Tensor, shape: torch.Size, move: Move) -> Tensor:
    sizes = list(shape)
    sizes[move.to_dim] //= move.axis.size
    return merge_stack(rows.view(move.axis.size, *sizes), move.from_dim)


def _take_scattered(row: Tensor, shape: torch.Size, move: Move) -> Tensor:
    sizes = list(shape)
    sizes[move.dim] //= move.axis.size
    return row.view(sizes)


def _take_reduced(row: Tensor, shape: torch.Size, move: Move) -> Tensor:
    return row.view(shape)


_PACKERS: dict[str, tuple[Callable[[Tensor, Move], Tensor], Callable[[Tensor, torch.Size, Move], Tensor]]] = {
    "all_gather": (_flatten, _join_gathered),
    "reduce_scatter": (_flatten_rows, _take_scattered),
    "all_to_all": (_flatten_rows, _join_exchanged),
    "all_reduce": (_flatten, _take_reduced),
}
