"""A new schedule is one record."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import autopar
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.program import Program
from autopar.schedules import PipelineSchedule, Shape, lookup, register_schedule
from autopar.schedules.action_lists import count_flights
from autopar.search import SearchRequest, search
from autopar.trace import trace
from tests.models import make_plain_gpt
from tests.zoo import quick, quick_prices


def last_in_first_out(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[str]:
    """All forwards; then backwards from the last microbatch to the first."""
    forwards = range(num_microbatches)
    return [
        " ".join([*(f"{stage}F{index}" for index in forwards), *(f"{stage}B{index}" for index in reversed(forwards))])
        for stage in range(num_stages)
    ]


def weights_last(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[str]:
    """There and back: a group's first and last stage; gradients of parameters at the very end."""
    count = range(num_microbatches)
    texts: list[str] = []
    for group in range(num_groups):
        ahead, back = (group, num_stages - 1 - group)
        forwards = [f"{stage}F{index}" for stage in (ahead, back) for index in count]
        backwards = [f"{stage}{kind}{index}" for kind in "IW" for stage in (back, ahead) for index in count]
        texts.append(" ".join(forwards + backwards))
    return texts


NEW = {
    "last_in_first_out": PipelineSchedule(
        "last_in_first_out", order=last_in_first_out, max_stages=1, forwards_first=True, is_searched=False
    ),
    "weights_last": PipelineSchedule(
        "weights_last",
        order=weights_last,
        min_stages=2,
        max_stages=2,
        is_v_shaped=True,
        forwards_first=True,
        splits_backward=True,
    ),
}


LIKE = {"last_in_first_out": "gpipe", "weights_last": "zbv"}  # which are no slower


@pytest.fixture(params=NEW)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lookup, "_records", dict(lookup._records))
    register_schedule(NEW[request.param])
    return request.param


def planned(program: Program, *constraints: str) -> Plan:
    demands = ("pipeline=2", "microbatches=4", *constraints)
    return search(program, 2, quick_prices(2), SearchRequest(constraints=quick(demands), schedules=schedule_actions))


@pytest.mark.slow_after(1)
def test_a_new_schedule_is_one_record(schedule: str) -> None:
    torch.manual_seed(0)
    model, inputs = make_plain_gpt(layers=4)
    program = trace(model, (), inputs).program
    plan = planned(program, f"schedule={schedule}")
    assert plan.schedule == schedule
    assert len(plan.stages) == 2 * NEW[schedule].min_stages
    alike_s = planned(program, f"schedule={LIKE[schedule]}").step_time_s
    assert 0.999 * alike_s <= plan.step_time_s <= 1.5 * alike_s
    assert {stage.in_flight for stage in plan.prediction.stages} == {4}
    assert Plan.from_json(plan.to_json()) == plan
    assert "2 ranks against one device" in str(autopar.verify(model, plan, inputs, shrink=False))


@pytest.mark.parametrize("count", [1, 4, 7])
def test_what_its_record_says_is_what_its_lists_do(schedule: str, count: int) -> None:
    shape = Shape(schedule, 2, 2 * NEW[schedule].min_stages, count)
    listed = shape.actions(schedule_actions)
    assert count_flights(listed, shape.num_stages) == shape.in_flight == (count,) * shape.num_stages
    for group in listed:
        kinds = [each.kind for each in group if each.kind in "FBIW"]
        assert kinds == sorted(kinds, key="FBIW".index)


def test_a_list_must_be_what_the_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_records", dict(lookup._records))
    register_schedule(PipelineSchedule("unsaid", order=weights_last, is_v_shaped=True))
    with pytest.raises(RuntimeError, match=r"lists .*I0, but its record has splits_backward=False"):
        schedule_actions("unsaid", 2, 4, 1)
    register_schedule(PipelineSchedule("unsaid", order=weights_last, splits_backward=True))
    with pytest.raises(RuntimeError, match="lists 3RECV_F0 on device group 0, not 1"):
        schedule_actions("unsaid", 2, 4, 2)
    register_schedule(PipelineSchedule("unsaid", order=weights_last, is_v_shaped=True, splits_backward=True))
    assert schedule_actions("unsaid", 2, 4, 2)  # a record that is replaced is forgotten
    with pytest.raises(ValueError, match="needs either torch_class= or order="):
        register_schedule(PipelineSchedule("nothing"))
