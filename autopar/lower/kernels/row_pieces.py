"""Products whose rows travel in pieces: one piece is multiplied while the next one is under way.

`layer.pieces` says where, `costs.piece_seconds` in how many pieces.  The collectives are those of any
communicator, started without waiting, so the same code runs on GPUs, on gloo and on simulated ranks.  Products write
to where their rows belong, so that pieces take few copies more than a whole collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.communicator import Communicator
from autopar.placement import Step

__all__ = ["PiecewiseMove", "moved_row_product", "row_products_of_moved"]


@dataclass(frozen=True)
class PiecewiseMove:
    """A move of rows along one axis, and how it is cut.

    Args:
        step: the move.
        dim: of the rows that is cut.  If it is the one that the move shards, a piece has some rows of every shard.
        count: into how many pieces.
        communicator: of this rank.
    """

    step: Step
    dim: int
    count: int
    communicator: Communicator

    @property
    def sharded(self) -> int:
        """The dim that the move shards; -1 if none."""
        return max(self.step.src.dim, self.step.dst.dim)

    def new_whole(self, shard: Tensor, columns: int) -> Tensor:
        """Room for the rows of all shards, if `shard` has those of one."""
        shape = [*shard.shape[:-1], columns]
        if self.sharded >= 0:
            shape[self.sharded] *= self.step.axis.size
        return shard.new_empty(shape)

    def whole(self, x: Tensor, index: int) -> Tensor:
        """A view of piece `index` of a tensor with the rows of all shards: ``[.., shards, rows, ..]``."""
        if self.sharded < 0:
            return self.shard(x, index)
        size = self.step.axis.size
        if self.dim == self.sharded:
            return _split(x, self.dim, size, self.count).select(self.dim + 1, index)
        return _split(self.shard(x, index), self.sharded, size)

    def shard(self, x: Tensor, index: int) -> Tensor:
        """A view of piece `index` of a tensor with one shard's rows."""
        length = x.shape[self.dim] // self.count
        return x.narrow(self.dim, index * length, length)

    def matrices(self, view: Tensor) -> Tensor:
        """A piece of `whole` as one matrix, or one for each shard where these lie apart; a view if that is possible."""
        if self.dim == self.sharded and math.prod(view.shape[: self.sharded]) == 1:
            return view.reshape(self.step.axis.size, -1, view.shape[-1])
        return view.reshape(-1, view.shape[-1])

    def gathered(self, x: Tensor, whole: Tensor) -> Iterator[Tensor]:
        """Gather `x` into `whole`; yields its pieces as they arrive, while the next one is under way."""
        before: Handle | None = None
        for index in range(self.count + 1):
            started: Handle | None = None
            if index < self.count:
                started = self.communicator.start_gather_stack(self.shard(x, index), self.step.axis)
            if before is not None:
                place = self.whole(whole, index - 1)
                place.copy_(before.wait().movedim(0, self.sharded))
                yield place
            before = started

    def start_reducing(self, terms: Tensor, like: Tensor) -> Handle:
        """Start to add up the terms of a piece; `terms` is `matrices` of a view with the rows of `like`."""
        kind = self.step.forward if self.step.src.kind == "P" else self.step.backward
        axis, columns = self.step.axis, terms.shape[-1]
        if kind == "all_reduce":
            return self.communicator.start_all_reduce(terms.view(*like.shape[:-1], columns), axis)
        if terms.ndim == 3:
            lead = [1] * self.sharded
            stack = terms.view(axis.size, *lead, *like.shape[self.sharded + 1 : -1], columns)
            return self.communicator.start_scatter_stack(stack, axis)
        joined = terms.view(*like.shape[:-1], columns).flatten(self.sharded, self.sharded + 1)
        return self.communicator.start_reduce_scatter(joined, axis, self.sharded)


@dataclass
class _Reducing:
    """Pieces that are added up one by one into `result`, two under way at a time."""

    rows: PiecewiseMove
    result: Tensor
    index: int = 0
    last: Handle | None = None

    def add(self, started: Handle) -> None:
        self.finish()
        self.last = started

    def finish(self) -> Tensor:
        """Wait for the last one."""
        if self.last is not None:
            self.rows.shard(self.result, self.index).copy_(self.last.wait())
            self.index += 1
            self.last = None
        return self.result


def _multiply(rows: Tensor, matrix: Tensor, added: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``rows @ matrix + added``; rows are a matrix, or several."""
    if rows.ndim == 2:
        return torch.mm(rows, matrix, out=out) if added is None else torch.addmm(added, rows, matrix, out=out)
    wide = matrix.expand(rows.shape[0], *matrix.shape)
    return torch.bmm(rows, wide, out=out) if added is None else torch.baddbmm(added, rows, wide, out=out)


def _multiply_into(pieces: PiecewiseMove, view: Tensor, matrix: Tensor, added: Tensor | None, out: Tensor) -> None:
    """Put the product of a piece in its place."""
    rows, place = pieces.matrices(view), pieces.matrices(out)
    if place.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        _multiply(rows, matrix, added, out=place)
    else:
        out.copy_(_multiply(rows, matrix, added).view(out.shape))


def row_products_of_moved(
    x: Tensor, rows: PiecewiseMove, matrices: Sequence[tuple[Tensor, Tensor | None, bool]]
) -> tuple[Tensor, ...]:
    """Products of `x` after its move.

    Args:
        x: ``[..., k]``, this rank's rows.
        rows: the move, an all-gather forward and a reduce-scatter backward, or nothing and an all-reduce.
        matrices: per product a matrix ``[k, n]``; what is added to every row, ``[n]`` or None; and whether the matrix
            is ``[n, k]`` in truth.
    """
    operands = [each for matrix, added, _ in matrices for each in (matrix, added)]
    transposed = tuple(each for _, _, each in matrices)
    return call_function(_ProductsOfMoved, x, rows, transposed, *operands)


def moved_row_product(x: Tensor, rows: PiecewiseMove, matrix: Tensor, added: Tensor | None, transposed: bool) -> Tensor:
    """The move of a product, whose results are terms of a sum.

    Args:
        x: ``[..., k]``.
        rows: the move, a reduce-scatter forward and an all-gather backward, or an all-reduce forward.
        matrix: ``[k, n]``.
        added: to every row, ``[n]``; or None.
        transposed: whether the matrix is ``[n, k]``.
    """
    return call_function(_MovedProduct, x, rows, transposed, matrix, added)


def _split(x: Tensor, dim: int, *sizes: int) -> Tensor:
    """A view with `dim` as a grid of these sizes, the rest inside."""
    return x.view(*x.shape[:dim], *sizes, x.shape[dim] // math.prod(sizes), *x.shape[dim + 1 :])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _turned(matrix: Tensor, turn: bool) -> Tensor:
    return matrix.t() if turn else matrix


def _matrix_gradient(gradient: Tensor, x: Tensor, *, transposed: bool) -> Tensor:
    wide, narrow = _flat(gradient), _flat(x)
    return wide.t().mm(narrow) if transposed else narrow.t().mm(wide)


class _ProductsOfMoved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: PiecewiseMove, transposed: tuple[bool, ...], *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        matrices: Any = operands[::2]
        each = [
            (_turned(matrix, t), added) for matrix, added, t in zip(matrices, operands[1::2], transposed, strict=True)
        ]
        ctx.rows, ctx.transposed, ctx.shape = rows, transposed, x.shape
        if rows.step.forward == "none":
            whole = x
            results = [_multiply(_flat(x), m, added).view(*x.shape[:-1], m.shape[1]) for m, added in each]
        else:
            whole = rows.new_whole(x, x.shape[-1])
            results = [rows.new_whole(x, m.shape[1]) for m, _ in each]
            for index, piece in enumerate(rows.gathered(x, whole)):
                for (m, added), result in zip(each, results, strict=True):
                    _multiply_into(rows, piece, m, added, rows.whole(result, index))
        ctx.save_for_backward(whole if any(ctx.needs_input_grad[3::2]) else None, *matrices)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        whole, *matrices = ctx.saved_tensors
        rows: PiecewiseMove = ctx.rows
        each = list(zip(gradients, matrices, ctx.transposed, strict=True))
        reducing = _Reducing(rows, gradients[0].new_empty(ctx.shape))
        if ctx.needs_input_grad[0]:
            for index in range(rows.count):
                views = [rows.whole(gradient, index) for gradient in gradients]
                total: Tensor | None = None
                for view, (_, matrix, t) in zip(views, each, strict=True):
                    total = _multiply(rows.matrices(view), _turned(matrix, not t), total, out=total)
                assert total is not None
                reducing.add(rows.start_reducing(total, views[0]))
        gradients_of: list[Tensor | None] = []
        for number, (gradient, _, t) in enumerate(each):
            wants_matrix, wants_added = ctx.needs_input_grad[3 + 2 * number : 5 + 2 * number]
            gradients_of.append(_matrix_gradient(gradient, whole, transposed=t) if wants_matrix else None)
            gradients_of.append(_flat(gradient).sum(0) if wants_added else None)
        return reducing.finish() if ctx.needs_input_grad[0] else None, None, None, *gradients_of


class _MovedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: PiecewiseMove, transposed: bool, matrix: Tensor, added: Tensor | None
    ) -> Tensor:
        ctx.rows, ctx.transposed, ctx.shape = rows, transposed, x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, matrix)
        turned = _turned(matrix, transposed)
        shape = [*x.shape[:-1], turned.shape[1]]
        if rows.step.forward == "reduce_scatter":
            shape[rows.sharded] //= rows.step.axis.size
        reducing = _Reducing(rows, x.new_empty(shape))
        for index in range(rows.count):
            view = rows.whole(x, index)
            reducing.add(rows.start_reducing(_multiply(rows.matrices(view), turned, added), view))
        return reducing.finish()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        rows: PiecewiseMove = ctx.rows
        wants_x, _, _, wants_matrix, wants_added = ctx.needs_input_grad
        (gradient,) = gradients
        turned = _turned(matrix, not ctx.transposed)
        for_x = gradient.new_empty(ctx.shape) if wants_x else None
        whole = gradient
        if rows.step.backward == "all_gather":
            whole = rows.new_whole(gradient, gradient.shape[-1])
            for index, piece in enumerate(rows.gathered(gradient, whole)):
                if for_x is not None:
                    _multiply_into(rows, piece, turned, None, rows.whole(for_x, index))
        elif for_x is not None:
            torch.mm(_flat(gradient), turned, out=_flat(for_x))
        for_matrix = _matrix_gradient(whole, x, transposed=ctx.transposed) if wants_matrix else None
        return for_x, None, None, for_matrix, _flat(whole).sum(0) if wants_added else None
