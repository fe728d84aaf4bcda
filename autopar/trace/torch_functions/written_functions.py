"""Torch functions that a trace writes otherwise, of ops that do the same.

For ``torch.cov`` and ``torch.corrcoef`` torch looks at values, which a trace doesn't know.  ``x.fill_diagonal_(value)``
writes to its memory by strides, which slices on devices don't have.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = ["written_functions"]


@contextmanager
def written_functions() -> Generator[None]:
    """Inside, they are written of products, sums and masks; ``torch.cov`` with weights and diagonals that wrap, or of
    more than two dims, stay as they are.
    """
    plain, plain_fill = torch.cov, Tensor.fill_diagonal_

    def cov(
        input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
    ) -> Tensor:
        if input.dim() > 2 or fweights is not None or aweights is not None:
            return plain(input, correction=correction, fweights=fweights, aweights=aweights)
        rows = input.reshape(-1, input.shape[-1] if input.dim() else 1)
        deviations = rows - rows.mean(1, keepdim=True)
        return (deviations @ deviations.mH / max(rows.shape[1] - correction, 0)).reshape([len(rows)] * 2).squeeze()

    def corrcoef(input: Tensor) -> Tensor:
        covariance = cov(input)
        if covariance.dim() == 0:
            return covariance / covariance
        deviation = covariance.diagonal().sqrt()
        return (covariance / deviation[:, None] / deviation).clamp(-1, 1)

    def fill_diagonal_(self: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
        if self.dim() != 2 or wrap:
            return plain_fill(self, fill_value, wrap)
        return self.masked_fill_(torch.ones(self.shape, dtype=torch.bool, device=self.device).tril().triu(), fill_value)

    with ExitStack() as patches:
        patches.enter_context(patch.object(Tensor, "fill_diagonal_", fill_diagonal_))
        for place in (torch, Tensor):
            patches.enter_context(patch.object(place, "cov", cov))
            patches.enter_context(patch.object(place, "corrcoef", corrcoef))
        yield
