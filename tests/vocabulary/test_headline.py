"""The line that every plan begins with."""

from dataclasses import replace

import pytest

from autopar.plan import Plan, PlannedLayer
from autopar.plan.decisions import LayerStrategy, Stage
from autopar.plan.headline import describe_parallelism, of_limit
from autopar.user_text.quantities import short_count
from tests.vocabulary.plans import small_plan


def test_all_that_people_compare_is_in_one_line() -> None:
    small = small_plan()
    prediction = replace(
        small.prediction, device="H100-80GB", step_time_s=2.0, tokens_per_step=64_800, samples_per_step=8,
        dtype="bfloat16", model_flops=2.0 * 4 * 423e12, peak_flops_per_s=989e12, peak_memory_bytes=65.7 * 2**30,
    )  # fmt: skip
    plan = replace(small, prediction=prediction, memory_limit_bytes=72.2 * 2**30)
    assert plan.headline == (
        "bf16 · ZeRO-3 · DP 2 x TP 2 · 2 microbatches · selective recompute · 8.1k tokens/s/GPU · 423 TFLOP/s · "
        "43 % MFU · 65.7 of 72.2 GiB"
    )
    assert str(plan).splitlines()[0] == plan.headline
    assert Plan.from_json(plan.to_json()) == plan
    rows = replace(plan, prediction=replace(prediction, tokens_per_step=0, model_flops=0.0, device="cpu"))
    assert "· 1 samples/s/device · 65.7 of" in rows.headline


def strategy(mesh: tuple[int, ...], labels: tuple[str, ...], **changes: object) -> LayerStrategy:
    return replace(small_plan().strategies[0], mesh=mesh, labels=labels, recompute="none", **changes)


def line(*strategies: LayerStrategy, **changes: object) -> str:
    layers = tuple(PlannedLayer(f"block.{n}", n, n) for n in range(len(strategies)))
    decisions = replace(
        small_plan().decisions, world_size=8, num_microbatches=1, layers=layers, strategies=strategies, **changes
    )
    return describe_parallelism(decisions)


def test_layers_that_split_other_things_the_same_way_agree() -> None:
    assert line(
        strategy((4, 2), ("data", "vocabulary")), strategy((4, 2), ("data", "tensor+sequence")),
        strategy((2, 2, 2), ("data", "data", "tensor")),
    ) == "ZeRO-3 · DP 4 x TP 2+SP"  # fmt: skip
    assert line(strategy((4, 2), ("data", "sequence")), strategy((4, 2), ("data", "context"))) == "ZeRO-3 · DP 4 x CP 2"


def test_experts_share_the_devices_that_split_the_batch() -> None:
    dense, sparse = strategy((8,), ("data",)), strategy((2, 4), ("data", "expert"))
    assert line(dense, sparse) == "ZeRO-3 · DP 8 x EP 4"


def test_what_layers_do_differently_is_called_mixed() -> None:
    data, tensor = strategy((8,), ("data",)), strategy((4, 2), ("data", "tensor"), zero=1)
    assert line(data, data, tensor) == (
        "ZeRO mixed (see table; 2 of 3 layers: ZeRO-3) · mesh mixed (see table; 2 of 3 layers: DP 8)"
    )
    # A layer that stores nothing has no ZeRO level.
    assert line(data, replace(data, zero=0, storage=())) == "ZeRO-3 · DP 8"


def test_a_pipeline_has_its_schedule_and_what_else_applies() -> None:
    half = strategy((4,), ("data",))
    stages = tuple(Stage(n, n + 1, n % 2) for n in range(4))
    text = line(
        *[replace(half, recompute="full+offload")] * 4, stages=stages, schedule="interleaved_1f1b", compiled=True,
        host_storage=True,
    )  # fmt: skip
    assert text == (
        "ZeRO-3 · DP 4 x PP 2 (interleaved 1F1B, 4 stages, 1 microbatch) · full recompute · offload of activations · "
        "offload of optimizer · compiled"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (999.6, "1,000"), (8123.0, "8.12k"), (81234.0, "81.2k"), (1.2e6, "1.2M")]
)
def test_counts_have_three_digits(value: float, text: str) -> None:
    assert short_count(value) == text


def test_memory_is_told_in_the_units_that_suit_it() -> None:
    assert of_limit(2**30, 72.2 * 2**30) == "1 of 72.2 GiB"
    assert of_limit(124 * 2**20, 6.37 * 2**30) == "124 MiB of 6.37 GiB"
    assert of_limit(2**20, float("inf")) == "1 MiB"
