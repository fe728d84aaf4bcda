"""The plan as data: what is decided, what is predicted of it, and how it is printed and saved.

`decisions` says what runs, `prediction` what is expected of it, `plan` joins both with what the user asked for.
`headline` and `layer_tables` print a plan, `records` turns its dataclasses into JSON and back.
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
