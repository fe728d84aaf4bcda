"""What prices rest on, in one word."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ops import Work

__all__ = ["link_source", "memory_source", "op_source"]

_WORDS = ("published", "calibrated", "estimate")
"""From the surest to the least sure."""
_RATE_OF = {"matmul": "matmul_efficiency", "attention": "attention_efficiency"}
_LINK_RATES = {"all_reduce": "all_reduce_bytes_per_s", "all_to_all": "exchange_bytes_per_s"}


def op_source(sources: Mapping[str, str], work: Work) -> str:
    """Of an op's roofline on a device with these sources: the least sure of what is said of its rate."""
    return _weakest(sources.get(_RATE_OF.get(work.kind, "memory_efficiency"), ""))


def memory_source(sources: Mapping[str, str]) -> str:
    """Of what only moves bytes on a device."""
    return _weakest(sources.get("memory_efficiency", ""))


def link_source(sources: Mapping[str, str], kind: str) -> str:
    """Of a collective on a link."""
    return _weakest(sources.get(_LINK_RATES.get(kind, "gather_bytes_per_s"), ""))


def _weakest(source: str) -> str:
    """Without any word it is an estimate."""
    return next((word for word in reversed(_WORDS) if word in source), "estimate")
