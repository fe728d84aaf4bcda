"""Windows by strides are those of one device, however tensors lie in memory on several."""

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.trace import trace

ROWS, TOKENS, WIDTH = 4, 4, 8


class _Windows(nn.Module):
    """Windows of two tokens each, of a tensor that lies in memory in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def windows(self, h: Tensor) -> Tensor:
        if self.way == "tokens first":
            h = h.transpose(0, 1).contiguous().transpose(0, 1)
        elif self.way == "viewed":
            h = h.view(TOKENS, ROWS, WIDTH).transpose(0, 1)
        elif self.way == "chunks":  # that overlap by a half, as Longformer makes them
            chunks = h.view(ROWS, 2, TOKENS // 2, WIDTH)
            size, stride = list(chunks.size()), list(chunks.stride())
            size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
            return chunks.as_strided(size, stride)
        elif self.way == "from the second token on":
            row, token, one = h.stride()
            return h.as_strided((ROWS, TOKENS - 2, 2, WIDTH), (row, token, token, one), h.storage_offset() + token)
        row, token, one = h.stride()
        return h.as_strided((ROWS, TOKENS - 1, 2, WIDTH), (row, token, token, one))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.last(self.windows(self.first(x))).flatten(1).mean(1), target)


WAYS = ("row-major", "tokens first", "viewed", "chunks", "from the second token on")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("constraints", [["data=2"], ["data=2", "microbatches=2"]])
def test_windows_are_those_of_one_device(way: str, constraints: list[str]) -> None:
    torch.manual_seed(0)
    model = _Windows(way)
    inputs = {"x": torch.randn(ROWS, TOKENS, WIDTH), "target": torch.randn(ROWS)}
    plan = autopar.plan(model, autopar.Cluster.of("h100", devices_per_node=2), inputs, constraints=constraints)
    assert autopar.verify(model, plan, inputs, steps=2, shrink=False).loss_error < 1e-14


class _Across(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t().as_strided((3, 4), (3, 1)).sum()  # rows of `x`, by what lies where in memory


class _Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.as_strided((2, 2), (3, 1)).zero_()
        return y.sum()


@pytest.mark.parametrize("model", [_Across(), _Written()])
def test_what_depends_on_memory_is_refused(model: nn.Module) -> None:
    with pytest.raises(TraceError, match="where tensors lie otherwise in memory"):
        trace(model, (torch.randn(4, 3),), {})
