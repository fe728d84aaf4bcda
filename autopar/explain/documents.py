"""What ``--json`` prints; docs/explain.md says what each part means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autopar.explain.alternatives import Alternative, efficiencies
from autopar.explain.comparison import compare_plans
from autopar.explain.findings import Findings
from autopar.plan import Plan

__all__ = ["describe_difference", "describe_findings", "describe_plan", "describe_sweep"]


def describe_plan(plan: Plan) -> dict[str, Any]:
    """As `Plan.save` writes it."""
    return json.loads(plan.to_json())


def describe_findings(findings: Findings) -> dict[str, Any]:
    """The plan, its explanation, and the alternatives to it."""
    plan = findings.answer.plan
    data: dict[str, Any] = {
        "plan": describe_plan(plan),
        "explanation": asdict(findings.explanation),
        "forced": [_describe_forced(row) for row in findings.forced],
        "what_if": [
            {
                "changed": row.change,
                "plan": describe_plan(row.plan) if row.plan else None,
                "difference": describe_difference(plan, row.plan) if row.plan else None,
                "problem": row.problem,
            }
            for row in findings.what_if
        ],
    }
    return data | (describe_sweep(findings.sweep[1]) if findings.sweep[0] else {})


def _describe_forced(row: Alternative) -> dict[str, Any]:
    step_s, peak_bytes = (row.plan.step_time_s, row.plan.peak_memory_bytes) if row.plan else (None, 0.0)
    return {"constraint": row.change, "step_s": step_s, "peak_bytes": peak_bytes, "problem": row.problem}


def describe_sweep(rows: Sequence[Alternative]) -> dict[str, Any]:
    """A row per value."""
    return {
        "sweep": [
            {
                "value": row.change,
                "plan": describe_plan(row.plan) if row.plan else None,
                "efficiency": efficiency,
                "problem": row.problem,
            }
            for row, efficiency in zip(rows, efficiencies(rows), strict=True)
        ]
    }


def describe_difference(first: Plan, second: Plan) -> dict[str, Any]:
    """What two plans decide differently, and what that does."""
    return {
        "step_time_s": [first.step_time_s, second.step_time_s],
        "peak_memory_bytes": [first.peak_memory_bytes, second.peak_memory_bytes],
        "decisions": [asdict(each) for each in compare_plans(first, second)],
    }
