"""What is predicted of a plan: seconds and bytes, by the prices of one kind of device."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from autopar.schedules.action_lists import StageCost

__all__ = ["SPENT", "GroupRow", "LayerCost", "LengthPlan", "LengthPrediction", "Prediction", "RowCost"]


@dataclass(frozen=True)
class LayerCost:
    """Predicted cost of one layer on one device for one whole step (all microbatches).

    The first six fields, `leave_s` and `return_s` are seconds and add up to the layer's share of the step.  Three more
    say when parts of them are spent: of the communication, what belongs to the forwards of microbatches
    (`forward_comm_s`) and what runs once a step (`step_comm_s`); of what is left, which all belongs to the backwards,
    what gives gradients of parameters alone (`weight_s`).  Bytes are per device, `saved_bytes` for one microbatch in
    flight, `split_bytes` for one between the two parts of a backward in two parts: gradients that the second part
    reads.  `leave_s` and `return_s` are what copies to the host's memory and back take longer than the computing at the
    same time, `host_bytes` what is there of one microbatch in flight, `copies_s` all that they take, one way.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    activation_comm_s: float = 0.0
    parameter_comm_s: float = 0.0
    optimizer_s: float = 0.0
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    saved_bytes: float = 0.0
    transient_bytes: float = 0.0
    forward_comm_s: float = 0.0
    step_comm_s: float = 0.0
    weight_s: float = 0.0
    split_bytes: float = 0.0
    leave_s: float = 0.0
    return_s: float = 0.0
    host_bytes: float = 0.0
    copies_s: float = 0.0

    def __add__(self, other: LayerCost) -> LayerCost:
        """The cost of both, on the same device."""
        return LayerCost(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def total_s(self) -> float:
        """The layer's share of the step time."""
        return (
            self.forward_s + self.backward_s + self.recompute_s
            + self.activation_comm_s + self.parameter_comm_s + self.optimizer_s + self.offload_s
        )  # fmt: skip

    @property
    def offload_s(self) -> float:
        """What waits for copies between the device and the host."""
        return self.leave_s + self.return_s

    @property
    def in_forward_s(self) -> float:
        """The part of `total_s` in the forwards of all microbatches."""
        return self.forward_s + self.forward_comm_s + self.leave_s

    @property
    def in_step_s(self) -> float:
        """The part of `total_s` that is spent once per step."""
        return self.step_comm_s + self.optimizer_s

    @property
    def in_backward_s(self) -> float:
        """The part of `total_s` in the backwards of all microbatches."""
        return (
            self.backward_s + self.recompute_s + self.return_s
            + (self.activation_comm_s + self.parameter_comm_s - self.forward_comm_s - self.step_comm_s)
        )  # fmt: skip

    @property
    def static_bytes(self) -> float:
        """What the layer holds all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def persistent_bytes(self) -> float:
        """What the layer holds at the moment of the step's peak, without transients."""
        return self.static_bytes + self.saved_bytes


SPENT = {
    "forward": "forward_s", "backward": "backward_s", "recompute": "recompute_s",
    "activation communication": "activation_comm_s", "parameter communication": "parameter_comm_s",
    "optimizer": "optimizer_s", "copies to the host": "offload_s",
}  # fmt: skip
"""What a layer's seconds are spent on -> the field of `LayerCost`."""


@dataclass(frozen=True)
class RowCost:
    """What computing costs by the lengths of sequences.

    A data-parallel rank spends ``token_s * sum(n) + pair_s * sum(n**2)`` on sequences of n tokens: all but attention is
    linear, and so is a part of attention; ``microbatch_s`` for each microbatch, and ``step_s`` once a step.  With
    pipeline stages the first two are means over stages, and all else, the bubble included, is in ``step_s``.

    Args:
        ranks: how many data-parallel ranks share the rows of a batch in attention
            (`autopar.step.data_split.attention_split`).
        rows: of a rank in one microbatch.
        tokens: of a row: dim 1 of the first input that has one; 0: no input has.
        token_s: seconds per token.
        pair_s: seconds per pair of tokens of one sequence, ``tokens**2`` of a row that is one sequence.
        step_s: seconds of a step whatever its sequences: parameters are gathered, reduced and updated.
        microbatch_s: seconds of a microbatch whatever its sequences: those parameters that are gathered, and gradients
            that are reduced, in each of them.
        microbatches: of the plan.
        held_bytes: of a device's peak, what does not depend on the rows of a microbatch.
        row_bytes: of the same, what each row of a microbatch adds.
    """

    ranks: int = 1
    rows: int = 0
    tokens: int = 0
    token_s: float = 0.0
    pair_s: float = 0.0
    step_s: float = 0.0
    microbatch_s: float = 0.0
    microbatches: int = 1
    held_bytes: float = 0.0
    row_bytes: float = 0.0

    def at_once(self, rows: int, limit_bytes: float) -> int:
        """How many of `rows` rows of a rank are in one microbatch, where a device may use so many bytes.

        A plan without microbatches runs steps of more rows in one as well, as long as they fit into memory; all others
        run them in microbatches of `rows` each.  `autopar.search.plan_reuse` keeps to it.
        """
        fits = self.held_bytes + rows * self.row_bytes <= limit_bytes
        return rows if rows <= self.rows or (self.microbatches == 1 and fits) else self.rows

    def fixed_s(self, rows: int, at_once: int) -> float:
        """Seconds of a step of so many rows of a rank whatever is in them, so many at once."""
        return self.step_s + self.microbatch_s * math.ceil(rows / max(1, at_once))


@dataclass(frozen=True)
class LengthPlan:
    """A member of a family of plans for sequences of many lengths, each for rows of its own length.

    Args:
        row: what its rows cost.
        share: of the steps that it runs.
        step_time_s: the mean of these steps.
        axes: what most of its layers do.
    """

    row: RowCost
    share: float = 0.0
    step_time_s: float = 0.0
    axes: str = ""


@dataclass(frozen=True)
class GroupRow:
    """What a row costs a group of devices, in steps whose groups differ.

    Args:
        degree: devices of the group, which share every row.
        tokens: of a row.
        row_s: seconds of a row without attention, whatever is in it.
        pair_s: seconds per pair of tokens of one sequence.
        axes: what most layers do.
        peak_bytes: of a device of the group, what the plan for all devices keeps between steps included.
    """

    degree: int
    tokens: int
    row_s: float
    pair_s: float
    axes: str = ""
    peak_bytes: float = 0.0


@dataclass(frozen=True)
class LengthPrediction:
    """What is expected of steps whose sequences have lengths of a distribution: means over batches that were drawn.

    Args:
        lengths: the distribution, as text.
        sequences: of a step.
        batches: how many were drawn.
        plans: the family: the plan itself, then one for each of its `other_calls`, in their order.
        step_time_s: seconds of a step, each by the plan of the family that is fastest for it.
        static_s: seconds of a step by the best plan for the longest rows alone.
        static: what rows cost by that plan.
        standard_error_s: of the mean of what the family saves of a step.
        gains: on what the family saves seconds of a step, the parts of ``static_s - step_time_s``.
        groups: what rows cost each of the plan's `groups`, in their order.
        coupling_s: seconds, once in a step of unlike groups, to gather, reduce and update parameters.
        group_share: of the steps that unlike groups run.
        group_step_s: the mean of these steps.
    """

    lengths: str = ""
    sequences: int = 0
    batches: int = 0
    plans: tuple[LengthPlan, ...] = ()
    step_time_s: float = 0.0
    static_s: float = 0.0
    standard_error_s: float = 0.0
    gains: tuple[tuple[str, float], ...] = ()
    groups: tuple[GroupRow, ...] = ()
    coupling_s: float = 0.0
    group_share: float = 0.0
    group_step_s: float = 0.0
    static: RowCost = RowCost()


@dataclass(frozen=True)
class Prediction:
    """What is expected of a plan's decisions by the prices of one kind of device; all 0 where nothing is known.

    Args:
        device: name of the device that prices are of.
        price_source: share of the step time by where its prices come from ("profile", "measured", ...).
        step_time_s: seconds of one training step, optimizer included.
        overlapped_s: what simulating the step, with overlapped communication, takes off a sum: without stages that
            of the layers' seconds, with stages that of the schedule's timeline and what is done once per step.  Less
            than 0 where stages wait for each other longer than that sum says.
        peak_memory_bytes: peak bytes per device.
        host_memory_bytes: peak bytes per device in the host's memory, of what is offloaded.
        samples_per_step: batch rows per step, for throughput.
        costs: of every layer.
        stages: of every pipeline stage.
        optimizer_gathers_s: the part of the step in which parameters are gathered for an optimizer that needs them
            whole (the mean over device groups).
        output_gathers_s: the part of the step in which outputs beside the loss are gathered for the caller.
        output_reads_s: seconds to gather them when the caller reads all of them; not part of the step.
        speedups: precision that was not asked for (``"bf16"``) -> how many times as fast a step would be, by estimate.
        tokens_per_step: of the whole batch; 0: its rows are no rows of tokens.
        dtype: that most arithmetic is done in.
        model_flops: of all devices in a step, forward and backward without recomputation, causal attention counted half
            (`autopar.step.model_flops`).
        peak_flops_per_s: of a device in `dtype`, by its data sheet; 0: not known.
        row: what a step costs by the lengths of sequences in its rows.
        lengths: of a family of plans for sequences of many lengths.
    """

    device: str = ""
    price_source: tuple[tuple[str, float], ...] = ()
    step_time_s: float = 0.0
    overlapped_s: float = 0.0
    peak_memory_bytes: float = 0.0
    host_memory_bytes: float = 0.0
    samples_per_step: int = 0
    costs: tuple[LayerCost, ...] = ()
    stages: tuple[StageCost, ...] = ()
    optimizer_gathers_s: float = 0.0
    output_gathers_s: float = 0.0
    output_reads_s: float = 0.0
    speedups: tuple[tuple[str, float], ...] = ()
    tokens_per_step: int = 0
    dtype: str = ""
    model_flops: float = 0.0
    peak_flops_per_s: float = 0.0
    row: RowCost = RowCost()
    lengths: LengthPrediction = LengthPrediction()

    def spent(self, num_groups: int) -> dict[str, float]:
        """What the step's seconds are spent on; they add up to the step, of a pipeline as the mean over device groups.

        Collectives are counted one by one.  What shared buffers save, and what overlaps with compute and so would be
        counted twice, is subtracted as ``"overlapped communication"``; ``"waiting in the pipeline"`` is what is left.
        """
        results = {name: sum(getattr(cost, field) for cost in self.costs) / num_groups for name, field in SPENT.items()}
        results["optimizer"] -= self.optimizer_gathers_s
        results["optimizer gathers"] = self.optimizer_gathers_s
        rest = self.step_time_s - sum(results.values())
        if self.stages and rest >= 0:
            results["waiting in the pipeline"] = rest
        elif self.stages or self.overlapped_s:
            results["overlapped communication"] = rest
        return results

    def summary(self, num_groups: int) -> dict[str, float]:
        """`spent` in fewer parts: forward and backward are compute, of communication counts what is exposed."""
        spent = self.spent(num_groups)
        joined = {
            "compute": ("forward", "backward"),
            "exposed communication": (
                "activation communication", "parameter communication", "overlapped communication", "optimizer gathers"
            ),
        }  # fmt: skip
        results = {name: sum(spent.pop(part, 0.0) for part in parts) for name, parts in joined.items()}
        return results | spent
