"""The record of a pipeline schedule: all that the search, prices, plan checks and the runtime know about it.

The three numbers that its functions take are those of device groups, of stages and of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["PipelineSchedule"]


def _any(num_groups: int, num_stages: int, num_microbatches: int) -> str:
    return ""


def _all(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[int]:
    return (num_microbatches,) * num_stages


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule.  Its actions come from torch's class, or are written by `order`.

    Args:
        name: as in plans, and in the constraint ``schedule=NAME``.
        torch_class: the class in torch.distributed.pipelining.schedules that lists its actions.
        order: without such a class: per device group its F, B, I and W in order, as text: ``("0F0 0B0", "1F0 1B0")``;
            sends and receives are added.
        min_stages: per device group.
        max_stages: per device group; 0 for any number.
        is_v_shaped: whether stages go through the device groups there and back again, not round and round.
        forwards_first: whether all forwards come before the first backward, so that it also runs in two halves:
            forwards when the model is called, backwards when autograd asks.
        splits_backward: whether it runs backwards in two parts, I and W.
        is_searched: whether a search considers it if no constraint asks for it.
        problem: why it can't run so many microbatches, after "NAME "; "" if it can.
        in_flight: per stage, no fewer than the most microbatches between their F and the end of their B.
    """

    name: str
    torch_class: str = ""
    order: Callable[[int, int, int], Sequence[str]] | None = None
    min_stages: int = 1
    max_stages: int = 0
    is_v_shaped: bool = False
    forwards_first: bool = False
    splits_backward: bool = False
    is_searched: bool = True
    problem: Callable[[int, int, int], str] = _any
    in_flight: Callable[[int, int, int], Sequence[int]] = _all

    @property
    def stages_text(self) -> str:
        """How many stages each device group has: ``"1"``, ``"2 or more"``."""
        if self.min_stages == self.max_stages:
            return str(self.min_stages)
        return f"{self.min_stages} or more" if not self.max_stages else f"{self.min_stages} to {self.max_stages}"
