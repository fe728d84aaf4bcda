"""The plan as data: its decisions, its prediction, and how it is printed and saved.

`decisions` says what runs, `prediction` what it is expected to cost, `plan` combines both with the user's request.
`headline` and `layer_tables` print a plan, `records` converts its dataclasses to JSON and back.
"""

from autopar.plan.decisions import Decisions, LayerStrategy, PlannedLayer, Stage, stages_problem
from autopar.plan.plan import FORMAT_VERSION, GroupPlan, Plan

__all__ = [
    "FORMAT_VERSION",
    "Decisions",
    "GroupPlan",
    "LayerStrategy",
    "Plan",
    "PlannedLayer",
    "Stage",
    "stages_problem",
]
