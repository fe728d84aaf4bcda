"""How much the seconds of each stage count when the candidates of device groups are chosen.

A step takes as long as its longest chain of actions (`autopar.schedules.critical_paths`), and stages that this chain
passes by may be slower for nothing.  So a second of a stage counts as often as its actions are on chains that are
longest; before any are known, as often as there are microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.schedules import Shape
from autopar.schedules.action_lists import COSTS, ScheduleActions, StageCost, seconds_of
from autopar.schedules.critical_paths import schedule_paths
from autopar.search.chain.cost_tables import CostTables

__all__ = ["StageWeights"]

Array = npt.NDArray[np.float64]
_F, _B, _I, _W, _SEND_F, _SEND_B = (COSTS[kind] for kind in ("F", "B", "I", "W", "SEND_F", "SEND_B"))


@dataclass(frozen=True, eq=False)
class StageWeights:
    """Of each stage.

    Args:
        counts: ``[stage, cost]``, how often F, B, I, W, SEND_F, SEND_B count.
        begin: ``[stage]``, how often what its group does before its first action counts.
        once: ``[stage]``, how often what is done once per step counts, after the last action.
    """

    counts: Array
    begin: Array
    once: Array

    @classmethod
    def equal(cls, tables: CostTables, shape: Shape) -> StageWeights:
        """All microbatches of all stages, less what runs of W while devices would wait (`CostTables.split_gain`)."""
        counts = np.full((shape.num_stages, len(COSTS)), float(shape.num_microbatches))
        counts[:, _I], counts[:, _W] = 0.0, -tables.split_gain * shape.num_microbatches
        return cls(counts, np.ones(shape.num_stages), np.ones(shape.num_stages))

    def leaning(self, shape: Shape, lean: float) -> StageWeights:
        """Each stage of a group counts more than the one before it, by the share `lean`."""
        groups = shape.groups
        numbers = np.array([groups[:stage].count(group) for stage, group in enumerate(groups)])
        times = 1 + lean * numbers
        return StageWeights(self.counts * times[:, None], self.begin * times, self.once * times)

    def towards_longest(
        self,
        shape: Shape,
        actions: ScheduleActions,
        stages: tuple[StageCost, ...],
        begins_s: tuple[float, ...],
        share: float,
    ) -> StageWeights:
        """With so large a part for the longest chain of these stages; `begins_s` as for `pipeline_step_s`."""
        splits = any(stage.weight_s for stage in stages)
        chains = schedule_paths(actions, shape.num_stages, splits=splits)
        owner, begin_s = np.array(shape.groups), np.array(begins_s)
        once_s = np.bincount(owner, [stage.step_s for stage in stages]) - begin_s
        chain_s = np.einsum("psk,sk->p", chains.counts, np.array([seconds_of(stage) for stage in stages]))
        longest = int((chain_s + begin_s[chains.begins] + once_s[chains.group]).argmax())
        return StageWeights(
            (1 - share) * self.counts + share * chains.counts[longest],
            (1 - share) * self.begin + share * (owner == chains.begins[longest]),
            (1 - share) * self.once + share * (owner == chains.group[longest]),
        )

    def of(self, stage: int) -> tuple[float, float, float, float, float]:
        """How often a forward, a whole backward, its second part, and what is done before the first and after the last
        action, count in this stage.
        """
        forward, backward, inputs, weights = self.counts[stage, [_F, _B, _I, _W]].tolist()
        return forward, backward + inputs, weights - inputs, float(self.begin[stage]), float(self.once[stage])

    def sends(self, stage: int) -> tuple[float, float]:
        """How often what this stage sends to the next one counts, and the gradients that it gets back."""
        return float(self.counts[stage, _SEND_F]), float(self.counts[stage + 1, _SEND_B])
