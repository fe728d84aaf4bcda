"""Constraints on a pipeline: device groups, stages, where they begin, and the schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import ConstraintError
from autopar.program import Program
from autopar.schedules import PipelineSchedule, Shape, find_schedule, schedule_names, schedule_problem
from autopar.search.settings.constraints import Constraints

__all__ = ["PipelineDemands", "pipeline_demands", "stages_demanded"]

# Stages per device group that are tried: more of them shrink the bubble by ever less, and send ever more.  A decoder of
# 405B parameters (126 layers) on 16,384 devices is predicted 10 % faster with 4 than with 3, and 7 % faster with 8 of
# one layer each.  More than 3 are tried only if stages have 2 layers or more on average, or about equally many: where
# stages of one layer and of two alternate, all wait for the longer ones.
_ROUNDS = (1, 2, 3, 4, 6, 8)
_FEW_ROUNDS = 3
_LONG_STAGE = 2
_LONGEST_STAGE = 1.2  # of the layers of the longest stage, relative to the mean


@dataclass(frozen=True)
class PipelineDemands:
    """What is demanded; 0, ``()`` and ``""`` stand for anything.

    Args:
        groups: number of device groups, 1 for no pipeline.
        stages: number of stages.
        cuts: first layers of the stages but the first.
        schedule: the schedule.
    """

    groups: int = 0
    stages: int = 0
    cuts: tuple[int, ...] = ()
    schedule: str = ""

    @property
    def needs_pipeline(self) -> bool:
        """Whether a plan without stages would break the demands."""
        return self.groups > 1 or bool(self.stages > 1 or self.schedule)

    def group_counts(self, world_size: int, num_layers: int) -> Iterator[int]:
        """The numbers of device groups, 2 or more, that may be used."""
        for groups in range(2, min(world_size, self.stages or num_layers) + 1):
            if world_size % groups == 0 and (not self.groups or groups == self.groups):
                yield groups

    def shapes(
        self, groups: int, num_layers: int, num_microbatches: int, *, has_loss: bool, splits: bool = True
    ) -> Iterator[Shape]:
        """The ways to run a pipeline on so many device groups.

        Without `splits` no layer has a backward in two parts, as compiled ones.  Schedules that split it gain nothing
        then, but for those in the form of a V: the first group also has the last stage, which evens out memory.
        """
        usual = (rounds * groups for rounds in _ROUNDS)
        few = (n for n in usual if n <= _FEW_ROUNDS * groups or _has_even_stages(num_layers / n))
        numbers = [self.stages] if self.stages else list(few)
        for schedule in schedule_names():
            record = find_schedule(schedule)
            if not self._may_run(record, splits=splits) or not (has_loss or record.forwards_first):
                continue
            for stages in numbers:
                if stages <= num_layers and not schedule_problem(schedule, groups, stages, num_microbatches):
                    yield Shape(schedule, groups, stages, num_microbatches)

    def _may_run(self, record: PipelineSchedule, *, splits: bool) -> bool:
        if self.schedule:
            return record.name == self.schedule
        return record.is_searched and (splits or not record.splits_backward or record.is_v_shaped)


def pipeline_demands(
    constraints: Constraints, program: Program, world_size: int, *, is_training: bool = True
) -> PipelineDemands:
    """Read what `constraints` demand of the pipeline; of training or of forward passes alone.

    Raises:
        ConstraintError: they contradict each other, or can't be met whatever else is chosen.
    """
    groups, stages, schedule = (constraints.get(key) for key in ("pipeline", "stages", "schedule"))
    groups, stages = (value if isinstance(value, int) else 0 for value in (groups, stages))
    schedule = schedule if isinstance(schedule, str) else ""
    cuts = _read_cuts(constraints, program)
    if cuts and stages and len(cuts) + 1 != stages:
        raise ConstraintError(f"cuts={len(cuts)} cuts make {len(cuts) + 1} stages, not stages={stages}")
    demands = PipelineDemands(groups, len(cuts) + 1 if cuts else stages, cuts, schedule)
    _check(demands, program, world_size, has_loss=program.has_loss_in_layers or not is_training)
    return demands


def stages_demanded(constraints: Constraints) -> int:
    """How many stages there must be at least, and so layers: a model of fewer is cut again."""
    groups, stages, schedule, cuts = (constraints.get(key) for key in ("pipeline", "stages", "schedule", "cuts"))
    counts = [value for value in (groups, stages) if isinstance(value, int)]
    # Numbers of layers, and all names that there will be, are known when the model has been cut.
    counts += [len(cuts) + 1] if isinstance(cuts, tuple) else []
    return max(counts, default=2 if schedule else 1)


def _check(demands: PipelineDemands, program: Program, world_size: int, *, has_loss: bool) -> None:
    groups, stages, schedule = demands.groups, demands.stages, demands.schedule
    num_layers = len(program.layers)
    if groups == 1 and (stages > 1 or schedule):
        raise ConstraintError("pipeline=1 allows no stages: leave it out, or leave out stages=, cuts= and schedule=")
    if stages == 1 and (groups > 1 or schedule):
        raise ConstraintError("stages=1 is no pipeline: leave out pipeline= and schedule=, or ask for more stages")
    if max(groups, stages) > num_layers:
        layers = ", ".join(layer.name for layer in program.layers[:4]) + (" ..." if num_layers > 4 else "")
        raise ConstraintError(
            f"{max(groups, stages)} stages of {num_layers} layers ({layers}): each needs a layer, so ask for fewer"
        )
    if schedule and not (has_loss or find_schedule(schedule).forwards_first):
        raise ConstraintError(
            f"schedule={schedule} needs the loss inside the model, as its backward passes begin before all forward "
            "passes have ended: give loss_fn=, or ask for schedule=gpipe"
        )
    if not demands.needs_pipeline:
        return
    if world_size == 1:
        raise ConstraintError("a pipeline needs at least 2 devices, but there is 1")
    possible = [
        shape
        for count in demands.group_counts(world_size, num_layers)
        # A multiple of everything stands for whatever number of microbatches there will be.
        for shape in demands.shapes(count, num_layers, 8 * count * num_layers, has_loss=has_loss)
    ]
    if not possible:
        raise ConstraintError(_explain(demands, world_size))


def _explain(demands: PipelineDemands, world_size: int) -> str:
    demanded = ", ".join(
        f"{name}={value}"
        for name, value in (("pipeline", demands.groups), ("stages", demands.stages), ("schedule", demands.schedule))
        if value
    )
    numbers = ", ".join(f"{name} {find_schedule(name).stages_text}" for name in schedule_names())
    return (
        f"{demanded} can't be met on {world_size} devices: the device groups must be equal, no group has more than "
        f"{_ROUNDS[-1]} stages unless stages= says so, and each schedule has its number of stages per group: {numbers}"
    )


def _has_even_stages(mean_layers: float) -> bool:
    """Whether stages of so many layers on average take about equally long."""
    return mean_layers >= _LONG_STAGE or math.ceil(mean_layers) <= _LONGEST_STAGE * mean_layers


def _read_cuts(constraints: Constraints, program: Program) -> tuple[int, ...]:
    given = constraints.get("cuts")
    if not isinstance(given, tuple):
        return ()
    cuts = tuple(_layer_index(str(part), program) for part in given)
    limits = (0, *cuts, len(program.layers))
    if any(after <= before for before, after in itertools.pairwise(limits)):
        raise ConstraintError(
            f"cuts={','.join(map(str, given))}: they must ascend and be between 1 and {len(program.layers) - 1}, "
            f"the last layer, but are layers {', '.join(map(str, cuts))}"
        )
    return cuts


def _layer_index(part: str, program: Program) -> int:
    names = [layer.name for layer in program.layers]
    if part in names:
        return names.index(part)
    if part.isdecimal() and len(part) < 10:
        return int(part)
    shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
    raise ConstraintError(f"cuts: {part!r:.80} is neither a number nor one of the {len(names)} layers {shown}")
