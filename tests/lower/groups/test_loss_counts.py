"""Losses that are divided by what inputs count: which ones add up over rows, and what each row weighs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.lower.groups.target_count import loss_count
from autopar.planning.call_traces import trace_model
from autopar.planning.group_plans import why_no_groups
from autopar.program import Program
from autopar.search import SearchRequest, search
from tests.zoo import quick_prices

ROWS, TOKENS, WIDTH = 4, 8, 6

Loss = Callable[[Tensor, Tensor, nn.Linear], Tensor]


class Errors(nn.Module):
    """A loss of errors at places, some of which count."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.up, self.head = loss, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.loss(self.head(self.up(x).relu()) - x, counts, self.head)


def squares(x: Tensor) -> Tensor:
    return x.square().mean(-1)


COUNTED: dict[str, Loss] = {
    "a mask": lambda x, c, _: (squares(x) * c).sum() / c.sum(),
    "at least one": lambda x, c, _: (squares(x) * c).sum() / c.sum().clamp(min=1),
    "a bit more": lambda x, c, _: (squares(x) * c).sum() / (c.sum() + 1e-3),
    "numbers": lambda x, c, _: (x.abs() * c[..., None]).sum() / (c.sum() * x.shape[-1]),
    "of each row first": lambda x, c, _: (squares(x) * c).sum(1).sum() / c.sum(1).sum(),
    "scaled": lambda x, c, _: 0.5 * ((squares(x) * c).sum() / c.sum()) / 3,
    "selected": lambda x, c, _: squares(x)[c > 0].mean(),
    "two sums": lambda x, c, _: (squares(x) * c).sum() / (c.sum() + c.square().sum()),
    "compared": lambda x, c, _: functional.mse_loss(x[c > 0], torch.zeros_like(x)[c > 0]),
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "a root": (lambda x, c, _: (squares(x) * c).sum().sqrt() / c.sum(), "is no sum over rows (sqrt)"),
    "the longest row": (lambda x, c, _: (squares(x) * c).sum() / c.sum(1).max(), "is no sum over rows (max)"),
    "a penalty": (
        lambda x, c, head: ((squares(x) * c).sum() + head.weight.square().sum()) / c.sum(),
        "is no sum over rows (add",
    ),
    "shares": (lambda x, c, _: (squares(x) * c).sum() / (c / c.max()).sum(), "is no sum over rows (max, sum"),
    "all places": (lambda x, c, _: squares(x).mean() + 0 * c.sum(), "is not divided by what inputs count"),
    "what follows from parameters": (
        lambda x, c, head: (squares(x) * c).sum() / (c.sum() + head.bias.sum()), "is not divided by what inputs count",
    ),
}  # fmt: skip


def call(rows: int = ROWS) -> dict[str, Tensor]:
    torch.manual_seed(1)
    counts = (torch.rand(ROWS, TOKENS) < 0.6).double()
    counts[1] = 0
    return {"x": torch.randn(ROWS, TOKENS, WIDTH).double()[:rows], "counts": counts[:rows]}


def program_of(loss: Loss, rows: int = ROWS) -> Program:
    return trace_model(Errors(loss).double(), call(rows)).program


def why_not(program: Program) -> str:
    request = SearchRequest(constraints=("pipeline=1",))
    return why_no_groups(program, search(program, 4, quick_prices(4), request), request)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", COUNTED)
def test_rows_weigh_what_counts_in_them(kind: str) -> None:
    model, whole = Errors(COUNTED[kind]).double(), call()
    program = program_of(COUNTED[kind])
    assert not why_not(program)
    counted = loss_count(program)
    one: Any = loss_count(program_of(COUNTED[kind], 1))
    assert counted is not None
    assert counted.form == one.form
    rows = [{name: x[row : row + 1] for name, x in whole.items()} for row in range(ROWS)]
    sums = [one.sums_of(row) for row in rows]
    assert tuple(map(sum, zip(*sums, strict=True))) == counted.sums_of(whole)
    divisor = one.divisor_of(list(map(sum, zip(*sums, strict=True))))
    own = zip(rows, map(one.divisor_of, sums), strict=True)
    losses = [weight / divisor * model(**row).item() for row, weight in own if weight]
    assert sum(losses) == pytest.approx(model(**whole).item(), rel=1e-12)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", REFUSED)
def test_losses_that_do_not_add_up_over_rows_have_no_groups(kind: str) -> None:
    loss, reason = REFUSED[kind]
    assert reason in why_not(program_of(loss))


def test_one_row_does_not_show_what_adds_up() -> None:
    assert "pass one with several" in why_not(program_of(COUNTED["a mask"], 1))


OF_CLASSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "smoothed": (lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1), True),
    "weights of classes": (lambda y, t: functional.cross_entropy(y, t, weight=torch.linspace(1, 2, 8).to(y)), False),
    "a sum": (lambda y, t: functional.cross_entropy(y, t, reduction="sum"), False),
    "a mean of all places": (lambda y, t: functional.cross_entropy(y, t, reduction="none").mean(), False),
    "two means": (lambda y, t: functional.cross_entropy(y, t) + functional.cross_entropy(2 * y, t), False),
}


class Classes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(WIDTH, 8), OF_CLASSES[kind][0]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("kind", OF_CLASSES)
def test_cross_entropies_that_are_no_mean_over_targets_have_no_groups(kind: str) -> None:
    labels = torch.randint(0, 8, (ROWS, TOKENS))
    inputs = {"x": torch.randn(ROWS, TOKENS, WIDTH).double(), "labels": labels}
    reason = why_not(trace_model(Classes(kind).double(), inputs).program)
    assert (not reason) if OF_CLASSES[kind][1] else ("is not divided by what inputs count" in reason)
