"""Pipelines that a search finds under constraints train as one device does: every schedule, groups of many kinds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopar.plan import Plan
from tests.zoo import assert_parity, plan_for, subject

Constraints = tuple[str, ...]

# Model -> (world, constraints) of its cases, the fast one first.  Together: each schedule with several models, 2 and 4
# groups, worlds 2, 4 and 8, each ZeRO level, data, tensor and sequence parallelism inside of stages, cuts where no
# search would put them, and recomputation of whole layers where the schedule splits backwards.  Random pipelines
# (`test_random_plans`) combine them with everything else.
CASES: dict[str, list[tuple[int, str]]] = {
    "deep_gpt2": [  # tied across the first and the last stage
        (2, "1f1b microbatches=4 cuts=1"),
        (4, "interleaved_1f1b microbatches=4 data=2 zero=1"),
        (8, "zbv microbatches=2 data=2 tensor=2 zero=2"),
    ],
    "deeper_gpt2": [(8, "interleaved_zero_bubble pipeline=4 microbatches=4 stages=8 tensor=2")],
    "deep_llama": [
        (4, "gpipe microbatches=2 data=2 zero=3"),
        (4, "1f1b pipeline=4 microbatches=4"),
        (4, "zbv microbatches=4 data=2 zero=3 recompute=full"),
        (8, "interleaved_zero_bubble microbatches=2 tensor=4 recompute=full"),
    ],
    "deep_t5": [  # every decoder layer reads what the encoder puts out
        (2, "interleaved_zero_bubble microbatches=2 stages=4"),
        (4, "gpipe pipeline=4 microbatches=2"),
        (4, "zbv microbatches=2 tensor=2"),
    ],
    "deep_bert": [
        (4, "1f1b microbatches=2 sequence=2"),
        (4, "gpipe pipeline=4 microbatches=4 recompute=full"),
    ],
    "deep_vit": [
        (4, "zbv microbatches=4 data=2 zero=3"),
        (8, "1f1b pipeline=4 microbatches=4 data=2 zero=2"),
    ],
    "deep_unet": [  # skips over all stages
        (4, "1f1b pipeline=4 microbatches=4 cuts=1,2,6"),
        (4, "interleaved_1f1b microbatches=2 data=2"),
    ],
    "deep_crossing": [  # ints and bools cross, and an output of the first stage
        (4, "1f1b pipeline=4 microbatches=4"),
        (4, "zbv microbatches=2 data=2 zero=2"),
    ],
    "deep_half_frozen": [
        (4, "gpipe pipeline=4 microbatches=2"),
        (4, "interleaved_zero_bubble microbatches=2 data=2 zero=3"),
    ],
    "deep_batch_normed": [  # one microbatch; every stage moves buffers
        (2, "gpipe"),
        (4, "zbv data=2"),
    ],
}
FAST = ("deep_gpt2",)


def constraints_of(text: str) -> Constraints:
    """``"zbv data=2"`` -> what a user would write."""
    schedule, *rest = text.split()
    groups = () if any(each.startswith("pipeline") for each in rest) else ("pipeline=2",)
    return (*groups, f"schedule={schedule}", *rest)


def cases() -> Iterator[pytest.param]:
    for model, settings in CASES.items():
        for number, (world, text) in enumerate(settings):
            marks = () if number == 0 and model in FAST else pytest.mark.slow
            yield pytest.param(model, world, text, id=f"{model}-{world}-{text.replace(' ', '+')}", marks=marks)


@pytest.mark.parametrize(("model", "world", "text"), list(cases()))
def test_a_pipeline_trains_as_one_device_does(model: str, world: int, text: str) -> None:
    constraints = constraints_of(text)
    plan = plan_for(model, world, constraints, stages=True)
    assert_met(plan, constraints)
    assert_parity(subject(model), plan)


def assert_met(plan: Plan, constraints: Constraints) -> None:
    """What is asked of the pipeline is so; `test_searched_and_forced` asks for the rest."""
    asked = dict(text.split("=") for text in constraints)
    assert (plan.schedule, plan.num_groups) == (asked["schedule"], int(asked["pipeline"]))
    assert str(plan.num_microbatches) == asked.get("microbatches", "1")
    assert len(plan.stages) == int(asked.get("stages", len(plan.stages)))
    cuts = ",".join(str(stage.start) for stage in plan.stages[1:])
    assert cuts == asked.get("cuts", cuts)
    for key in ("zero", "recompute"):
        found = {str(getattr(strategy, key)) for strategy in plan.strategies}
        assert asked.get(key, "") in ("", *found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("deep_gpt2", "1f1b microbatches=4 data=2"),
        ("deep_t5", "zbv microbatches=2 tensor=2"),
    ],
)
def test_a_pipeline_trains_as_one_device_does_in_float32(model: str, text: str) -> None:
    plan = plan_for(model, 4, constraints_of(text), torch.float32, stages=True)
    assert_parity(subject(model, torch.float32), plan, torch.float32)
