"""With which numbers of device groups and microbatches a pipeline may run, and with which stages and schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from autopar.errors import ConstraintError
from autopar.schedules import Shape, schedule_problem
from autopar.search.pipeline.pipeline_constraints import PipelineDemands
from autopar.search.search_context import SearchContext
from autopar.search.settings.constraints import check_degrees

__all__ = ["FIRST_MICROBATCHES", "PipelineNumbers", "dividing_counts"]

# Microbatches for each device group with which a walk begins: with fewer the bubble is large, with more activations
# are, and so it is rarely far from the best.
FIRST_MICROBATCHES = 2
# The most for each device group: with so many the bubble of 1F1B is 11 % of a step.  With 4, which leaves 20 %,
# a mixture of 671B parameters on 2048 devices was predicted 12 % slower.
_MOST_MICROBATCHES = 8


@dataclass(eq=False)
class PipelineNumbers:
    """Of a search that meets these demands; `context` is that of the search without stages."""

    context: SearchContext
    demands: PipelineDemands

    def counts(self) -> tuple[dict[int, list[int]], tuple[str, ...]]:
        """Numbers of device groups -> the numbers of microbatches that some schedule can run with there; and notes.

        Raises:
            ConstraintError: a pipeline is demanded, but there is none.
        """
        counts = {groups: list(self._microbatch_counts(groups)) for groups in self._group_counts()}
        # Numbers that no schedule can run with say nothing about those around them.
        runnable = {
            groups: [count for count in own if any(True for _ in self.shapes(groups, count))]
            for groups, own in counts.items()
        }
        return runnable, () if any(runnable.values()) else self._why_none(counts)

    def shapes(self, groups: int, count: int) -> Iterator[Shape]:
        """The stages and schedules on so many device groups, with so many microbatches."""
        num_layers, training = len(self.context.program.layers), self.context.request.training
        has_loss = self.context.program.has_loss_in_layers or not training.is_training
        return self.demands.shapes(groups, num_layers, count, has_loss=has_loss, splits=not training.compiled)

    def first_count(self, groups: int, counts: Sequence[int]) -> int:
        """Microbatches with which a walk begins: fewer where one of them would have less than a row for each node."""
        nodes = max(1, self.context.num_devices // groups // self.context.prices.devices_per_node)
        rows = self.context.program.batch_size // nodes
        return min(counts, key=lambda count: abs(count - max(groups, min(rows, FIRST_MICROBATCHES * groups))))

    def usual_sizes(self, groups: int, count: int) -> frozenset[int]:
        """Devices of inner axes: those of a node, or as many as it takes for each data rank to have a row of every
        microbatch.  Any, where degrees are demanded.
        """
        devices = self.context.num_devices // groups
        if any(each.degrees for each in self.context.demands):
            return frozenset(range(1, devices + 1))
        widest = max(self.context.prices.devices_per_node, devices * count // max(1, self.context.program.batch_size))
        return frozenset(range(1, widest + 1))

    def _group_counts(self) -> Iterator[int]:
        context = self.context
        for groups in self.demands.group_counts(context.num_devices, len(context.program.layers)):
            try:
                check_degrees(context.constraints, context.num_devices // groups)
            except ConstraintError:
                if self.demands.groups:
                    raise
                continue
            yield groups

    def _microbatch_counts(self, groups: int) -> Iterator[int]:
        """The numbers of microbatches that may run on so many device groups."""
        context = self.context
        demanded = context.constraints.get("microbatches")
        if isinstance(demanded, int):
            assignment = self.context.time_assignment(demanded)
            if isinstance(assignment, str):
                raise ConstraintError(f"constraint 'microbatches={demanded}': {assignment}")
            yield demanded
            return
        most = max(context.request.max_microbatches, _MOST_MICROBATCHES * groups)
        # A microbatch is to divide over the devices of a demanded data degree.
        demanded_data = max((dict(each.degrees).get("data", 1) for each in context.demands), default=1)
        counts = dividing_counts(context.program.batch_size, demanded_data, context.num_devices // groups, most)
        exact = list(takewhile(lambda count: not isinstance(self.context.time_assignment(count), str), counts))
        yield from exact or [1]  # nothing else is possible

    def _why_none(self, counts: Mapping[int, Sequence[int]]) -> tuple[str, ...]:
        """Raise if a pipeline is demanded; else a note of why there is none."""
        reason = self.context.time_assignment(2)
        exact = f"microbatches would not be exact: {reason}" if isinstance(reason, str) else ""
        if self.demands.needs_pipeline:
            tried = [
                schedule_problem(self.demands.schedule, groups, self.demands.stages or groups, count)
                for groups, own in counts.items()
                for count in own
                if self.demands.schedule
            ]
            why = "; ".join(filter(None, [*dict.fromkeys(tried), exact]))
            raise ConstraintError(
                f"no pipeline meets {', '.join(self.context.request.constraints)}" + (f": {why}" if why else "")
                + ". Change or leave out one of these constraints"
            )  # fmt: skip
        return (f"no pipeline stages: {exact}",) if exact and counts else ()


def dividing_counts(batch: int, data: int, devices: int, most: int) -> list[int]:
    """Numbers of microbatches, 2 to `most`, of which each divides over `data` devices.

    They are powers of two.  Where microbatches don't divide over all devices of a group because the batch has odd
    factors, they are the product of these factors and a power of two instead: of 15,360 rows on groups of 128 devices,
    120 microbatches have a row for each device, and 64 or 128 have 1.9 or 0.9.

    >>> dividing_counts(15360, 1, 128, 128)
    [2, 4, 8, 15, 30, 60, 120]
    """
    powers = [2**exponent for exponent in range(1, most.bit_length()) if batch % 2**exponent == 0]
    odd = max(1, batch // max(1, batch & -batch))
    whole = [count for count in powers if batch % (count * devices) == 0]
    if odd > 1 and whole != powers and 2 * odd <= most:
        multiples = [odd * 2**exponent for exponent in range(most.bit_length()) if odd * 2**exponent <= most]
        powers = sorted([*whole, *multiples])
    return [count for count in powers if batch % (count * data) == 0]
