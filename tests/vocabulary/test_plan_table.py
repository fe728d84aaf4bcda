"""What a person reads of a plan with stages."""

from dataclasses import replace

from autopar.plan import PlannedLayer, Stage
from autopar.schedules.action_lists import StageCost
from tests.vocabulary.plans import small_plan


def test_stages_have_rows_with_their_ranks_and_times():
    layers = tuple(PlannedLayer(f"block.{i}", 0, 0) for i in range(3))
    small = small_plan()
    stages = (Stage(0, 2, 0), Stage(2, 3, 1))
    decisions = replace(small.decisions, world_size=8, layers=layers, stages=stages, schedule="1f1b")
    costs = (StageCost(forward_s=0.25, peak_memory_bytes=2**20), StageCost(backward_s=0.125, step_s=0.004))
    prediction = replace(small.prediction, step_time_s=4.5, costs=small.costs[:1] * 3, stages=costs)
    plan = replace(small, decisions=decisions, prediction=prediction)
    lines = str(plan).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert lines[0].startswith("ZeRO-3 · DP 2 x TP 2 x PP 2 (1F1B, 2 microbatches) · selective recompute · ")
    assert lines[1] == "Plan for 8 x cpu"
    assert ["0", "block.0 .. 1 (2)", "0 .. 3", "250", "0", "0", "0", "0", "0", "1M"] in rows
    assert ["1", "block.2", "4 .. 7", "0", "125", "0", "0", "4", "0", "0"] in rows
    assert [row[0] for row in rows if row[1].startswith("ZeRO-3")] == ["block.0 .. 1 (2)", "block.2"]
    assert "(compute 50%, waiting in the pipeline 50%)" in next(line for line in lines if "step time" in line)
    assert max(map(len, (line for line in lines if line.startswith(("|", "+"))))) <= 80


def test_of_many_stages_the_telling_ones_have_rows():
    small = small_plan()
    layers = tuple(PlannedLayer(f"block.{i}", 0, 0) for i in range(60))
    stages = tuple(Stage(i, i + 1, i) for i in range(60))
    decisions = replace(small.decisions, world_size=240, layers=layers, stages=stages, schedule="1f1b")
    costs = tuple(
        StageCost(forward_s=i + 1.0, step_s=9.0 if i == 7 else 1.0, peak_memory_bytes=9.0 if i == 30 else 1.0)
        for i in range(60)
    )
    plan = replace(small, decisions=decisions, prediction=replace(
        small.prediction, step_time_s=99.0, costs=small.costs[:1] * 60, stages=costs
    ))  # fmt: skip
    lines = str(plan).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert [row[0] for row in rows if len(row) == 10 and row[0].isdigit()] == ["0", "7", "30", "59"]
    assert "of 60 stages the first, the last, the slowest and the fullest" in lines


def test_a_plan_of_which_nothing_is_predicted_says_so():
    stages = (Stage(0, 1, 0), Stage(1, 2, 1))
    text = str(small_plan().with_decisions(world_size=8, stages=stages, schedule="1f1b"))
    assert "no prediction for this plan" in text
    assert "predicted step time" not in text
    assert "block.0" in text


def test_a_plan_without_stages_has_no_word_of_them():
    assert "stage" not in str(small_plan())


def test_numbers_are_never_cut_off():
    small = small_plan()
    cost = replace(
        small.costs[0], parameter_bytes=36.8 * 2**10, gradient_bytes=36.2 * 2**10, saved_bytes=146.0 * 2**10,
        transient_bytes=76.2 * 2**10, forward_s=4e-7, backward_s=5.23e-7,
    )  # fmt: skip
    layers = tuple(replace(layer, name=f"model.embed_tokens.{i}") for i, layer in enumerate(small.layers))
    decisions = replace(small.decisions, layers=layers)
    costs = (cost,) * len(layers)
    plan = replace(small, decisions=decisions, prediction=replace(small.prediction, costs=costs))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in str(plan).splitlines() if line[:1] == "|"]
    assert rows[0][-1] == "ms"
    assert rows[1][-1] == f"{cost.total_s * 1e3:.3g}"
    assert {len(row) for row in rows} == {8}
