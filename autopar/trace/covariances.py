"""``torch.cov`` and ``torch.corrcoef`` of a trace: torch looks at values for them, which a trace doesn't know."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = ["written_covariances"]


@contextmanager
def written_covariances() -> Generator[None]:
    """Inside, they are products and sums; with weights ``torch.cov`` stays as it is."""
    plain = torch.cov

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

    with ExitStack() as patches:
        for place in (torch, Tensor):
            patches.enter_context(patch.object(place, "cov", cov))
            patches.enter_context(patch.object(place, "corrcoef", corrcoef))
        yield
