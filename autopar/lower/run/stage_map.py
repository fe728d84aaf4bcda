"""The device groups of a plan, the stages and layers of each, and the values that cross between stages.

Without a pipeline there is one group with one stage, which has every layer.  Pure data: no tensor, no communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.placement import Axis
from autopar.plan import Plan
from autopar.program import Program

__all__ = ["StageMap"]


@dataclass(frozen=True, eq=False)
class StageMap:
    """The stages of `plan` as the device `rank` sees them.

    `stride`: how many ranks lie between a device and the one with the same place in the next group, if the plan runs on
    some of the ranks of each stage only; 0: on all.
    """

    program: Program
    plan: Plan
    rank: int
    stride: int = 0

    @property
    def is_pipeline(self) -> bool:
        """Whether layers run on several device groups."""
        return bool(self.plan.stages)

    @property
    def axis(self) -> Axis:
        """Across the device groups: its members have the same place in their groups, its coordinates are groups."""
        return Axis(self.plan.num_groups, self.stride or self.plan.group_size)

    @property
    def group(self) -> int:
        """The group of this device."""
        return self.rank // self.plan.group_size

    @property
    def who(self) -> str:
        """This device, for messages."""
        return f"rank {self.rank} (device group {self.group})"

    @property
    def group_ranks(self) -> range:
        """The ranks of this group."""
        size = self.plan.group_size
        return range(self.group * size, (self.group + 1) * size)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Per stage, the indices of its layers."""
        return self.plan.decisions.ranges

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Per stage, the group that runs it."""
        return self.plan.decisions.groups

    @cached_property
    def own_stages(self) -> tuple[int, ...]:
        """The stages that this device's group runs."""
        return tuple(stage for stage, group in enumerate(self.groups) if group == self.group)

    @cached_property
    def own_layers(self) -> frozenset[int]:
        """The layers of these stages."""
        return frozenset(layer for stage in self.own_stages for layer in self.ranges[stage])

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        """Value that a layer puts out -> the (last) stage that does."""
        stages: dict[str, int] = {}
        for stage, layers in enumerate(self.ranges):
            for layer in layers:
                stages.update(dict.fromkeys(self.program.layers[layer].outputs, stage))
        return stages

    def group_of(self, value: str) -> int:
        """The group that holds a value that the program puts out."""
        return self.groups[self.stage_of[value]]

    @cached_property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """Per stage, the values that it gets from the stage before: put out earlier, read in it or later.

        Every device holds the model's inputs; they don't cross.
        """
        layers = self.program.layers
        last_reader = {name: index for index, layer in enumerate(layers) for name in layer.inputs}
        live: dict[str, None] = {}
        crossing: list[tuple[str, ...]] = []
        for indices in self.ranges:
            crossing.append(tuple(name for name in live if last_reader.get(name, -1) >= indices.start))
            live |= dict.fromkeys(name for index in indices for name in layers[index].outputs)
        return tuple(crossing)

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """Name of a parameter or buffer -> the groups whose layers read it, ascending."""
        groups_of: dict[str, set[int]] = {}
        for stage, indices in enumerate(self.ranges):
            for index in indices:
                for value in self.program.layers[index].state:
                    if value in self.program.parameters:
                        groups_of.setdefault(self.program.parameters[value], set()).add(self.groups[stage])
        return {name: tuple(sorted(groups)) for name, groups in groups_of.items()}
