"""Balanced loaders of groups with pipeline stages, on real processes, as a user's script has them."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader

import autopar
from autopar.plan.prediction import GroupRow, LengthPlan, LengthPrediction
from tests.data.test_balanced import rows_of_tokens
from tests.lower.groups.cases import TOKENS, family
from tests.ranks import run_ranks

BATCH, STEPS, WIDTH = 12, 5, 16


class Decoder(nn.Module):
    """A causal language model of bytes, in which documents of a row attend to themselves alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        number = (position_ids == 0).cumsum(1)
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = (number[:, :, None] == number[:, None, :]) & (place[:, None] >= place[None, :])
        x = self.embed(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x, mask[:, None])
        logits = self.head(x)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


def read_documents() -> list[dict[str, Tensor]]:
    """Words of the standard library's `heapq`, the longest cut to a row."""
    words = Path(sysconfig.get_path("stdlib"), "heapq.py").read_bytes().split()[: BATCH * STEPS]
    tokens = [torch.tensor(list(word[:TOKENS])) for word in words]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def train(path: str) -> tuple[list[float], list[tuple[int, ...]], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of steps on this rank, shapes of its batches, gradients of the first step, and parameters at the end."""
    mesh = init_device_mesh("cpu", (4,))
    example, documents = rows_of_tokens(4, TOKENS), read_documents()
    model: Any = autopar.parallelize(Decoder().double(), mesh, example, inputs="local", plan=path, profile=False)
    loader = DataLoader(documents, batch_size=BATCH)  # type: ignore[arg-type]
    lengths = [len(each["input_ids"]) for each in documents]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    shapes: list[tuple[int, ...]] = []
    first: dict[str, Tensor] = {}
    for batch in autopar.balanced(loader, model, length_index=lengths, shifts="labels"):
        loss = model(**batch)
        loss.backward()
        if not losses:
            own = {name: p.grad for name, p in model.named_parameters()}
            first = {name: model._whole(name, own.get(name)) for name, _ in Decoder().named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        shapes.append(tuple(batch["input_ids"].shape))
    return losses, shapes, first, model.full_state_dict()


def train_alone() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The same on one device, each document alone."""
    model, documents = Decoder().double(), read_documents()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for start in range(0, len(documents), BATCH):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for each in documents[start : start + BATCH]:
            length = len(each["labels"])
            if length > 1:
                row = {name: x[None] for name, x in each.items()}
                total = total + (length - 1) * model(**row, position_ids=torch.arange(length)[None])
                count += length - 1
        loss = total / count
        loss.backward()
        if not losses:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("schedule", ["schedule=1f1b", "cuts=1,2,3 schedule=interleaved_1f1b"])
def test_balanced_batches_of_groups_with_stages_train_as_one_device(schedule: str, tmp_path: Path) -> None:
    found = family(Decoder().double(), 4, [(1, ""), (1, "")], f"pipeline=2 {schedule} data=2 zero=1")
    assert len(found.plan.stages) == (4 if "cuts" in schedule else 2)
    # So few ranks have no groups by themselves, and prices of so small a model wouldn't choose them.
    groups = (GroupRow(1, 16, 1.0, 1e-3), GroupRow(1, 8, 0.5, 1e-3))
    row = replace(found.plan.prediction.row, token_s=0.1)
    expected = LengthPrediction(plans=(LengthPlan(row),), groups=groups, coupling_s=0.5)
    replace(found.plan, prediction=replace(found.plan.prediction, lengths=expected)).save(tmp_path / "plan.json")
    losses, first, state = train_alone()
    ranks = run_ranks(train, 4, str(tmp_path / "plan.json"))
    for own, _, gradients, parameters in ranks:
        assert own[0] == pytest.approx(losses[0], rel=1e-12)
        assert own == pytest.approx(losses, rel=1e-9)
        for name, x in first.items():
            torch.testing.assert_close(gradients[name], x, rtol=0, atol=1e-9)
        for name, x in state.items():
            torch.testing.assert_close(parameters[name], x, rtol=0, atol=1e-9)
    passed = [shapes for _, shapes, _, _ in ranks]
    assert passed[:2] == passed[2:]  # ranks with the same places in their stages
    are_unlike = [one[1] != other[1] for one, other in zip(*passed[:2], strict=True)]
    assert set(are_unlike) == {True, False}  # groups in some steps, one plan of all ranks in others
