"""One movement of a tensor on one axis: local ones here, collectives through the communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.lower.communication.communicator import Communicator, TracedCommunicator
from autopar.placement import Axis, Placement, Step

__all__ = ["COLLECTIVE_KINDS", "Move", "backward_moves", "forward_moves", "run_moves"]

COLLECTIVE_KINDS = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})


class Move(NamedTuple):
    """A `forward` or `backward` of a `Step`, with its direction resolved.

    `kind` is one of `Step`'s words; `from_dim` is sharded before, `to_dim` after; -1 for none.  Or it is ``"deal"``,
    before a dim of several `parts` is cut: puts what each device gets side by side; or ``"collect"``, the inverse.
    """

    axis: Axis
    kind: str
    from_dim: int
    to_dim: int
    parts: int = 1

    @property
    def dim(self) -> int:
        """The sharded dim of a move that has one (all but all_to_all)."""
        return max(self.from_dim, self.to_dim)


def forward_moves(steps: Sequence[Step]) -> tuple[Move, ...]:
    """What happens to the value."""
    return tuple(move for step in steps for move in _moves(step.axis, step.forward, step.src, step.dst))


def backward_moves(steps: Sequence[Step]) -> tuple[Move, ...]:
    """What happens to the gradient: from the last step to the first, from `dst` to `src`."""
    return tuple(move for step in reversed(steps) for move in _moves(step.axis, step.backward, step.dst, step.src))


def _moves(axis: Axis, kind: str, src: Placement, dst: Placement) -> Iterator[Move]:
    """Slices are contiguous where they are cut and joined: what has parts is brought in that order before, or after."""
    if dst.parts > 1:
        yield Move(axis, "deal", dst.dim, dst.dim, dst.parts)
    yield Move(axis, kind, src.dim, dst.dim)
    if src.parts > 1:
        yield Move(axis, "collect", src.dim, src.dim, src.parts)


def run_moves(x: Tensor, moves: Sequence[Move], communicator: Communicator) -> Tensor:
    """The local part of the tensor after `moves`, outside autograd."""
    own = [move for move in moves if move.axis.size > 1 and move.kind != "none"]
    for index, move in enumerate(own):
        x = _MOVES[move.kind](x, move, communicator)
        is_cut_again = index + 1 < len(own) and own[index + 1].kind == "slice"
        if move.kind == "slice" and not is_cut_again:
            x = x.clone(memory_format=torch.contiguous_format)  # a view would keep the whole tensor alive
    return x


def _slice(x: Tensor, move: Move, communicator: Communicator) -> Tensor:
    length = x.shape[move.dim] // move.axis.size
    if x.shape[move.dim] % move.axis.size:
        raise ValueError(
            f"dim {move.dim} of a tensor of shape {tuple(x.shape)} does not divide by {move.axis.size} devices"
        )
    return x.narrow(move.dim, move.axis.coordinate(communicator.rank) * length, length)


def _pad(x: Tensor, move: Move, communicator: Communicator) -> Tensor:
    length = x.shape[move.dim]
    whole = x.new_zeros([*x.shape[: move.dim], length * move.axis.size, *x.shape[move.dim + 1 :]])
    whole.narrow(move.dim, move.axis.coordinate(communicator.rank) * length, length).copy_(x)
    return whole


def _mask(x: Tensor, move: Move, communicator: Communicator) -> Tensor:
    is_first = move.axis.coordinate(communicator.rank) == 0
    if isinstance(communicator, TracedCommunicator):
        # Every rank traces the same ops.  A compiler would fold plain zeros, and could then run the collectives that
        # read them in another pass, forward or backward, than on the ranks that read `x`: all would wait forever.
        keeps = torch.full((), is_first, device=x.device)
        return torch.where(keeps, x, torch.zeros((), dtype=x.dtype, device=x.device))
    return x if is_first else torch.zeros_like(x)


def _reorder(x: Tensor, dim: int, rows: int, columns: int) -> Tensor:
    """`dim` is rows x columns x a rest; columns x rows x the rest then."""
    cut = x.reshape(*x.shape[:dim], rows, columns, -1, *x.shape[dim + 1 :])
    return cut.transpose(dim, dim + 1).reshape(x.shape)


_MOVES: Mapping[str, Callable[[Tensor, Move, Communicator], Tensor]] = {
    "slice": _slice,
    "pad": _pad,
    "mask": _mask,
    "deal": lambda x, move, communicator: _reorder(x, move.dim, move.parts, move.axis.size),
    "collect": lambda x, move, communicator: _reorder(x, move.dim, move.axis.size, move.parts),
    "all_gather": lambda x, move, communicator: communicator.all_gather(x, move.axis, move.dim),
    "reduce_scatter": lambda x, move, communicator: communicator.reduce_scatter(x, move.axis, move.dim),
    "all_reduce": lambda x, move, communicator: communicator.all_reduce(x, move.axis),
    "all_to_all": lambda x, move, communicator: communicator.all_to_all(x, move.axis, move.to_dim, move.from_dim),
}
