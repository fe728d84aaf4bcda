"""Composite ops of which a program has the pieces, which have rules, in place of torch's kernels for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["PIECES"]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`v` with norms `g` over all dims but `dim`, or over all dims if that is -1."""
    linalg: Any = torch.linalg
    return v * (g / linalg.vector_norm(v, 2, [d for d in range(v.ndim) if d != dim], keepdim=True))


def _lstm_cell(
    x: Tensor, states: list[Tensor], w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [batch, inputs], (h, c) [batch, hidden] -> (h, c)."""
    hidden, cell = states
    i, f, g, o = (linear(hidden, w_h, b_h) + linear(x, w_x, b_x)).chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru_cell(
    x: Tensor, hidden: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None
) -> Tensor:
    """x [batch, inputs], hidden [batch, hidden] -> hidden."""
    of_x, of_hidden = linear(x, w_x, b_x).chunk(3, 1), linear(hidden, w_h, b_h).chunk(3, 1)
    reset, update = (of_hidden[0] + of_x[0]).sigmoid(), (of_hidden[1] + of_x[1]).sigmoid()
    new = (of_x[2] + of_hidden[2] * reset).tanh()
    return (hidden - new) * update + new


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        x: Tensor, hidden: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None
    ) -> Tensor:
        """x [batch, inputs], hidden [batch, hidden] -> hidden."""
        return activation(linear(hidden, w_h, b_h) + linear(x, w_x, b_x))

    return cell


_ATEN = torch.ops.aten
PIECES: Mapping[Any, Callable[..., Any]] = {
    # Its kernel reads beyond its operands if their shapes don't belong together, so nobody may run it to find out how
    # it splits.
    _ATEN._weight_norm.default: _weight_norm,
    _ATEN.lstm_cell.default: _lstm_cell,
    _ATEN.gru_cell.default: _gru_cell,
    _ATEN.rnn_tanh_cell.default: _plain_cell(torch.tanh),
    _ATEN.rnn_relu_cell.default: _plain_cell(torch.relu),
}
"""What computes each of them."""
