"""Training in groups of unlike size, beside one device that trains on each sample alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.plan.prediction import GroupRow, LengthPlan, LengthPrediction
from autopar.verify.rehearsal import Run, SteadyAdamW
from tests.lower.groups.cases import TOKENS, Family
from tests.lower.runs import loss_of

STEPS = 5


def with_groups(found: Family, *, nests: bool) -> Family:
    """A plan with groups of two ranks for rows of `TOKENS` and of one for half as long, which every batch is to use."""
    groups = (GroupRow(2, TOKENS, 2.0, 0.0), GroupRow(1, TOKENS // 2, 1.0, 0.0))
    row = replace(found.plan.prediction.row, step_s=100.0)
    lengths = LengthPrediction(plans=(LengthPlan(row),), groups=groups, coupling_s=0.5, nests=nests)
    return replace(found, plan=replace(found.plan, prediction=replace(found.plan.prediction, lengths=lengths)))


def trained(made: Any, batches: Sequence[Mapping[str, Tensor]]) -> tuple[Any, ...]:
    """Loss and gradients of each batch, losses of `STEPS` steps with the first one, and the state after these."""
    alone: list[Any] = []
    for batch in batches:
        loss = loss_of(made(**batch))
        loss.backward()
        own = {n: p.grad for n, p in made.named_parameters() if p.grad is not None}
        alone.append((loss.item(), {n: made._whole(n, x) for n, x in own.items()}))
        made.zero_grad()
    optimizer = SteadyAdamW(made.parameters())
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(made(**batches[0]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return alone, losses, made.full_state_dict()


def check_trained(ranks: Sequence[Sequence[Any]], singles: Sequence[Run]) -> None:
    """What each of `ranks` `trained` is what `singles` did, one for each batch, `STEPS` steps with the first."""
    for place, single in enumerate(singles):
        for results, losses, state, *_ in ranks:
            loss, gradients = results[place]
            assert loss == pytest.approx(single.losses[0], rel=1e-12)
            assert {f"model.{name}" for name in gradients} == single.gradients.keys()
            check_close(gradients, single.gradients)
            if not place:
                assert losses == pytest.approx(single.losses, rel=1e-9)
                check_close(state, single.parameters)


def check_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Within 1e-9 of the largest element of all; `expected` are those of a module that has the model."""
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        torch.testing.assert_close(found[name.removeprefix("model.")], x, rtol=0, atol=1e-9 * largest)
