"""The prediction of a plan: seconds and bytes, by the prices of one kind of device."""

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
    say when parts of them are spent: `forward_comm_s` is the communication in the forwards of microbatches,
    `step_comm_s` that which runs once a step; all other seconds belong to the backwards, and `weight_s` is the part of
    them that computes gradients of parameters alone.  Bytes are per device.  `saved_bytes` are those of one microbatch
    in flight, `split_bytes` those of one between the two parts of a split backward: gradients that the second part
    reads.  `leave_s` and `return_s` are the exposed seconds of copies to the host's memory and back (by which they take
    longer than the compute and the collectives of activations that they overlap with), `copies_s` all their seconds,
    one way, and `host_bytes` the host's memory for one microbatch in flight.
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
        """The cost of both layers on the same device."""
        total = object.__new__(LayerCost)  # a search adds up many: the constructor of a frozen class takes longer
        vars(total).update(zip(vars(self), map(operator.add, vars(self).values(), vars(other).values()), strict=True))
        return total

    @property
    def total_s(self) -> float:
        """The layer's share of the step time."""
        return (
            self.forward_s + self.backward_s + self.recompute_s
            + self.activation_comm_s + self.parameter_comm_s + self.optimizer_s + self.offload_s
        )  # fmt: skip

    @property
    def offload_s(self) -> float:
        """The seconds in which the device waits for copies to and from the host."""
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
        """The bytes that the layer holds throughout training."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def persistent_bytes(self) -> float:
        """The bytes that the layer holds at the step's peak, without transients."""
        return self.static_bytes + self.saved_bytes


SPENT = {
    "forward": "forward_s", "backward": "backward_s", "recompute": "recompute_s",
    "activation communication": "activation_comm_s", "parameter communication": "parameter_comm_s",
    "optimizer": "optimizer_s", "copies to the host": "offload_s",
}  # fmt: skip
"""Category of time as printed -> the field of `LayerCost` with its seconds."""


@dataclass(frozen=True)
class RowCost:
    """The cost of compute as a function of the lengths of sequences.

    A data-parallel rank spends ``token_s * sum(n) + pair_s * sum(n**2)`` on sequences of n tokens: everything but
    attention is linear in n, and so is a part of attention.  It spends ``row_pair_s * tokens**2`` on each row in
    attention of all places of the row to each other, ``microbatch_s`` for each microbatch, and ``step_s`` once a step.
    With pipeline stages the first three are means over stages, and everything else, including the bubble, is in
    ``step_s``.

    Args:
        ranks: how many data-parallel ranks the rows of a batch are split over in attention
            (`autopar.step.layer.data_split.attention_split`).
        rows: of a rank in one microbatch.
        tokens: of a row: dim 1 of the first input that has one; 0: no input has.
        token_s: seconds per token.
        pair_s: seconds per pair of tokens of one sequence, in attention that skips pairs of different sequences; a row
            that is one sequence has ``tokens**2`` pairs.
        step_s: seconds of a step that don't depend on its sequences: gathering, reducing and updating parameters.
        microbatch_s: seconds of a microbatch that don't depend on its sequences: gathering parameters and reducing
            gradients, as far as each microbatch does.
        microbatches: the number of microbatches of the plan.
        fixed_bytes: the part of a device's peak memory that doesn't depend on the rows of a microbatch.
        row_bytes: the bytes by which each row of a microbatch increases that peak.
        row_pair_s: seconds per pair of places of a row, in attention that skips none, whatever its mask says.
    """

    ranks: int = 1
    rows: int = 0
    tokens: int = 0
    token_s: float = 0.0
    pair_s: float = 0.0
    step_s: float = 0.0
    microbatch_s: float = 0.0
    microbatches: int = 1
    fixed_bytes: float = 0.0
    row_bytes: float = 0.0
    row_pair_s: float = 0.0

    @property
    def place_s(self) -> float:
        """Seconds per place of a row, with or without a token: all but ``pair_s``."""
        return self.token_s + self.row_pair_s * self.tokens

    @property
    def own_pair_s(self) -> float:
        """Seconds per pair of tokens of a sequence that has a row of just its length."""
        return self.pair_s + self.row_pair_s

    def at_once(self, rows: int, limit_bytes: float) -> int:
        """How many of a rank's `rows` rows are in one microbatch, if a device may use `limit_bytes`.

        A plan without microbatches also runs steps of more rows in one pass, as long as they fit in memory; other plans
        run them in microbatches of `self.rows` each.  `autopar.search.plan_reuse` follows this.
        """
        fits = self.fixed_bytes + rows * self.row_bytes <= limit_bytes
        return rows if rows <= self.rows or (self.microbatches == 1 and fits) else self.rows

    def fixed_s(self, rows: int, at_once: int) -> float:
        """Seconds of a step that don't depend on sequences, for `rows` rows of a rank with `at_once` per microbatch."""
        return self.step_s + self.microbatch_s * math.ceil(rows / max(1, at_once))


@dataclass(frozen=True)
class LengthPlan:
    """A member of a family of plans for sequences of many lengths; each member has its own row length.

    Args:
        row: the cost of its rows.
        share: the share of steps that it runs.
        step_time_s: the mean time of these steps, in seconds.
        axes: the parallelism of most of its layers.
    """

    row: RowCost
    share: float = 0.0
    step_time_s: float = 0.0
    axes: str = ""


@dataclass(frozen=True)
class GroupRow:
    """The cost of a row on a group of devices, in steps whose groups run different programs.

    Args:
        degree: the number of devices of the group; every row is split over all of them.
        tokens: of a row.
        row_s: seconds of a row without attention, for any sequences in it.
        pair_s: seconds per pair of tokens of one sequence.
        axes: the parallelism of most layers.
        peak_bytes: peak memory of a device of the group, including what the plan for all devices keeps between steps.
        fill_s: seconds that a group with any row needs in addition: in which its pipeline stages fill and drain.

    With pipeline stages `degree` counts the devices of each stage, and `row_s` and `pair_s` are those of the slowest
    stage.
    """

    degree: int
    tokens: int
    row_s: float
    pair_s: float
    axes: str = ""
    peak_bytes: float = 0.0
    fill_s: float = 0.0


@dataclass(frozen=True)
class LengthPrediction:
    """The prediction for sequences whose lengths follow a distribution: means over batches drawn from it.

    Args:
        lengths: the distribution, as text.
        sequences: the number of sequences in a step.
        batches: how many batches were drawn.
        plans: the family: the plan itself, then one for each of its `other_calls`, in their order.
        step_time_s: seconds of a step if each step runs the plan of the family that is fastest for it.
        static_s: seconds of a step if all steps run the best single plan, for the longest rows.
        static: the cost of rows by that plan.
        standard_error_s: standard error of the mean of the seconds that the family saves per step.
        gains: category -> seconds per step that the family saves there; they add up to ``static_s - step_time_s``.
        groups: the cost of rows on each of the plan's `groups`, in their order.
        coupling_s: seconds to gather, reduce and update parameters, once in a step whose groups differ.
        group_share: the share of steps that run with different groups.
        group_step_s: the mean time of these steps, in seconds.
        nests: whether a device may be in several groups of a step, one after the other.
        nested_share: the share of steps in which some device is.
        packs: whether sequences share rows; else each has a row of its own.
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
    nests: bool = False
    nested_share: float = 0.0
    packs: bool = True


@dataclass(frozen=True)
class Prediction:
    """The expected cost of a plan's decisions by the prices of one kind of device; all 0 where nothing is known.

    Args:
        device: name of the device whose prices are used.
        price_source: source of prices ("profile", "measured", ...) -> its share of the step time.
        step_time_s: seconds of one training step, optimizer included.
        overlapped_s: by how much a simulation of the step with overlapped communication is shorter than a sum: without
            stages the sum of the layers' seconds, with stages that of the schedule's timeline and the work done once
            per step.  Negative where stages wait for each other longer than in that sum.
        peak_memory_bytes: peak bytes per device.
        host_memory_bytes: peak bytes of offloaded tensors in the host's memory, per device.
        samples_per_step: batch rows per step, for throughput.
        costs: the cost of every layer.
        stages: the cost of every pipeline stage.
        optimizer_gathers_s: the part of the step in which parameters are gathered for an optimizer that needs them
            whole (the mean over device groups).
        output_gathers_s: the part of the step in which outputs other than the loss are gathered for the caller.
        output_reads_s: seconds to gather them when the caller reads all of them; not part of the step.
        speedups: precision that was not requested (``"bf16"``) -> estimated speedup of a step in it.
        tokens_per_step: tokens of the whole batch; 0: its rows don't consist of tokens.
        dtype: the dtype of most of the arithmetic.
        model_flops: FLOPs of all devices in a step, forward and backward without recomputation, with causal attention
            counted half (`autopar.step.costs.model_flops`).
        peak_flops_per_s: of a device in `dtype`, by its data sheet; 0: not known.
        row: the cost of a step as a function of the lengths of sequences in its rows.
        lengths: the prediction of a family of plans for sequences of many lengths.
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
        """Seconds of the step by category, which add up to the step time; for a pipeline, means over device groups.

        Each collective is counted by itself.  The seconds that shared buffers save, or that overlap with compute and
        would be counted twice, are subtracted as ``"overlapped communication"``; ``"waiting in the pipeline"`` is the
        rest.
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
        """`spent` in fewer categories: forward and backward as compute, and only the exposed communication."""
        spent = self.spent(num_groups)
        merged = {
            "compute": ("forward", "backward"),
            "exposed communication": (
                "activation communication", "parameter communication", "overlapped communication", "optimizer gathers"
            ),
        }  # fmt: skip
        results = {name: sum(spent.pop(part, 0.0) for part in parts) for name, parts in merged.items()}
        return results | spent
