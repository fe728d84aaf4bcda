"""Price what you emit: what the ranks ran, set against what the plan's price counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from autopar.lower.communication.collectives import Collective
from autopar.ops.attention import DOCUMENTS
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.program import Program
from autopar.step.costs.plan_collectives import plan_collectives
from autopar.step.prices import PricedCollective

__all__ = ["assert_run_equals_priced", "of_groups", "volume_priced", "volume_run"]

Calls = Counter[tuple[str, Axis]]
Volume = dict[tuple[str, Axis], float]


def of_groups(ranks: Sequence[list[Collective]], plan: Plan) -> list[list[Collective]]:
    """What each device group ran, all of whose ranks must have run the same."""
    groups = _by_group(ranks, plan)
    for runs in groups:
        _assert_same_calls(runs, Counter())
    return [runs[0] for runs in groups]


def assert_run_equals_priced(program: Program, plan: Plan, ranks: Sequence[list[Collective]], steps: int) -> None:
    """In every one of `steps` steps, equal bytes on every axis by every kind; calls may be fewer, as parameters travel
    together.

    Whatever is no parameter runs exactly as it is priced, call by call.  Only where `ring_documents` runs, whose price
    is an estimate, its number of calls is compared instead of its bytes (`_estimated`).
    """
    for group, runs in enumerate(_by_group(ranks, plan)):
        # Random plans of one device may choose a kernel that would communicate.
        priced = [each for each in plan_collectives(program, plan, group=group) if each.axis.size > 1]
        exact, estimated = _estimated(program, priced)
        _assert_same_calls(runs, _count([each for each in estimated if each.kind == "all_to_all"], steps))
        for rank, run in enumerate(runs if estimated else runs[:1]):
            _assert_priced(run, exact, estimated, steps, f"on rank {rank} of device group {group}")


def _by_group(ranks: Sequence[list[Collective]], plan: Plan) -> list[Sequence[list[Collective]]]:
    return [ranks[start : start + plan.group_size] for start in range(0, len(ranks), plan.group_size)]


def _estimated(
    program: Program, priced: Sequence[PricedCollective]
) -> tuple[list[PricedCollective], list[PricedCollective]]:
    """All others, and those of `ring_documents`: which tokens travel depends on where documents end.

    It is the only kernel for documents that exchanges rows.
    """
    attentions = {op.name for layer in program.layers for op in layer.ops if op.target == DOCUMENTS}
    inside = [each for each in priced if each.purpose == "kernel" and each.value in attentions]
    rings = {each.value for each in inside if each.kind == "all_to_all"}
    estimated = [each for each in inside if each.value in rings]
    return [each for each in priced if each.purpose != "kernel" or each.value not in rings], estimated


def _assert_same_calls(runs: Sequence[list[Collective]], exchanges: Calls) -> None:
    """All ranks make the same calls in the same order, of equal bytes but for so many exchanges of unequal rows."""
    kinds = [[(each.kind, each.axis) for each in run] for run in runs]
    assert all(each == kinds[0] for each in kinds), "ranks of a group run different collectives"
    calls = zip(*runs, strict=True)
    unequal = Counter((each[0].kind, each[0].axis) for each in calls if any(other != each[0] for other in each))
    assert not unequal - exchanges, f"unequal bytes on the ranks of a group: {unequal - exchanges}"


def _assert_priced(
    run: Sequence[Collective],
    exact: Sequence[PricedCollective],
    estimated: Sequence[PricedCollective],
    steps: int,
    where: str,
) -> None:
    made, others = Counter((each.kind, each.axis) for each in run), _count(exact, steps)
    more = _count(estimated, steps)
    # Without shared documents the kernel makes none of its calls.
    extra = {key: made[key] - others[key] for key in more}
    assert extra == dict(more) or not any(extra.values()), f"calls {where}: {extra}, not {more}"
    ran, expected = ({key: size for key, size in each.items() if key not in more}
                     for each in (volume_run(run), volume_priced(exact, steps)))  # fmt: skip
    assert ran == pytest.approx(expected, rel=1e-12), where
    calls = Counter((each.kind, each.axis, each.num_bytes) for each in run)
    alone: Counter[tuple[str, Axis, float]] = Counter()
    for each in exact:
        if each.purpose != "parameter" or each.phase == "recompute":
            alone[each.kind, each.axis, each.num_bytes] += steps * each.times
    assert not alone - calls, f"priced, but not run as such {where}: {alone - calls}"
    assert len(run) <= (others + more).total(), where


def _count(collectives: Sequence[PricedCollective], steps: int) -> Calls:
    """Calls by kind and axis in `steps` steps."""
    calls: Calls = Counter()
    for each in collectives:
        calls[each.kind, each.axis] += steps * each.times
    return calls


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
