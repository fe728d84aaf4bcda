"""A row that is repeated for every sample (class tokens, registers, queries) splits by samples."""

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.trace import trace

ROWS, TOKENS, WIDTH = 4, 4, 16


class _Tokens(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.registers = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.query = nn.Parameter(torch.randn(1, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def added(self, rows: int) -> Tensor:
        match self.way:
            case "repeat":
                return self.registers.repeat(rows, 1, 1)
            case "repeat_interleave":
                return self.registers.repeat_interleave(rows, dim=0)
            case "tile":
                return torch.tile(self.query, (rows, TOKENS, 1))
            case "new dims":
                return self.query.repeat(rows, 1)[:, None]
            case "other dims, too":
                return self.registers.repeat(rows, 1, 2)[:, :, ::2]
            case "normalized":
                repeated = self.query[:, None].repeat(rows, 2, 2, 1).flatten(1, 2)
                return repeated / repeated.norm(dim=-1, keepdim=True)
        raise AssertionError(self.way)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.linear(x + self.added(len(x))).mean(1), target)


WAYS = ("repeat", "repeat_interleave", "tile", "new dims", "other dims, too", "normalized")


@pytest.mark.parametrize("way", WAYS)
def test_repeated_rows_split_by_microbatches(way: str) -> None:
    torch.manual_seed(0)
    model = _Tokens(way)
    inputs = {"x": torch.randn(ROWS, TOKENS, WIDTH), "target": torch.randn(ROWS, WIDTH)}
    cluster = autopar.Cluster.of("h100", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=["data=2", "microbatches=2"])
    assert autopar.verify(model, plan, inputs, steps=2).loss_error < 1e-14


class _Experts(nn.Module):
    """As Llama 4 has it: every expert computes all tokens, which are repeated and scaled in merged rows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm, self.router = way, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.up, self.down = (nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4) for _ in range(2))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.norm(x).reshape(-1, WIDTH)
        scores = self.router(hidden).sigmoid()
        rows = hidden.repeat(2, 1)
        if self.way == "chain":
            rows = (rows + self.shift).tanh() + rows
        rows = rows * scores.transpose(0, 1).reshape(-1, 1)
        made = torch.bmm(torch.bmm(rows.view(2, -1, WIDTH), self.up).relu(), self.down).view(-1, WIDTH)
        summed = hidden + made.reshape(2, -1, WIDTH).sum(dim=0)
        return nn.functional.mse_loss(summed.view_as(x).mean(1), target)


@pytest.mark.parametrize("constraints", [("data=2", "microbatches=2"), ("tensor=2",)])
@pytest.mark.parametrize("way", ["scaled", "chain"])
def test_rows_that_are_merged_with_repeats_stay_apart(way: str, constraints: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = _Experts(way)
    inputs = {"x": torch.randn(ROWS, TOKENS, WIDTH), "target": torch.randn(ROWS, WIDTH)}
    cluster = autopar.Cluster.of("h100", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=[*constraints])
    assert autopar.verify(model, plan, inputs, steps=2).loss_error < 1e-14


class _Heads(nn.Module):
    """As DeBERTa has it: keys of all heads are repeated for every sample, and an index is expanded to all scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.positions = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(2, 2 * TOKENS, WIDTH // 2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = self.query(x).unflatten(-1, (2, -1)).transpose(1, 2).reshape(-1, TOKENS, WIDTH // 2)
        scores = rows @ self.positions.repeat(len(x), 1, 1).transpose(1, 2)
        row = torch.arange(TOKENS)
        index = (row[:, None] - row + TOKENS).expand(len(rows), -1, -1)
        chosen = scores.gather(2, index).softmax(-1) @ rows
        return nn.functional.mse_loss(chosen.view(len(x), 2, TOKENS, -1).transpose(1, 2).flatten(2).mean(1), target)


@pytest.mark.parametrize("constraints", [("data=2", "microbatches=2"), ("tensor=2",)])
def test_heads_of_a_batch_share_what_is_repeated_and_indices(constraints: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = _Heads()
    inputs = {"x": torch.randn(ROWS, TOKENS, WIDTH), "target": torch.randn(ROWS, WIDTH)}
    traced = trace(model, (), inputs)
    assert sum(constant.untyped_storage().nbytes() for constant in traced.constants.values()) == TOKENS**2 * 8
    plan = autopar.plan(model, autopar.Cluster.of("h100", devices_per_node=2), inputs, constraints=[*constraints])
    assert autopar.verify(model, plan, inputs, steps=2).loss_error < 1e-14
