"""Features of images in another order than that of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import FEATURE_ORDER, trace
from tests.trace.interpreter import interpret

MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)
ORDER = torch.tensor([[3, 1, 9, 9], [9, 9, 9, 9], [4, 0, 2, 9]])  # 9: no such feature


class Captions(nn.Module):
    def __init__(self, put: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.put = put

    def forward(self, text: Tensor, features: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
        assert not kwargs
        return (self.put(text, mask, self.linear(features)) * torch.arange(24.0).view(3, 4, 2)).sum()


def written(x: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = features
    return x


PUTS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda x, mask, features: x.masked_scatter(mask[..., None], features),
    lambda x, mask, features: torch.masked_scatter(x, mask[..., None].expand_as(x), features),
    lambda x, mask, features: torch.where(mask[..., None], written(x, mask, x[mask] + features), x),
]


@pytest.mark.parametrize("put", PUTS)
def test_places_get_the_features_that_the_order_names(put: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, text, features = Captions(put), torch.randn(3, 4, 2), torch.randn(6, 2)  # the last one is of zeros, or so
    traced = trace(model, (text, features, MASK), {FEATURE_ORDER: ORDER})
    (found,), _ = interpret(traced, model, [text, features, MASK, ORDER])
    torch.testing.assert_close(found, model(text, features[[3, 1, 4, 0, 2]], MASK))


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda x, mask, features: written(x, mask, features[:5]), "written where a mask is"),
        (lambda x, mask, features: x.view(12, 2).masked_scatter(mask.view(12, 1), features), "row by row"),
        (lambda x, mask, features: x + features.sum() * mask[..., None], "puts no features"),
    ],
)
def test_features_in_an_unknown_order_are_refused(
    put: Callable[[Tensor, Tensor, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        trace(Captions(put), (torch.randn(3, 4, 2), torch.randn(6, 2), MASK), {FEATURE_ORDER: ORDER})
