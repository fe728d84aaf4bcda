"""How much of a layer's parameter collectives overlaps with compute, estimated for each layer by itself.

The runtime gathers a layer's parameters while the layer before it computes, and reduces their gradients while the next
one does (`simulation.simulate` has the order).  Layers come in runs of equal ones, so the estimate lets the
collectives of each overlap with its own compute: of t seconds of collectives and c of compute, from which they take a
part, are saved

``min((1 - taken) * t, c)``      (`benchmarks.published.overlap.both_s`, less c and t)

Compute that waits for a collective of activations waits first for the one that is under way, so each of these ends a
run of compute: a collective of parameters overlaps with the run in which it begins, and with no other.  One between
nodes goes on while a collective of activations runs inside the nodes (`runs_concurrently`), so those don't end its run.

A search minimizes sums of seconds less these estimates; `hideable_s` bounds what can be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.placement import Links
from autopar.plan.prediction import LayerCost
from autopar.program import Program
from autopar.step.costs.parameter_costs import brought_s
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.prices import PricedCollective, Prices
from autopar.step.training import TrainingSpec

__all__ = [
    "ComputingRuns",
    "Hideable",
    "ParameterCollective",
    "ParameterTransfer",
    "hideable_s",
    "in_one_buffer",
    "overlapped_s",
    "parameter_transfers",
    "runs_concurrently",
]


def runs_concurrently(transfer: Links, collective: Links) -> bool:
    """Whether a collective of parameters goes on while compute waits for a collective of activations.

    Each process group has a communicator and a stream of its own (https://github.com/pytorch/pytorch/issues/132852),
    so two collectives run at once, and no link carries both if one is between nodes and the other inside them.  Both
    take memory bandwidth and multiprocessors: the collective of activations is slowed down like compute.
    """
    return transfer == Links.NETWORK and collective == Links.NODE


class ParameterCollective(NamedTuple):
    """One collective of parameters or gradients: its seconds, what of them is left to compute at the same time, and the
    links that it keeps busy.
    """

    seconds: float
    free_s: float
    links: Links = Links.NODE | Links.NETWORK

    @property
    def passes_nodes(self) -> bool:
        """Whether it runs at the same time as collectives inside nodes."""
        return runs_concurrently(self.links, Links.NODE)


class ComputingRuns(NamedTuple):
    """Seconds between collectives of activations that end a run of compute, in order.

    Args:
        of_all: for transfers that wait while any collective of activations runs.
        of_network: for those that run at the same time as collectives inside nodes, whose seconds are included.
    """

    of_all: Sequence[float]
    of_network: Sequence[float]

    def then(self, other: ComputingRuns) -> ComputingRuns:
        """These runs and others behind them: the last of the first goes on as the first of the others."""
        return ComputingRuns(
            *((*one[:-1], one[-1] + two[0], *two[1:]) for one, two in zip(self, other, strict=True))
        )  # fmt: skip


@dataclass(frozen=True)
class ParameterTransfer:
    """What brings a layer's parameters from their storage, or their gradients back, each time that it runs.

    Args:
        apart_s: seconds, if each parameter has a collective of its own: what a sum counts.
        together: the collectives, as parameters share buffers.
    """

    apart_s: float = 0.0
    together: tuple[ParameterCollective, ...] = ()

    def __add__(self, other: ParameterTransfer) -> ParameterTransfer:
        """Both, one after the other."""
        return ParameterTransfer(self.apart_s + other.apart_s, self.together + other.together)

    @property
    def together_s(self) -> float:
        """Seconds, as they share buffers."""
        return sum(each.seconds for each in self.together)

    @property
    def unmerged_s(self) -> float:
        """What a sum counts, but no step shows, as parameters share buffers."""
        return self.apart_s - self.together_s

    def hideable_s(self) -> float:
        """What a sum counts and a step may not show, however long it computes at the same time."""
        return self.unmerged_s + sum(each.free_s for each in self.together)

    def overlapped_s(self, runs: ComputingRuns) -> float:
        """What a sum counts, but a step doesn't show that computes so long at the same time, run by run."""
        between = [each.free_s for each in self.together if each.passes_nodes]
        others = [each.free_s for each in self.together if not each.passes_nodes]
        hidden_s = _within_runs(others, runs.of_all)
        if between:
            # Both kinds share one queue and the same compute.
            hidden_s = min(hidden_s + _within_runs(between, runs.of_network), sum(runs.of_network))
        return self.unmerged_s + hidden_s


def _within_runs(transfers_s: Sequence[float], runs_s: Sequence[float]) -> float:
    """What of these is hidden by runs of compute, each by the run in which it begins."""
    hidden_s, run = 0.0, 0
    left_s = runs_s[0] if runs_s else 0.0
    for free_s in transfers_s:
        hidden_s += min(free_s, left_s)
        left_s -= free_s
        if left_s <= 0:
            run += 1
            left_s = runs_s[run] if run < len(runs_s) else 0.0
    return hidden_s


def in_one_buffer(program: Program, runs: Iterable[PricedCollective]) -> list[list[PricedCollective]]:
    """The collectives of one layer's parameters by those that share a buffer."""
    shared: dict[tuple[object, ...], list[PricedCollective]] = {}
    for run in runs:
        shared.setdefault((run.kind, run.axis, program.type_of(run.value).dtype), []).append(run)
    return list(shared.values())


def parameter_transfers(
    placed: PlacedLayer, stored: Sequence[PricedCollective], prices: Prices, training: TrainingSpec
) -> tuple[ParameterTransfer, ParameterTransfer]:
    """The gathers and the reductions of one layer's parameters; `stored` has both, from `stored_collectives`.

    Parameters in the host's memory are copied to the device before they are gathered.
    """
    ahead, back = ([run for run in stored if run.phase == phase] for phase in ("forward", "backward"))
    copy_s = brought_s(placed, prices, training)
    copies = ParameterTransfer(
        copy_s, (ParameterCollective(copy_s, copy_s * (1 - prices.host.taken)),) if copy_s else ()
    )
    return copies + _transfer(placed.program, ahead, prices), _transfer(placed.program, back, prices)


def _transfer(program: Program, runs: list[PricedCollective], prices: Prices) -> ParameterTransfer:
    together: list[ParameterCollective] = []
    for merged in in_one_buffer(program, runs):
        first = merged[0]
        whole_s = prices.collective_s(first.kind, first.axis, sum(run.num_bytes for run in merged))
        free_s = whole_s * (1 - prices.interference(first.kind, first.axis))
        together.append(ParameterCollective(whole_s, free_s, first.axis.links(prices.devices_per_node)))
    apart_s = sum(prices.collective_s(run.kind, run.axis, run.num_bytes) for run in runs)
    return ParameterTransfer(apart_s, tuple(together))


def overlapped_s(
    runs: tuple[ComputingRuns, ComputingRuns],
    gathers: ParameterTransfer,
    reduces: ParameterTransfer,
    zero: int,
    num_microbatches: int,
    training: TrainingSpec,
) -> float:
    """Estimated seconds of a step that a layer's cost counts, but that don't show.

    ZeRO-3 gathers and ZeRO-2 and 3 reduce in every microbatch.  What is gathered once for several microbatches is
    waited for at once; what is reduced once overlaps with the last backward.

    Args:
        runs: of one microbatch's forward and backward.
        gathers: of the layer's parameters.
        reduces: of their gradients.
        zero: the ZeRO level.
        num_microbatches: of the step.
        training: the layer's own.
    """
    forward, backward = runs
    overlaps = zero == 3 or zero == 2 or num_microbatches == 1
    ahead_s = gathers.overlapped_s(forward) if overlaps else gathers.unmerged_s
    regathers = zero == 3 and training.is_training and training.reruns
    back_s = (reduces + gathers if regathers else reduces).overlapped_s(backward)
    return (num_microbatches if zero == 3 else 1) * ahead_s + (num_microbatches if zero >= 2 else 1) * back_s


class Hideable(NamedTuple):
    """Seconds of a step that a layer's cost counts and that may not show, at most: of communication that overlaps with
    compute, what it leaves of the compute's speed.

    Args:
        forward_s: in forwards.
        backward_s: in backwards.
        begin_s: before the first action.
        end_s: behind the last one.
        weight_s: of `backward_s`, what is in the second part of a backward in two parts.
        begins_s: not hidden, but what a device group does before its first action, while it may wait for others anyway.
    """

    forward_s: float
    backward_s: float
    begin_s: float
    end_s: float
    weight_s: float
    begins_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward_s + self.backward_s + self.begin_s + self.end_s


def hideable_s(
    cost: LayerCost,
    gathers: ParameterTransfer,
    reduces: ParameterTransfer,
    zero: int,
    num_microbatches: int,
    training: TrainingSpec,
    taken_by_copies: float,
    *,
    has_stages: bool,
) -> Hideable:
    """What no step hides more of, however much other layers compute at the same time.

    With stages what is gathered once is gathered before the first action, where all groups but the first wait anyway;
    and what is reduced once is reduced after the last one, where nothing computes.  Copies to the host's memory, and
    back, of the last layer of a stage may even overlap with nothing but the wait for other groups.
    """
    whole_s, merged_s = gathers.hideable_s(), gathers.unmerged_s
    reduced_s = reduces.hideable_s()
    regathers = zero == 3 and training.is_training and training.reruns
    forward_s = num_microbatches * whole_s if zero == 3 else 0.0
    weight_s = num_microbatches * reduced_s if zero >= 2 else 0.0
    backward_s = weight_s + num_microbatches * whole_s * regathers
    begin_s = end_s = begins_s = 0.0
    if zero < 3 and has_stages:
        begin_s, begins_s = merged_s, gathers.together_s
    elif zero < 3:
        begin_s = whole_s if zero == 2 or num_microbatches == 1 else merged_s
    if zero < 2:
        end_s = reduces.unmerged_s if has_stages else reduced_s
    copies_s = 0.0 if has_stages else taken_by_copies * cost.copies_s
    forward_s += max(0.0, cost.leave_s - copies_s)
    backward_s += max(0.0, cost.return_s - copies_s)
    return Hideable(forward_s, backward_s, begin_s, end_s, weight_s, begins_s)
