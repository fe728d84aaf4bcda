"""What ``--json`` prints; docs/explain.md says what each part means."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from autopar.explain.comparison import compare_plans
from autopar.explain.findings import Findings
from autopar.explain.sweep import SweepRow
from autopar.plan import Plan

__all__ = ["describe_difference", "describe_findings", "describe_plan", "describe_sweep"]


def describe_plan(plan: Plan) -> dict[str, Any]:
    """As `Plan.save` writes it."""
    return json.loads(plan.to_json())


def describe_findings(found: Findings) -> dict[str, Any]:
    """The plan, its explanation, and the answers to what else was asked."""
    plan = found.answer.plan
    data: dict[str, Any] = {
        "plan": describe_plan(plan),
        "explanation": asdict(found.explanation),
        "forced": [asdict(row) for row in found.forced],
        "what_if": [
            {"changed": text, "plan": describe_plan(other), "difference": describe_difference(plan, other)}
            for text, other in found.what_if
        ],
    }
    return data | (describe_sweep(found.sweep[1]) if found.sweep[0] else {})


def describe_sweep(rows: Iterable[SweepRow]) -> dict[str, Any]:
    """A row per value."""
    return {
        "sweep": [
            {**asdict(replace(row, plan=None)), "plan": describe_plan(row.plan) if row.plan else None} for row in rows
        ]
    }


def describe_difference(first: Plan, second: Plan) -> dict[str, Any]:
    """What two plans decide differently, and what that does."""
    return {
        "step_time_s": [first.step_time_s, second.step_time_s],
        "peak_memory_bytes": [first.peak_memory_bytes, second.peak_memory_bytes],
        "decisions": [asdict(each) for each in compare_plans(first, second)],
    }
