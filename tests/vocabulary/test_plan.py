"""A plan is text: it round-trips, and what can't be read is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from autopar.errors import PlanFormatError
from autopar.plan import FORMAT_VERSION, Plan, PlannedLayer, Stage
from autopar.plan.prediction import LayerCost, Prediction, RowCost
from tests.vocabulary.plans import plans, small_plan


@pytest.mark.slow
@settings(max_examples=60)
@given(plans())
def test_json_round_trip(plan: Plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


def test_file_round_trip(tmp_path: Path):
    path = tmp_path / "plan.json"
    small_plan().save(path)
    assert Plan.load(path) == small_plan()
    assert Plan.load(str(path)) == small_plan()


def test_layouts_and_assignments_are_readable():
    data = json.loads(small_plan().to_json())
    assert data["autopar_plan"] == FORMAT_VERSION
    assert data["decisions"]["strategies"][0]["assignments"] == ["b f", "b -"]
    assert data["decisions"]["strategies"][0]["copies"] == {"x": "S(0),B"}
    assert data["decisions"]["shared_storage"] == {"embedding.weight": "S(0)"}


def test_an_edit_is_read_back():
    data = json.loads(small_plan().to_json())
    data["decisions"]["strategies"][0]["storage"] = ["S(1),R"]
    edited = Plan.from_json(json.dumps(data))
    assert edited.decisions != small_plan().decisions
    assert edited.prediction == Prediction()  # that of other decisions is none
    assert json.loads(edited.to_json())["decisions"] == data["decisions"]
    assert replace(edited, decisions=small_plan().decisions, prediction=small_plan().prediction) == small_plan()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("prediction"),
        lambda d: d.update(prediction="none"),
        lambda d: d["prediction"].pop("of"),
        lambda d: d["prediction"]["costs"].pop(),
        lambda d: d["prediction"].update(of="0", costs="anything"),
    ],
)
def test_a_prediction_that_is_missing_or_unfit_is_left_out(change: Callable[[dict[str, Any]], Any]):
    found = Plan.from_json(edit(change))
    assert found == replace(small_plan(), prediction=Prediction())
    assert Plan.from_json(found.to_json()) == found


def test_predictions_of_earlier_versions_are_read_under_todays_names():
    row = RowCost(rows=2, fixed_bytes=3e9, row_bytes=4e6)
    data = json.loads(replace(small_plan(), prediction=replace(small_plan().prediction, row=row)).to_json())
    data["prediction"]["row"]["held_bytes"] = data["prediction"]["row"].pop("fixed_bytes")
    del data["prediction"]["row"]["microbatches"]
    assert Plan.from_json(json.dumps(data)).prediction.row == row


def test_the_digest_is_of_what_runs():
    decisions = small_plan().decisions
    (strategy,) = decisions.strategies
    again = Plan.from_json(small_plan().to_json()).decisions
    assert again.digest() == decisions.digest() == replace(small_plan(), notes=("x",)).decisions.digest()
    other = replace(strategy, labels=("?", "?"))
    renumbered = (PlannedLayer("block.0", 0, 1), PlannedLayer("block.1", 0, 0))
    assert replace(decisions, strategies=(other, strategy), layers=renumbered).digest() == decisions.digest()
    changes = (
        {"num_microbatches": 4},
        {"strategies": (replace(strategy, zero=2),)},
        {"shared_storage": ()},
        {"stages": (Stage(0, 2, 0),), "schedule": "gpipe"},
        {"fingerprint": "b"},
    )
    digests = {replace(decisions, **change).digest() for change in changes}  # pyright: ignore[reportArgumentType]
    assert len(digests | {decisions.digest()}) == 1 + len(changes)


def edit(change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(small_plan().to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("decisions"), r"plan: fields missing: \['decisions'\], unknown: \[\]"),
        (lambda d: d["decisions"].pop("layers"), r"decisions: fields missing: \['layers'\], unknown: \[\]"),
        (lambda d: d.update(decisions=[]), "plan: 'decisions' must be an object, but is"),
        (lambda d: d.update(color=1), r"plan: fields missing: \[\], unknown: \['color'\]"),
        (lambda d: d.update(autopar_plan=99), f"not a plan of format {FORMAT_VERSION}"),
        (lambda d: d.pop("autopar_plan"), f"not a plan of format {FORMAT_VERSION}"),
        (lambda d: d["decisions"].update(layers=5), "decisions: 'layers' must be a list of objects, but is 5"),
        (lambda d: d["decisions"].update(layers=[5]), r"'layers' must be a list of objects, but is \[5\]"),
        (lambda d: d["decisions"].update(world_size="4"), "decisions: 'world_size' must be a whole number, but is '4'"),
        (
            lambda d: d["decisions"].update(world_size=True),
            "decisions: 'world_size' must be a whole number, but is True",
        ),
        (lambda d: d.update(optimality_gap=None), "plan: 'optimality_gap' must be a number, but is None"),
        (lambda d: d["prediction"].update(step_time_s=None), "prediction: 'step_time_s' must be a number, but is None"),
        (lambda d: d.update(notes="all well"), "plan: 'notes' must be a list of texts, but is 'all well'"),
        (lambda d: d.update(planning_s={"trace": "x"}), "'planning_s' must be an object of numbers"),
        (lambda d: d["decisions"].update(shared_storage={"w": "S(x)"}), r"placement 'S\(x\)' is none of"),
        (lambda d: d["decisions"].update(shared_storage={"w": "S(0),R"}), r"'w' is 'S\(0\),R', but shared_mesh \(4,\)"),
        (lambda d: d["decisions"].update(shared_storage=["w"]), "'shared_storage' must be an object of layouts"),
        (lambda d: d["decisions"]["layers"][1].pop("kind"), r"layers\[1\]: fields missing: \['kind'\]"),
        (lambda d: d["decisions"]["layers"][1].update(strategy=1), "layer 'block.1' names strategy 1 of 1"),
        (lambda d: d["decisions"]["layers"][1].update(strategy=-1), "layer 'block.1' names strategy -1 of 1"),
        (lambda d: d["prediction"]["costs"][0].update(forward_s="1"), r"costs\[0\]: 'forward_s' must be a number"),
        (lambda d: d["decisions"]["strategies"][0].update(zeroo=1), r"strategies\[0\]: .* unknown: \['zeroo'\]"),
        (lambda d: d["decisions"]["strategies"][0].update(mesh=[4, 2]), r"mesh \(4, 2\) does not hold world_size 4"),
        (lambda d: d["decisions"]["strategies"][0].update(mesh="22"), "'mesh' must be a list of whole numbers"),
        (
            lambda d: d["decisions"]["strategies"][0].update(inputs=["S(0)"]),
            r"'S\(0\)' has 1 parts, but mesh \(2, 2\) has 2",
        ),
        (lambda d: d["decisions"]["strategies"][0].update(inputs=["S(0),Z"]), "placement 'Z' is none of"),
        (lambda d: d["decisions"]["strategies"][0].update(inputs=[0]), "'inputs' must be a list of layouts"),
        (lambda d: d["decisions"]["strategies"][0].update(copies={"x": "B"}), "'B' has 1 parts"),
        (lambda d: d["decisions"]["strategies"][0].update(assignments=["b f s"]), "'b f s' has 3 parts"),
    ],
)
def test_what_cannot_be_read_is_named(change: Callable[[dict[str, Any]], Any], message: str):
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(edit(change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 column 1"),
        ('{"autopar_plan": 4,\n "layers": }', "line 2 column 12"),
        ("[]", f"not a plan of format {FORMAT_VERSION}"),
        ('"plan"', f"not a plan of format {FORMAT_VERSION}"),
    ],
)
def test_what_is_no_plan_at_all_is_refused(text: str, message: str):
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(text)


def test_costs_add_up():
    cost = LayerCost(*[float(2**i) for i in range(11)])
    assert cost.total_s == 2**6 - 1
    assert cost.persistent_bytes == 2**6 + 2**7 + 2**8 + 2**9
