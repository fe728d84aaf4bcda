"""Batches of other shapes than a model was planned for, and training on them in turns, as one device does."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.lower import ParallelModule
from autopar.plan import Plan
from autopar.verify import VerificationReport, compare
from autopar.verify.rehearsal import Run, join_runs, keep_double_program, planner_for, run_ranks, run_single, train
from tests.zoo import Subject

Batch = Mapping[str, Any]


def of_rows(batch: Batch, rows: int) -> dict[str, Any]:
    """The first `rows` of `batch`, which begins anew where it ends."""
    places = torch.arange(rows)
    return {name: x[places % len(x)] if isinstance(x, Tensor) and x.dim() else x for name, x in batch.items()}


def of_length(batch: Batch, length: int) -> dict[str, Any]:
    """The first `length` columns of everything that has columns (tokens, labels and masks of ``[rows, columns]``)."""
    return {
        name: x[:, :length].contiguous() if isinstance(x, Tensor) and x.dim() == 2 else x for name, x in batch.items()
    }


def random_batches(batch: Batch, seed: int, count: int, *, has_lengths: bool) -> list[dict[str, Any]]:
    """`count` batches of random numbers of rows and, with `has_lengths`, of columns."""
    random_ = random.Random(seed)
    tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.dim() == 2]
    made: list[dict[str, Any]] = []
    for _ in range(count):
        rows = random_.choice([1, 2, 3, 4, 6, 7, 8, 12, 16])
        other = of_rows(batch, rows)
        made.append(of_length(other, random_.choice([4, 6, 8, 9, 12, 16])) if has_lengths and tensors else other)
    return made


def assert_exact(report: VerificationReport) -> None:
    """Training in float64 is that of one device but for the order of sums."""
    assert report.loss_error <= 1e-12, str(report)
    assert report.worst_gradient[1] <= 1e-9, str(report)
    assert report.parameter_error <= 1e-7, str(report)


def train_in_turns(
    who: Subject, plan: Plan, others: Sequence[Batch], *, in_double: bool = True, evaluated: Sequence[Batch] = ()
) -> VerificationReport:
    """How far training on the planned batch and `others` by turns is from one device; then `evaluated` are run."""
    steps = 2 * (1 + len(others))
    finish = keep_double_program if in_double else lambda traced: traced
    planner = planner_for(who.model, who.traced, plan, others, finish, training=True)
    for batch in evaluated:
        planner((), batch, False)
    expected = run_single(who.model, who.inputs, steps, in_double=in_double, others=others)

    def rank(model: ParallelModule) -> Run:
        run = train(model, who.inputs, steps, others=others)
        assert len({call.inputs for call in model.plans}) == len(model.plans)
        return run

    runs = run_ranks(who.model, who.traced, plan, rank, planner)
    return compare(expected, join_runs(runs, plan.num_groups), plan.world_size)
