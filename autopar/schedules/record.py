"""The record of a pipeline schedule: everything that the search, prices, plan checks and the runtime know about it.

Its functions take the numbers of device groups, of stages and of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["PipelineSchedule"]


def _no_problem(num_groups: int, num_stages: int, num_microbatches: int) -> str:
    return ""


def _all_in_flight(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[int]:
    return (num_microbatches,) * num_stages


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule.  Its actions come from a torch class, or are written by `order`.

    Args:
        name: as in plans, and in the constraint ``schedule=NAME``.
        torch_class: the class in torch.distributed.pipelining.schedules that lists its actions.
        order: without such a class, a function that returns for each device group its F, B, I and W in order, as text:
            ``("0F0 0B0", "1F0 1B0")``; sends and receives are added.
        min_stages: the minimum of stages per device group.
        max_stages: the maximum of stages per device group; 0 for any number.
        is_v_shaped: whether every other round of stages goes through the device groups backwards.
        forwards_first: whether all forwards come before the first backward, so that it also runs in two halves:
            forwards when the model is called, backwards when autograd runs.
        splits_backward: whether it runs backwards in two parts, I and W.
        is_searched: whether a search considers it if no constraint requests it.
        variant_of: a schedule that runs the same stages on the same device groups, and that is as fast if stages are
            equal: a search that considers that one considers this one, too, where pipelines are small.
        problem: returns why it can't run with these numbers, as text that follows its name; "" if it can.
        in_flight: returns for each stage an upper bound of the microbatches between their F and the end of their B.
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
    variant_of: str = ""
    problem: Callable[[int, int, int], str] = _no_problem
    in_flight: Callable[[int, int, int], Sequence[int]] = _all_in_flight

    @property
    def stages_text(self) -> str:
        """The allowed numbers of stages per device group, as text: ``"1"``, ``"2 or more"``."""
        if self.min_stages == self.max_stages:
            return str(self.min_stages)
        return f"{self.min_stages} or more" if not self.max_stages else f"{self.min_stages} to {self.max_stages}"
