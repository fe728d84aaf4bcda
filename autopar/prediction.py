"""What is predicted of a plan: seconds and bytes, by the prices of one kind of device."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from autopar.schedules.action_lists import StageCost

__all__ = ["LayerCost", "Prediction"]


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
