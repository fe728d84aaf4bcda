"""A forward that converts or moves its modules, which changes nothing where they are that way already."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace


class Converting(nn.Module):
    """A linear layer, after a conversion."""

    def __init__(self, convert: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.fc, self.convert = nn.Linear(8, 8), convert

    def forward(self, x: Tensor) -> Tensor:
        """[n, 8] -> []."""
        self.convert(self.fc, x)
        return self.fc(x).square().mean()


class OfItself(Converting):
    def forward(self, x: Tensor) -> Tensor:
        """[n, 8] -> []."""
        return self.to(x.device).fc(x).square().mean()


def targets(model: nn.Module) -> list[str]:
    program = trace(model, (torch.ones(4, 8),), {}, training=True).program
    return [op.target for layer in program.layers for op in layer.ops]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_modules_already_are_is_nothing(device: str) -> None:
    def convert(fc: nn.Module, x: Tensor) -> None:
        fc.to(x.dtype).to(x).float().cpu()

    plain = targets(Converting(lambda fc, x: None))
    for model in (Converting(convert), OfItself(lambda fc, x: None)):
        weight = model.fc.weight
        assert targets(model.to(device)) == plain
        assert device == "meta" or model.fc.weight is weight


def test_another_dtype_is_refused_by_line() -> None:
    what = (
        "forward converts Linear from torch.float32 on cpu to torch.float64 on cpu, "
        "but parameters stay as they are while a program runs"
    )
    with pytest.raises(TraceError, match=rf"test_module_conversions\.py:\d+: {what}"):
        targets(Converting(lambda fc, x: fc.double()))
