"""Adds the fields that plan files of earlier versions lack."""

from __future__ import annotations

from typing import Any, cast

from autopar.plan.prediction import LengthPrediction, RowCost
from autopar.plan.records import encode_record

__all__ = ["complete_decisions", "complete_prediction", "objects_in"]

_PREDICTED: dict[str, Any] = {
    "optimizer_gathers_s": 0.0, "output_gathers_s": 0.0, "output_reads_s": 0.0, "speedups": {},
    "host_memory_bytes": 0.0, "tokens_per_step": 0, "dtype": "", "model_flops": 0.0, "peak_flops_per_s": 0.0,
}  # fmt: skip
_RENAMED = {"held_bytes": "fixed_bytes"}
_COST = ("split_bytes", "leave_s", "return_s", "host_bytes", "copies_s")


def objects_in(values: object) -> list[dict[str, Any]]:
    """The entries of a list that are JSON objects; none if `values` is not a list."""
    entries = cast("list[Any]", values) if isinstance(values, list) else []
    return [cast("dict[str, Any]", each) for each in entries if isinstance(each, dict)]


def complete_decisions(decisions: dict[str, Any]) -> None:
    """Add defaults for the decisions that files of earlier versions lack."""
    for name, default in (("compiled", False), ("gradients", ""), ("host_storage", False), ("piece_tokens", 0)):
        decisions.setdefault(name, default)
    for name in ("late_ops", "statistics"):
        decisions.setdefault(name, [])
    for strategy in objects_in(decisions.get("strategies")):
        strategy.setdefault("pieces", {})


def complete_prediction(prediction: dict[str, Any]) -> None:
    """Add defaults for the predictions that files of earlier versions lack."""
    for name, default in _PREDICTED.items():
        prediction.setdefault(name, default)
    _complete_record(prediction, "row", RowCost())
    _complete_record(prediction, "lengths", LengthPrediction())
    if isinstance(prediction["lengths"], dict):
        lengths = cast("dict[str, Any]", prediction["lengths"])
        _complete_record(lengths, "static", RowCost())
        for plan in objects_in(lengths.get("plans")):
            _complete_record(plan, "row", RowCost())
        for group in objects_in(lengths.get("groups")):
            group.setdefault("fill_s", 0.0)
    for cost in objects_in(prediction.get("costs")):
        for name in _COST:
            cost.setdefault(name, 0.0)


def _complete_record(data: dict[str, Any], name: str, default: object) -> None:
    """Add to the record at `name` the fields of `default` that it lacks, and use today's names for the others."""
    record = data.setdefault(name, {})
    if isinstance(record, dict):
        fields = {_RENAMED.get(key, key): value for key, value in cast("dict[str, Any]", record).items()}
        data[name] = encode_record(default) | fields
