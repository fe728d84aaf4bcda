"""The plans that came next: what else the search looked at, and by how much it loses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.search import Considered

__all__ = ["RunnerUp", "pareto_front", "runners_up"]


@dataclass(frozen=True)
class RunnerUp:
    """The best plan of another kind than the chosen one.

    Args:
        what: how most of its layers run.
        step_time_s: as the search estimates it.
        peak_memory_bytes: per device.
        loses: how much slower it is than the best that was looked at, relative to that.
    """

    what: str
    step_time_s: float
    peak_memory_bytes: float
    loses: float


def runners_up(considered: Iterable[Considered], limit_bytes: float, most: int = 6) -> tuple[RunnerUp, ...]:
    """The fastest of each kind of plan within the limit, the chosen kind left out, fastest first."""
    fitting = [each for each in considered if each.peak_memory_bytes <= limit_bytes]
    best: dict[str, Considered] = {}
    for each in sorted(fitting, key=lambda each: (each.step_time_s, each.peak_memory_bytes)):
        best.setdefault(each.what, each)
    if not best:
        return ()
    chosen, *others = best.values()
    return tuple(
        RunnerUp(each.what, each.step_time_s, each.peak_memory_bytes, each.step_time_s / chosen.step_time_s - 1)
        for each in others[:most]
    )


def pareto_front(considered: Iterable[Considered]) -> tuple[Considered, ...]:
    """Those that no other beats in time and memory, fastest first."""
    front: list[Considered] = []
    for each in sorted(considered, key=lambda each: (each.step_time_s, each.peak_memory_bytes)):
        if not front or each.peak_memory_bytes < front[-1].peak_memory_bytes:
            front.append(each)
    return tuple(front)
