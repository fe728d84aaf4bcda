"""What of a layer's parameter collectives compute overlaps, as an estimate for each layer by itself.

The runtime gathers a layer's parameters while the layer before it computes, and reduces their gradients while the next
one does (`autopar.step.simulate` has the order).  Layers come in runs of equal ones, so the estimate lets the
collectives of each overlap with its own compute: of t seconds of collectives and c of compute, from which they take a
part, are saved

``min((1 - taken) * t, c)``      (`benchmarks.published.overlap.both_s`, less c and t)

A search minimises sums of seconds; with these estimates it also finds paths whose sums are larger, but not their steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.plan.prediction import LayerCost
from autopar.program import Program
from autopar.step.prices import PricedCollective, Prices
from autopar.step.training import TrainingSpec

__all__ = ["ParameterTransfer", "in_one_buffer", "overlapped_s", "parameter_transfers"]


@dataclass(frozen=True)
class ParameterTransfer:
    """What brings a layer's parameters from their storage, or their gradients back, each time that it runs.

    Args:
        apart_s: seconds, if each parameter has a collective of its own: what a sum counts.
        together_s: seconds, as they share buffers.
        free_s: what of `together_s` is left to compute at the same time.
    """

    apart_s: float = 0.0
    together_s: float = 0.0
    free_s: float = 0.0

    def __add__(self, other: ParameterTransfer) -> ParameterTransfer:
        """Both, one after the other."""
        return ParameterTransfer(
            self.apart_s + other.apart_s, self.together_s + other.together_s, self.free_s + other.free_s
        )  # fmt: skip

    def overlapped_s(self, compute_s: float) -> float:
        """What a sum counts, but a step with so much compute at the same time doesn't show."""
        return self.apart_s - self.together_s + min(self.free_s, compute_s)


def in_one_buffer(program: Program, runs: Iterable[PricedCollective]) -> list[list[PricedCollective]]:
    """The collectives of one layer's parameters by those that share a buffer."""
    shared: dict[tuple[object, ...], list[PricedCollective]] = {}
    for run in runs:
        shared.setdefault((run.kind, run.axis, program.type_of(run.value).dtype), []).append(run)
    return list(shared.values())


def parameter_transfers(
    program: Program, stored: Sequence[PricedCollective], prices: Prices
) -> tuple[ParameterTransfer, ParameterTransfer]:
    """The gathers and the reductions of one layer's parameters; `stored` has both, from `stored_collectives`."""
    ahead, back = ([run for run in stored if run.phase == phase] for phase in ("forward", "backward"))
    return _transfer(program, ahead, prices), _transfer(program, back, prices)


def _transfer(program: Program, runs: list[PricedCollective], prices: Prices) -> ParameterTransfer:
    total = ParameterTransfer()
    for together in in_one_buffer(program, runs):
        first = together[0]
        whole_s = prices.collective_s(first.kind, first.axis, sum(run.num_bytes for run in together))
        total += ParameterTransfer(
            sum(prices.collective_s(run.kind, run.axis, run.num_bytes) for run in together),
            whole_s,
            whole_s * (1 - prices.interference(first.kind, first.axis)),
        )
    return total


def overlapped_s(
    cost: LayerCost,
    gathers: ParameterTransfer,
    reduces: ParameterTransfer,
    zero: int,
    num_microbatches: int,
    training: TrainingSpec,
) -> float:
    """Estimated seconds of a step that `cost` counts, but that don't show.

    ZeRO-3 gathers and ZeRO-2 and 3 reduce in every microbatch.  What is gathered once for several microbatches is
    waited for at once; what is reduced once overlaps with the last backward.
    """
    forward_s = cost.forward_s / num_microbatches
    backward_s = (cost.backward_s + cost.recompute_s) / num_microbatches
    overlaps = zero == 3 or zero == 2 or num_microbatches == 1
    ahead_s = gathers.overlapped_s(forward_s if overlaps else 0.0)
    regathers = zero == 3 and training.is_training and training.reruns
    back_s = (reduces + gathers if regathers else reduces).overlapped_s(backward_s)
    return (num_microbatches if zero == 3 else 1) * ahead_s + (num_microbatches if zero >= 2 else 1) * back_s
