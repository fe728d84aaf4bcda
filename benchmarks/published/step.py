"""Seconds of one training step: layers, collectives, stages and the optimizer on one timeline."""

from __future__ import annotations

from typing import NamedTuple

from autopar.placement import Axis
from benchmarks.published.calibration import BETWEEN_STEPS_S, CALIBRATED, Calibration
from benchmarks.published.clusters import prices_of
from benchmarks.published.layers import Pricer
from benchmarks.published.overlap import both_s, exposed_s, gathered_ahead_s, pipeline_s
from benchmarks.published.recomputation import recomputed_s
from benchmarks.published.runs import Run, num_parameters
from benchmarks.published.stacks import stack_of

__all__ = ["predict_s"]


class _LayerTimes(NamedTuple):
    """Seconds of one microbatch in one layer on one device, tensor and context parallelism included."""

    forward_s: float
    backward_s: float  # with what is computed again


class _Gathers(NamedTuple):
    """Seconds of gathering and reducing one layer's (or embedding's and head's) sharded parameters."""

    gather_s: float
    regather_s: float
    reduce_s: float


def predict_s(run: Run, calibration: Calibration = CALIBRATED) -> float:
    """Seconds of one training step of a row.

    Raises:
        UnpricedRowError: something about the row has no price.
    """
    return _Step(run, calibration).seconds()


class _Step:
    def __init__(self, run: Run, calibration: Calibration) -> None:
        self.run, self.calibration = run, calibration
        self.stack, self.prices = stack_of(run), prices_of(run, calibration)
        self.pricer = Pricer(run, self.stack, self.prices, calibration)
        self.pieces = self.pricer.layer()
        stride = run.tensor * run.context
        self.tensor, self.context = Axis(run.tensor, 1), Axis(run.context, run.tensor)
        self.experts = Axis(run.experts, stride)
        # Ranks of one sequence hold equal parameters, as those of different sequences do.
        self.data = Axis(run.data * run.context, run.tensor)
        self.shard = Axis(run.shard_size, run.tensor)
        self.replicas = Axis(self.data.size // run.shard_size, run.tensor * run.shard_size)
        layer, outer = num_parameters(run)
        self.layer_parameters, self.outer_parameters = layer / run.tensor, outer / run.tensor
        # Embedding and head lie on two stages, if there are several.
        self.parameters_here = run.num_layers / run.num_stages * self.layer_parameters
        self.parameters_here += self.outer_parameters / min(2, run.num_stages)

    def seconds(self) -> float:
        layer = self._layer()
        head_s = sum(piece.forward_s + piece.backward_s for piece in self.pricer.head())
        if self.run.shards_parameters and self.run.num_stages == 1:
            computed_s = self.run.num_microbatches * self._sharded_s(layer, head_s)
        else:
            computed_s = self._stages_s(layer, head_s) + self._gradients_s(layer)
        return computed_s + self._summing_s() + self._optimizer_s() + self._gap_s()

    def _collective_s(self, kind: str, axis: Axis, num_bytes: float) -> float:
        return self.prices.collective_s(kind, axis, num_bytes) if axis.size > 1 else 0.0

    # One layer.

    def _layer(self) -> _LayerTimes:
        communication_s = self._tensor_s() + self._context_s() + self._experts_s()
        again_s = recomputed_s(self.run, self.stack, self.pieces)
        if self.run.recompute.startswith("full"):
            again_s += communication_s
        forward_s = sum(piece.forward_s for piece in self.pieces)
        backward_s = sum(piece.backward_s for piece in self.pieces)
        return _LayerTimes(forward_s + communication_s, backward_s + again_s + communication_s)

    def _tensor_s(self) -> float:
        """What is seen of a forward's tensor-parallel collectives; a backward has as many."""
        num_bytes = 2.0 * self.pricer.tokens * self.run.hidden
        kinds = ("all_gather", "reduce_scatter") if self.run.is_sequence_parallel else ("all_reduce",)
        whole_s = 2 * sum(self._collective_s(kind, self.tensor, num_bytes) for kind in kinds)
        is_cut = self.stack.hides_tensor or self.run.is_asynchronous
        return whole_s * (1 - self.calibration.hidden_tensor * is_cut)

    def _context_s(self) -> float:
        """Keys and values go around a ring beside attention; what of it is seen in a forward."""
        width = 2 * self.pricer.num_kv_heads * self.run.head_size
        ring_s = self._collective_s(
            "all_gather", self.context, 2.0 * self.pricer.tokens * self.run.context * width
        )  # fmt: skip
        attention_s = sum(piece.forward_s for piece in self.pieces if piece.tag == "attention")
        return exposed_s(attention_s, ring_s, self.calibration.taken)

    def _experts_s(self) -> float:
        """Routed tokens, there and back, in a forward."""
        sent = 2.0 * self.pricer.local_tokens * self.run.hidden * self.run.routed[0]
        return 2 * self._collective_s("all_to_all", self.experts, sent)

    # Sharded parameters: gathered before each layer, forward and backward; gradients reduced after it.

    def _sharded_s(self, layer: _LayerTimes, head_s: float) -> float:
        """One microbatch."""
        one, outer = self._gathers(self.layer_parameters), self._gathers(self.outer_parameters)
        copied_s = self.prices.optimizer_s(self.layer_parameters, self.stack.copied_bytes)
        backward_s = layer.backward_s + copied_s
        count = self.run.num_layers
        if not self.stack.overlaps_data:
            outer_s = outer.gather_s + outer.reduce_s
            return count * (layer.forward_s + backward_s + sum(one)) + head_s + outer_s
        taken = self.calibration.taken
        # A layer's backward runs beside the gather of the next one and the reduction of the one before.
        return (
            both_s(head_s, outer.gather_s + outer.reduce_s, taken)
            + gathered_ahead_s([(layer.forward_s, one.gather_s)] * count, taken)
            + gathered_ahead_s([(backward_s, one.regather_s + one.reduce_s)] * count, taken)
        )

    def _gathers(self, num_parameters: float) -> _Gathers:
        is_small = self.pricer.is_eight_bit and "fp8 all-gather" in self.pricer.precision
        apart = self.stack.gathers_apart
        gathered, reduced = ((1.0 if is_small else 2.0) * num_parameters, self.stack.gradient_bytes * num_parameters)
        gather_s = apart * self._collective_s("all_gather", self.shard, gathered / apart)
        reduce_s = apart * self._collective_s("reduce_scatter", self.shard, reduced / apart)
        reduce_s += self._collective_s("all_reduce", self.replicas, reduced / self.shard.size)
        return _Gathers(gather_s, 0.0 if self.run.zero.startswith("2") else gather_s, reduce_s)

    # Whole parameters: stages, then the gradients of a group's layers.

    def _stages_s(self, layer: _LayerTimes, head_s: float) -> float:
        run = self.run
        counts = _layers_of_stages(run.num_layers, run.num_stages, run.num_rounds)
        seconds = [count * (layer.forward_s + layer.backward_s) for count in counts]
        seconds[-1] += head_s
        send_s = self._send_s()
        return pipeline_s([second + send_s for second in seconds], run.num_microbatches, run.num_rounds)

    def _send_s(self) -> float:
        """Sends that a device group waits for, per microbatch."""
        run = self.run
        if run.num_stages == 1 or self.stack.overlaps_data:
            return 0.0
        split = run.tensor if run.is_sequence_parallel or self.stack.splits_sends else 1
        axis = Axis(run.num_stages, run.num_devices // run.num_stages)
        return 2 * run.num_rounds * self._collective_s("send", axis, 2.0 * self.pricer.tokens * run.hidden / split)

    def _gradients_s(self, layer: _LayerTimes) -> float:
        """Reducing gradients and gathering updated parameters, where no compute hides it."""
        run, here = self.run, self.parameters_here
        reduced, gathered = self.stack.gradient_bytes * here, 2 * here
        gather_s = 0.0
        if self.stack.broadcasts:
            reduce_s = self._collective_s("all_reduce", self.data, reduced)
            gather_s = self.shard.size * self._collective_s("broadcast", self.shard, gathered / self.shard.size)
        elif self.shard.size > 1:  # with stages, sharded parameters stay gathered until the step's end
            reduce_s = self._collective_s("reduce_scatter", self.data, reduced)
            gather_s = self._collective_s("all_gather", self.data, gathered)
        else:
            reduce_s = self._collective_s("all_reduce", self.data, reduced)
        if not self.stack.overlaps_data:
            return reduce_s + gather_s
        count, taken = run.num_layers / run.num_stages, self.calibration.taken
        if run.num_rounds > 1:  # a round's layers are done with once as many microbatches as stages are through it
            count *= min(run.num_stages, run.num_microbatches)
        hidden_s = exposed_s(count * layer.backward_s, reduce_s, taken)
        return hidden_s + exposed_s(count * layer.forward_s, gather_s, taken)

    def _summing_s(self) -> float:
        """Adding each further microbatch's gradients to their sum."""
        is_reduced = self.run.shards_parameters and self.run.num_stages == 1
        here = self.parameters_here / (self.shard.size if is_reduced else 1)
        return (self.run.num_microbatches - 1) * self.prices.optimizer_s(here, self.stack.sums_bytes)

    def _optimizer_s(self) -> float:
        return self.prices.optimizer_s(self.parameters_here / self.shard.size, self.stack.state_bytes)

    def _gap_s(self) -> float:
        """Between two steps, ranks of several nodes wait for the last of them: for norm and loss, and for the batch."""
        return BETWEEN_STEPS_S if self.run.num_devices > self.run.devices_per_node else 0.0


def _layers_of_stages(num_layers: int, num_stages: int, num_rounds: int) -> list[int]:
    """Layers per device group: even where possible, else with embedding and head counted as a layer each."""
    if num_layers % (num_stages * num_rounds) and (num_layers + 2) % (num_stages * num_rounds) == 0:
        each = (num_layers + 2) // num_stages
        counts = [each] * num_stages
        counts[0] -= 1
        counts[-1] -= 1
        return counts
    return [num_layers // num_stages + (index < num_layers % num_stages) for index in range(num_stages)]
