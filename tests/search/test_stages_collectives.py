"""What stages send is what is priced: every device group runs the collectives that `plan_collectives` lists for it."""

from __future__ import annotations

from collections import defaultdict

import pytest

from autopar.lower import ParallelModule
from autopar.lower.communicator import Collective
from autopar.lower.schedules import schedule_actions
from autopar.placement import Axis
from autopar.rehearsal import loss_of, run_ranks
from autopar.search import SearchRequest, search
from autopar.search.plan_collectives import plan_collectives
from tests.zoo import quick_prices, subject

CASES = [
    ("gpt2", ("pipeline=2", "schedule=1f1b", "data=2")),
    ("gpt2", ("pipeline=2", "schedule=zbv", "zero=3", "data=2")),
    ("t5", ("pipeline=2", "schedule=1f1b")),
    ("t5", ("pipeline=4", "schedule=gpipe")),
    ("llama", ("pipeline=4", "schedule=gpipe")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "constraints"), CASES, ids=str)
def test_device_groups_run_what_is_priced(model: str, constraints: tuple[str, ...]) -> None:
    who = subject(model)
    request = SearchRequest(constraints=constraints, schedules=schedule_actions)
    plan = search(who.traced.program, 4, quick_prices(4), request)

    def step(module: ParallelModule) -> list[Collective]:
        with module.recording() as collectives:
            loss_of(module(**who.inputs)).backward()
        return collectives

    for rank, run in enumerate(run_ranks(who.model, who.traced, plan, who.inputs, step)):
        priced, found = defaultdict[tuple[str, Axis], float](float), defaultdict[tuple[str, Axis], float](float)
        for each in plan_collectives(who.traced.program, plan, group=rank // plan.group_size):
            priced[each.kind, each.axis] += each.times * each.num_bytes
        for each in run:
            found[each.kind, each.axis] += each.num_bytes
        assert dict(found) == pytest.approx(dict(priced), rel=1e-12)
