"""What plan files of earlier versions lack: it is added when they are read."""

from __future__ import annotations

from typing import Any, cast

from autopar.plan.prediction import LengthPrediction, RowCost
from autopar.plan.records import encode_record

__all__ = ["complete_decisions", "complete_prediction", "objects_in"]

_PREDICTED: dict[str, Any] = {
    "optimizer_gathers_s": 0.0, "output_gathers_s": 0.0, "output_reads_s": 0.0, "speedups": {},
    "host_memory_bytes": 0.0, "tokens_per_step": 0, "dtype": "", "model_flops": 0.0, "peak_flops_per_s": 0.0,
}  # fmt: skip
_COST = ("split_bytes", "leave_s", "return_s", "host_bytes", "copies_s")


def objects_in(values: object) -> list[dict[str, Any]]:
    """Those of the entries of a list that are JSON objects; none if it is no list."""
    entries = cast("list[Any]", values) if isinstance(values, list) else []
    return [cast("dict[str, Any]", each) for each in entries if isinstance(each, dict)]


def complete_decisions(decided: dict[str, Any]) -> None:
    """Add what earlier versions did not decide."""
    for name, nothing in (("compiled", False), ("gradients", ""), ("host_storage", False), ("piece_tokens", 0)):
        decided.setdefault(name, nothing)
    for strategy in objects_in(decided.get("strategies")):
        strategy.setdefault("pieces", {})


def complete_prediction(predicted: dict[str, Any]) -> None:
    """Add what earlier versions did not predict."""
    for name, nothing in _PREDICTED.items():
        predicted.setdefault(name, nothing)
    _complete_record(predicted, "row", RowCost())
    _complete_record(predicted, "lengths", LengthPrediction())
    lengths = predicted["lengths"]
    if isinstance(lengths, dict):
        known = cast("dict[str, Any]", lengths)
        _complete_record(known, "static", RowCost())
        for each in objects_in(known.get("plans")):
            _complete_record(each, "row", RowCost())
    for cost in objects_in(predicted.get("costs")):
        for name in _COST:
            cost.setdefault(name, 0.0)


def _complete_record(data: dict[str, Any], name: str, default: object) -> None:
    """Give the record at `name` the fields of `default` that it lacks."""
    given = data.setdefault(name, {})
    if isinstance(given, dict):
        data[name] = encode_record(default) | cast("dict[str, Any]", given)
