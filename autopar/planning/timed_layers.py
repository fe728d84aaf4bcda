"""Search, time the layers of the plan, and search again, until all layers of the best plan are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from autopar.cost import ClusterPrices
from autopar.cost.layer_corrections import LocalOp, TimedLayer, layer_key
from autopar.cost.measure.layer_times import time_layer
from autopar.cost.profile import LayerTime
from autopar.lower.program.single_layer import SingleLayer
from autopar.ops.attention import DOCUMENTS, document_length, second_document_length, with_document_length
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.search import SearchRequest, search
from autopar.step.layer.local_layer import PlacedLayer, place

__all__ = ["FamilyTimer", "LayerTimer", "search_with_timed_layers"]

_ROUNDS = 3  # of searching and timing: the second finds most, the third what the second's prices bring up
_LONG_S = 20.0  # a search that took longer than this is not done again: users wait for it
_RUNS = 6  # what timing a layer costs, in runs of it by the prices of its ops: a first one, and those that count
_MOST_OF_A_KIND = 4  # layers timed of a kind in one round: its other strategies are scaled by what these say
_FAMILY_S = 16.0  # for a family of plans: it has up to four lengths of rows, each with the seconds of one search
_EACH_S = 0.1  # spent on a layer: enough for a median of most


@dataclass
class LayerTimer:
    """Lowers and times layers on one device, as one rank of the plan's world would run them.

    Args:
        program: whose layers.
        device: where to time them.
        constants: values of the program's constants.
        known: what was timed before, by `layer_key`; new ones are added.
        budget_s: seconds to spend, about.
    """

    program: Program
    device: torch.device
    constants: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    known: dict[str, LayerTime] = field(default_factory=dict[str, LayerTime])
    budget_s: float = 4.0

    def time(self, layer: Layer, strategy: LayerStrategy, num_microbatches: int, *, compiled: bool) -> LayerTime | None:
        """Lower the layer and time it, compiled if the run will be.

        None if it doesn't run on inputs that are made up, or takes more memory than is free.  With integers
        that may index something nothing is tried on a GPU: an index out of range would end the process there.
        """
        has_integers = any(not self.program.type_of(name).is_floating for name in layer.inputs)
        if has_integers and self.device.type != "cpu":
            return None
        try:
            single = SingleLayer(
                self.program, layer, strategy, num_microbatches, self.device, compiled=compiled,
                constants=self.constants,
            )  # fmt: skip
            backward = single.backward if single.is_differentiable else None
            return time_layer(single.forward, backward, self.device, min(_EACH_S, self.budget_s / 10))
        except (RuntimeError, IndexError, ValueError):
            return None


def search_with_timed_layers(
    program: Program, world_size: int, prices: ClusterPrices, request: SearchRequest, timer: LayerTimer
) -> Plan:
    """The plan of a search by prices of ops, corrected by timing whole layers of the plans that came out best.

    What is timed is compute alone, without recomputation: a layer that backward runs again is priced by its forward.

    Args:
        program: what to plan for.
        world_size: number of devices.
        prices: of ops and collectives.
        request: as of `search`.
        timer: times layers, and remembers; its budget bounds the seconds spent.
    """
    started = time.perf_counter()
    timed: dict[str, TimedLayer] = {}
    left_s = timer.budget_s
    plan: Plan | None = None
    current = prices
    for _ in range(_ROUNDS):
        considered: list[Plan] = []
        plan = search(program, world_size, current, replace(request, on_final=considered.append))
        uses = {use.key: use for each in (plan, *considered) for use in _uses(program, each)}
        left_s = _time_missing(uses, timer, timed, prices, left_s)
        is_new = any(timed.get(key) != current.timed.get(key) for key in uses)
        if not is_new or time.perf_counter() - started > _LONG_S:
            break
        current = prices.corrected(program, timed)
    else:
        plan = search(program, world_size, current, request)
    assert plan is not None
    return replace(plan, planning_s=(("search and timing of layers", time.perf_counter() - started),))


@dataclass
class FamilyTimer:
    """Times the layers of plans for other lengths than the first plan's, within one budget for all of them.

    Layers with attention by documents are timed on documents of two lengths: how much of the time depends on lengths
    decides which plan a batch runs by.

    Args:
        prices: of ops and collectives.
        timer_of: makes a program's timer; all of them share what was timed before.
        left_s: seconds to spend, about.  When they are spent, only layers that were timed before are corrected.
    """

    prices: ClusterPrices
    timer_of: Callable[[Program], LayerTimer]
    left_s: float = _FAMILY_S

    def __call__(self, program: Program, plan: Plan) -> ClusterPrices:
        """`prices`, corrected by timing the layers of `program` as `plan` runs them."""
        timed: dict[str, TimedLayer] = {}
        uses = {use.key: use for own in _uses(program, plan) for use in (own, *_of_other_documents(own))}
        self.left_s = _time_missing(uses, self.timer_of(program), timed, self.prices, self.left_s)
        return self.prices.corrected(program, timed)


@dataclass(frozen=True)
class _Use:
    """A layer of a plan; `document_length` as in `TimedLayer`."""

    key: str
    layer: Layer
    strategy: LayerStrategy
    num_microbatches: int
    placed: PlacedLayer
    ops: tuple[LocalOp, ...]
    compiled: bool
    document_length: int = 0

    def summed_s(self, prices: ClusterPrices) -> float:
        """Seconds of one microbatch by prices of ops."""
        total = 0.0
        for op, local in zip(self.layer.ops, self.ops, strict=True):
            has_gradient = any(self.placed.program.values[name].requires_grad for name in op.results)
            time = prices.op_s(op, local.operands, local.results, has_gradient)
            total += time.forward_s + time.backward_s
        return total


def _uses(program: Program, plan: Plan) -> Iterator[_Use]:
    firsts = {layer.kind: layer for layer in program.kinds}
    for kind, number in sorted({(planned.kind, planned.strategy) for planned in plan.layers}):
        layer = firsts[kind]
        strategy = replace(plan.strategies[number], recompute="none")
        placed = place(program, layer, strategy, plan.num_microbatches)
        ops = tuple(
            LocalOp(state.work_types, state.result_types, tuple(o.kernel for o in state.options if o.kernel))
            for state in placed.states
        )
        key = layer_key(layer, ops, compiled=plan.compiled)
        yield _Use(key, layer, strategy, plan.num_microbatches, placed, ops, plan.compiled)


def _of_other_documents(use: _Use) -> Iterator[_Use]:
    """The layer of `use` with documents of a second length, if it has attention by documents."""
    attention = [op for op in use.layer.ops if op.target == DOCUMENTS]
    rows = (use.placed.program.type_of(op.operands[1]).shape[2] for op in attention)
    lengths = {(document_length(op, row), row) for op, row in zip(attention, rows, strict=True)}
    for length, row in lengths if len(lengths) == 1 else ():
        second = second_document_length(length, row)
        ops = tuple(with_document_length(op, second) if op.target == DOCUMENTS else op for op in use.layer.ops)
        layer = replace(use.layer, ops=ops)
        yield replace(use, key=layer_key(layer, use.ops, compiled=use.compiled), layer=layer, document_length=second)


def _time_missing(
    uses: Mapping[str, _Use], timer: LayerTimer, timed: dict[str, TimedLayer], prices: ClusterPrices, left_s: float
) -> float:
    """Time those of `uses` that are not known, while there is time; returns the seconds that are left."""
    counts: dict[int, int] = {}
    for key, use in uses.items():
        known = timer.known.get(key)
        if known is None:
            counts[use.layer.kind] = counts.get(use.layer.kind, 0) + 1
            if _RUNS * use.summed_s(prices) > left_s or counts[use.layer.kind] > _MOST_OF_A_KIND:
                continue
            started = time.perf_counter()
            known = timer.time(use.layer, use.strategy, use.num_microbatches, compiled=use.compiled)
            left_s -= time.perf_counter() - started
            if known is None:
                continue
            timer.known[key] = known
        timed[key] = TimedLayer(use.layer.kind, use.ops, known.forward_s, known.backward_s, use.document_length)
    return left_s
