"""What ranks compare differs where tensors differ, also in order alone, and on whatever device they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.api import _state
from autopar.lower.communication.digests import digest_of, digest_tensors, weighted_sum
from autopar.planning.call_traces import trace_model

LONG = 3 * (1 << 16) + 5


def words(x: Tensor) -> Tensor:
    return weighted_sum(x.flatten().view(torch.int32))


@pytest.mark.parametrize("digest", [digest_of, words])
@pytest.mark.parametrize("count", [2, 100, LONG])
def test_the_order_of_two_elements_counts(digest: Callable[[Tensor], Tensor], count: int) -> None:
    """Powers of two differ in few bits: weights are to keep them apart all the same."""
    places = {0, 1, count // 2, count - 1}
    assert len({int(digest(torch.ones(count).index_fill(0, torch.tensor(place), 2.0))) for place in places}) == len(
        places
    )


def test_rows_that_change_places() -> None:
    x = torch.randn(400, 300, generator=torch.Generator().manual_seed(0))
    order = torch.arange(400).roll(1)
    for digest in (digest_of, words):
        assert len({int(digest(x)), int(digest(x[order])), int(digest(x.T.contiguous())), int(digest(x * 2))}) == 4
        assert int(digest(x)) == int(digest(x.clone()))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int8])
def test_every_dtype(dtype: torch.dtype) -> None:
    x = torch.zeros(9).to(dtype)
    y = x.clone()
    y[8] = 1
    assert int(digest_of(x[1:])) != int(digest_of(y[1:]))
    assert int(digest_of(torch.zeros((), dtype=dtype))) != int(digest_of(torch.ones((), dtype=dtype)))
    assert digest_tensors([("x", x)]) != digest_tensors([("x", x.view(3, 3))])
    assert int(digest_of(x[:0])) == int(digest_of(x[:0]))


def test_what_repeats_is_looked_at_once() -> None:
    wide = torch.arange(4.0).expand(1 << 40, 4)
    assert digest_tensors([("x", wide)]) != digest_tensors([("x", wide[1:])])
    assert int(digest_of(wide)) == int(digest_of(torch.arange(4.0)))


class Scaled(nn.Module):
    """With a tensor that is neither a parameter nor a buffer."""

    def __init__(self, scale: float, permuted: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            weight = torch.arange(16.0).view(4, 4)
            self.linear.weight.copy_(weight.flip(0) if permuted else weight)
            self.linear.bias.zero_()
        self.scale = torch.tensor([1.0, scale, 3.0, 4.0])

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 4] -> a scalar."""
        return (self.linear(x) * self.scale).sum()


def test_models_that_differ_in_order_or_in_constants() -> None:
    found = [digest_tensors(_state(model, trace_model(model, (torch.ones(2, 4),)))) for model in (
        Scaled(1.0), Scaled(1.0), Scaled(2.0), Scaled(1.0, permuted=True)
    )]  # fmt: skip
    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_one_element_whose_stride_is_zero(dtype: torch.dtype) -> None:
    assert int(digest_of(torch.ones((), dtype=dtype).expand(1))) == int(digest_of(torch.ones(1, dtype=dtype)))
