"""What communication and computation take when they run at the same time, and what stays exposed.

A collective that runs at the same time as kernels takes cores and memory bandwidth from them: compute goes on at
``1 - taken`` of its speed as long as the collective lasts.  With c seconds of compute and t of communication that start
together:

``both(c, t) = c + taken * t   if (1 - taken) * t <= c   else   t``

A chain of layers whose parameters are gathered one layer ahead is a sequence of such pairs: layer i computes while
layer i+1 is gathered.  Nothing here knows a device.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["both_s", "exposed_s", "gathered_ahead_s", "pipeline_s"]


def both_s(compute_s: float, communication_s: float, taken: float) -> float:
    """Seconds until both are done, if they start together and neither waits for the other.

    Args:
        compute_s: compute alone.
        communication_s: communication alone.
        taken: which part of the device's speed the communication takes while it runs, below 1.

    >>> both_s(10.0, 4.0, 0.25), both_s(1.0, 4.0, 0.25)
    (11.0, 4.0)
    """
    if (1 - taken) * communication_s <= compute_s:
        return compute_s + taken * communication_s
    return communication_s


def exposed_s(compute_s: float, communication_s: float, taken: float) -> float:
    """What the communication adds to `compute_s`."""
    return both_s(compute_s, communication_s, taken) - compute_s


def gathered_ahead_s(layers: Iterable[tuple[float, float]], taken: float) -> float:
    """Seconds of a chain of layers, each ``(compute, communication it needs before)``.

    The first layer's communication is waited for; every other layer's overlaps with the layer before it.

    >>> gathered_ahead_s([(3.0, 1.0), (3.0, 1.0), (3.0, 1.0)], 0.0)
    10.0
    """
    total_s, computing_s = 0.0, 0.0
    for compute_s, communication_s in layers:
        total_s += both_s(computing_s, communication_s, taken)
        computing_s = compute_s
    return total_s + computing_s


def pipeline_s(stages_s: Iterable[float], num_microbatches: int, num_rounds: int = 1) -> float:
    """Seconds of one step of 1F1B, or of interleaved 1F1B with `num_rounds` stages per device group.

    Each group works without a gap between its first and its last microbatch if it is the slowest; the others wait for
    it.  Filling and draining the pipeline costs the other groups' share of one microbatch, in `num_rounds` pieces:
    ``m * max + (sum - max) / rounds``, which for equal groups is ``(m + (p - 1) / rounds) * t``.

    Args:
        stages_s: forward and backward of one microbatch on each device group.
        num_microbatches: per step.
        num_rounds: how often a microbatch visits each group.

    >>> pipeline_s([1.0, 1.0, 1.0, 1.0], 8), pipeline_s([1.0, 1.0, 1.0, 1.0], 8, 3)
    (11.0, 9.0)
    """
    seconds = tuple(stages_s)
    slowest_s = max(seconds)
    return num_microbatches * slowest_s + (sum(seconds) - slowest_s) / num_rounds
