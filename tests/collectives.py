"""Price what you emit: what the ranks ran, set against what the plan's price counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from autopar.lower.communication.collectives import Collective
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.program import Program
from autopar.step.plan_collectives import plan_collectives
from autopar.step.prices import PricedCollective

__all__ = ["assert_run_equals_priced", "of_groups", "volume_priced", "volume_run"]

Volume = dict[tuple[str, Axis], float]


def of_groups(ranks: Sequence[list[Collective]], plan: Plan) -> list[list[Collective]]:
    """What each device group ran, all of whose ranks must have run the same."""
    groups = [ranks[start : start + plan.group_size] for start in range(0, len(ranks), plan.group_size)]
    assert all(run == group[0] for group in groups for run in group), "ranks of a group run different collectives"
    return [group[0] for group in groups]


def assert_run_equals_priced(program: Program, plan: Plan, ranks: Sequence[list[Collective]], steps: int) -> None:
    """In every one of `steps` steps, equal bytes on every axis by every kind; calls may be fewer, as parameters travel
    together.

    Whatever is no parameter runs exactly as it is priced, call by call.
    """
    for group, run in enumerate(of_groups(ranks, plan)):
        # Random plans of one device may choose a kernel that would communicate.
        priced = [each for each in plan_collectives(program, plan, group=group) if each.axis.size > 1]
        assert volume_run(run) == pytest.approx(volume_priced(priced, steps), rel=1e-12), f"on device group {group}"
        calls = Counter((each.kind, each.axis, each.num_bytes) for each in run)
        alone: Counter[tuple[str, Axis, float]] = Counter()
        for each in priced:
            if each.purpose != "parameter" or each.phase == "recompute":
                alone[each.kind, each.axis, each.num_bytes] += steps * each.times
        assert not alone - calls, f"priced, but not run as such: {alone - calls}"
        assert len(run) <= steps * sum(each.times for each in priced)


def volume_run(collectives: Sequence[Collective]) -> Volume:
    """Bytes by kind and axis."""
    volume: Volume = {}
    for each in collectives:
        volume[each.kind, each.axis] = volume.get((each.kind, each.axis), 0.0) + each.num_bytes
    return volume


def volume_priced(collectives: Sequence[PricedCollective], steps: int = 1) -> Volume:
    """Bytes by kind and axis in `steps` steps."""
    volume: Volume = {}
    for each in collectives:
        key = each.kind, each.axis
        volume[key] = volume.get(key, 0.0) + steps * each.times * each.num_bytes
    return volume
