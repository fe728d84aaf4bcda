"""Attention in pieces that repeat is attention on a batch of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.trace import trace
from autopar.trace.passes.masks import ATTENTION
from tests.trace.interpreter import interpret

_attend: Any = functional.scaled_dot_product_attention


class Pieces(nn.Module):
    """Attends within pieces of the tokens of one row."""

    def __init__(self, sizes: tuple[int, ...], swaps: bool, reads: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 18)
        self.sizes, self.swaps, self.reads = sizes, swaps, reads

    def forward(self, x: Tensor) -> Tensor:
        wholes = self.linear(x).view(-1, 3, 2, 3).permute(1, 2, 0, 3)[:, None].unbind(0)
        cut = [whole.split(self.sizes, dim=2) for whole in wholes]
        made = [_attend(*each, is_causal=True, scale=0.5) for each in zip(*cut, strict=True)]
        more = made[0].sum() if self.reads else 0.0
        made = [each.transpose(1, 2) for each in made] if self.swaps else made
        return torch.cat(made, 1 if self.swaps else 2).square().sum() + more


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("sizes", "swaps", "reads", "num_attention"),
    [
        ((4, 4, 4), True, False, 1),
        ((4, 4, 4), False, False, 1),
        ((2, 4, 2, 4, 2, 4), True, False, 2),
        ((4, 4, 2), True, False, 2),
        ((4, 4, 2, 4, 4, 2), True, False, 2),
        ((2, 2, 2, 4, 3, 3), False, False, 3),
        ((4, 2, 3), True, False, 3),
        ((4, 4, 4), True, True, 3),  # a result is read by itself
    ],
)
def test_pieces_that_repeat_are_a_batch(sizes: tuple[int, ...], swaps: bool, reads: bool, num_attention: int) -> None:
    torch.manual_seed(0)
    model, x = Pieces(sizes, swaps, reads), torch.randn(sum(sizes), 6)
    traced = trace(model, (x,), {})
    targets = [op.target for layer in traced.program.layers for op in layer.ops]
    assert targets.count(ATTENTION) == num_attention
    (found,), _ = interpret(traced, model, [x])
    torch.testing.assert_close(found, model(x))


REJOINED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "unbind": (lambda x: torch.cat(x.unbind()), True),
    "unbind inside": (lambda x: torch.cat(x.unbind(1), -1), True),
    "unbind inside, along another dim": (lambda x: torch.cat(x.unbind(1), -2), False),
    "split": (lambda x: torch.cat(x.split([1, 2])), True),
    "even split": (lambda x: torch.cat(x.split(2, dim=-1), 2), True),
    "chunk": (lambda x: torch.cat(x.chunk(3)), True),
    "reversed": (lambda x: torch.cat(x.unbind()[::-1]), False),
    "some": (lambda x: torch.cat(x.unbind()[:2]), False),
    "more": (lambda x: torch.cat([*x.unbind(), x[0]]), False),
    "along another dim": (lambda x: torch.cat(x.unbind(), 1), False),
    "split along another dim": (lambda x: torch.cat(x.split([1, 1, 1]), 1), False),
}


class Rejoined(nn.Module):
    def __init__(self, regroup: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.regroup = nn.Linear(6, 6), regroup

    def forward(self, x: Tensor) -> Tensor:
        made = self.regroup(self.linear(x))
        return (made * torch.arange(made.numel()).view_as(made)).square().sum()


@pytest.mark.parametrize("case", REJOINED)
def test_pieces_that_are_put_together_again_are_no_pieces(case: str) -> None:
    regroup, is_gone = REJOINED[case]
    torch.manual_seed(0)
    model, x = Rejoined(regroup), torch.randn(3, 4, 6)
    traced = trace(model, (x,), {})
    targets = {op.target for layer in traced.program.layers for op in layer.ops}
    assert ("aten.cat.default" not in targets) == is_gone
    (found,), _ = interpret(traced, model, [x])
    torch.testing.assert_close(found, model(x))
