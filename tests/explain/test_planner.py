"""What the questions of one planner share."""

from __future__ import annotations

from dataclasses import replace

from autopar.explain.planner import Planner
from autopar.explain.question import Question, parse_cluster


def test_a_demand_for_stages_traces_a_model_again_only_if_it_has_too_few_layers() -> None:
    planner = Planner("tests.explain.targets:make")
    question = Question(parse_cluster("8xh100"))
    free = planner.program(question)
    num_layers = len(free.layers)
    enough = planner.program(replace(question, constraints=("pipeline=2",)))
    assert num_layers >= 2
    assert all(one is other for one, other in zip(free.layers, enough.layers, strict=True))
    more = planner.program(replace(question, constraints=(f"stages={num_layers + 1}",)))
    assert len(more.layers) == num_layers + 1


def test_what_is_expected_of_data_is_priced_once() -> None:
    planner = Planner("tests.explain.targets:make")
    question = Question(parse_cluster("8xh100"), imbalance="1.5")
    program = planner.program(question)
    assert planner.program(replace(question, constraints=("zero=3",))) is program
    assert planner.program(replace(question, imbalance=None)) is not program
