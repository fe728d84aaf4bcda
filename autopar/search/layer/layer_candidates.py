"""The candidates of a layer: strategies that may be part of a good plan.

On each mesh, the search inside a layer is solved exactly for a few ZeRO levels, ways to recompute and prices of memory
(`_solved_variants`).  Each strategy that this gives is priced again for every other ZeRO level, set of storage axes
(HSDP) and way to recompute; those that another candidate between the same boundaries beats in time and memory are
dropped.  Of pairs of boundary policies, those are kept that no other pair beats (`boundary_pairs`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.placement import REPLICATE, Axis, Layout
from autopar.plan import LayerStrategy
from autopar.plan.prediction import LayerCost
from autopar.program import Layer
from autopar.search.layer.boundary_pairs import boundary_costs, useful_pairs
from autopar.search.layer.layer_pricing import LayerPricing, Pieces, StoredVariant, StrategyCosts
from autopar.search.layer.layer_problem import LayerProblem, StepSettings
from autopar.search.layer.layer_solutions import LayerSolutions, SolvedVariant
from autopar.search.layer.layout_choices import Policy, storage_layout
from autopar.search.settings.constraints import OPS, LayerDemands
from autopar.search.settings.degree_roles import AxisRoles, meets_degrees, role_choices
from autopar.step.activation_policies import (
    activation_policy,
    matching_policies,
    policy_names,
    renamed_policy,
    rerun_ops,
    rerun_policy_name,
)
from autopar.step.costs.layer_cost import is_layer_rerun
from autopar.step.costs.overlap_estimate import ComputingRuns, ParameterTransfer, overlapped_s
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.value_flows import find_flows, time_view
from autopar.step.training import own_training

__all__ = ["LayerCandidate", "layer_candidates"]

Array = npt.NDArray[np.float64]

# Times as much as all layers hold of one microbatch, a device group of a pipeline holds at most: the first one as much
# under 1F1B, twice as much at most if it is interleaved, or if layers do not divide over stages.
_MOST_IN_FLIGHT = 2


@dataclass(frozen=True)
class LayerCandidate:
    """A strategy of `layer` (and all like it) with its cost, and the boundary policies around it.

    `overlapped_s` estimates how much of the cost's seconds is communication that compute overlaps; `transfers` are the
    gathers and reductions of parameters that may overlap.
    """

    layer: Layer
    policy_in: Policy
    policy_out: Policy
    strategy: LayerStrategy
    cost: LayerCost
    overlapped_s: float = 0.0
    transfers: tuple[ParameterTransfer, ParameterTransfer] = (ParameterTransfer(), ParameterTransfer())


def layer_candidates(
    work: LayerPricing, meshes: tuple[tuple[int, ...], ...], demands: LayerDemands, *, is_repeated: bool
) -> tuple[LayerCandidate, ...]:
    """The candidates of a layer on all `meshes` that meet `demands`; empty if there are none.

    `is_repeated` as in `useful_pairs`.
    """
    settings, layer = work.settings, work.layer
    whole = _sliced_late(settings, layer)
    pairs = [(mesh, roles) for mesh in meshes for roles in role_choices(mesh, demands)]
    problems = [work.problem(mesh, roles, demands, whole) for mesh, roles in pairs]
    variants: list[_Variants] = []
    all_roles = [roles for _, roles in pairs]
    for placed, strategy, policies in _strategies(work, problems, all_roles, demands, whole, is_repeated=is_repeated):
        variants.extend(_variants(work, placed, strategy, policies, demands))
    return tuple(_drop_dominated(settings, layer, variants))


def _sliced_late(settings: StepSettings, layer: Layer) -> frozenset[str]:
    """Values without gradient that are whole in time but that some reader reads in microbatches.

    The axis in time is outside those of devices, so they must be whole on devices as well where they are sliced.
    """
    if settings.num_microbatches == 1:
        return frozenset()
    flows = find_flows(settings.program, layer)
    view = time_view(layer, flows, settings.time[layer.kind], settings.num_microbatches)
    return frozenset(
        name
        for name, flow in flows.items()
        if not view.values[name].is_shard and any(view.operands[op][mention].is_shard for op, mention in flow.readers)
    )


_Strategy = tuple[PlacedLayer, LayerStrategy, tuple[Policy, Policy]]


def _strategies(
    work: LayerPricing,
    problems: Sequence[LayerProblem],
    roles: Sequence[AxisRoles],
    demands: LayerDemands,
    whole: frozenset[str],
    *,
    is_repeated: bool,
) -> Iterator[_Strategy]:
    """Distinct strategies of the solved variants, applied, with the policies before and behind them."""
    settings, layer = work.settings, work.layer
    seen: set[tuple[object, ...]] = set()
    costs = boundary_costs(problems)
    for variant in _solved_variants(settings, layer.kind, demands):
        solved = _Solved([work.solved(problem, _on_mesh(variant, problem)) for problem in problems], whole)

        def suits(number: int, i: int, j: int, solved: _Solved = solved) -> bool:
            return meets_degrees(settings.program, layer, solved.strategy(number, i, j), demands, roles[number])

        for number, i, j in useful_pairs(solved.solutions, costs, suits, is_repeated=is_repeated):
            strategy = solved.strategy(number, i, j)
            key = (number, i, j, strategy.assignments, strategy.copies)
            if key not in seen:
                seen.add(key)
                placed = solved.solutions[number].placed(i, j)
                if whole:
                    placed = replace(placed, copies={**placed.copies, **dict(strategy.copies)})
                policies = problems[number].policies
                yield placed, strategy, (policies[i], policies[j])


@dataclass(frozen=True, eq=False)
class _Solved:
    """A layer's problems solved for one variant, and the strategies that were read from the solutions."""

    solutions: list[LayerSolutions]
    whole: frozenset[str]
    known: dict[tuple[int, int, int], LayerStrategy] = field(default_factory=dict[tuple[int, int, int], LayerStrategy])

    def strategy(self, number: int, i: int, j: int) -> LayerStrategy:
        """The strategy of problem `number` between its policies i and j; values in `whole` have whole copies."""
        if (number, i, j) not in self.known:
            strategy = self.solutions[number].strategy(i, j)
            on_all = (REPLICATE,) * len(strategy.mesh)
            copies = tuple((name, on_all if name in self.whole else layout) for name, layout in strategy.copies)
            self.known[number, i, j] = replace(strategy, copies=copies)
        return self.known[number, i, j]


def _on_mesh(variant: SolvedVariant, problem: LayerProblem) -> SolvedVariant:
    return replace(variant, shard_axes=tuple(range(len(problem.mesh)))) if variant.zero else variant


def _solved_variants(settings: StepSettings, kind: int, demands: LayerDemands) -> Iterable[SolvedVariant]:
    """The fastest without ZeRO, the fastest with the cost of ZeRO, and one that saves memory at its usual price.

    Where collectives of parameters overlap, sharded storage and its optimizer are faster than sums of seconds say.
    With several microbatches in flight, gathering for each of them seldom pays.
    """
    price = settings.memory_price_s_per_byte
    plain, saving = SolvedVariant(), SolvedVariant(3, memory_weight_s_per_byte=price)
    if not settings.training.is_training:
        return plain, saving
    if settings.in_flight > 1:
        sharded = SolvedVariant(1, memory_weight_s_per_byte=price, overlaps=True)
    elif settings.prices.interference("all_gather", Axis(2, 1)) < 1:
        sharded = SolvedVariant(1, overlaps=True)
    else:
        sharded = SolvedVariant(3)
    variants = (plain, sharded, saving)
    if demands.recompute or demands.offload == "activations":
        how = _recompute_variants(settings, kind, demands)[0]
        variants = tuple(replace(each, recompute=how) for each in variants)
    if demands.zero >= 0:
        variants = tuple(replace(each, zero=demands.zero) for each in variants)
    return dict.fromkeys(variants)


@dataclass(frozen=True, eq=False)
class _Variants:
    """Candidates before it is known which are of use: one strategy, with each way to keep activations (`running`) and
    each way to store parameters.

    `overlapped_s` is that of `LayerCandidate` for each pair, [ways to keep activations, ways to store].
    """

    policies: tuple[Policy, Policy]
    strategy: LayerStrategy
    stored: Sequence[StoredVariant]
    running: Sequence[tuple[str, LayerCost]]
    overlapped_s: Array

    def finish(self, layer: Layer, number: int) -> LayerCandidate:
        """The candidate of this number, counted as in `rated`."""
        row, column = divmod(number, len(self.stored))
        (how, cost), stored = self.running[row], self.stored[column]
        strategy = replace(self.strategy, storage=stored.storage, zero=stored.zero, recompute=how)
        overlapped_s = float(self.overlapped_s[row, column])
        return LayerCandidate(layer, *self.policies, strategy, cost + stored.cost, overlapped_s, stored.transfers)

    def rated(self, in_flight: int, counted_bytes: float) -> Array:
        """By candidate, what another must not exceed to be as good; less than `counted_bytes` in the host's memory do
        not count.
        """
        running = np.array([tuple(vars(cost).values()) for _, cost in self.running])
        stored = np.array([tuple(vars(each.cost).values()) for each in self.stored])
        # Every field is an array: the properties of `LayerCost` are those of all pairs.
        cost = LayerCost(*np.moveaxis(running[:, None] + stored, -1, 0))
        seconds = cost.total_s, cost.total_s - self.overlapped_s
        if in_flight == 1:
            columns = *seconds, cost.persistent_bytes, cost.transient_bytes
        else:
            host_bytes = np.where(cost.host_bytes > counted_bytes, cost.host_bytes, 0.0)
            columns = *seconds, cost.static_bytes, cost.saved_bytes, cost.transient_bytes, host_bytes
        return np.stack(columns, axis=-1).reshape(running.shape[0] * stored.shape[0], -1)


def _variants(
    work: LayerPricing,
    placed: PlacedLayer,
    strategy: LayerStrategy,
    policies: tuple[Policy, Policy],
    demands: LayerDemands,
) -> Iterator[_Variants]:
    """The strategy with every ZeRO level, set of storage axes and way to recompute that makes a difference.

    Storage and recomputation cost apart from each other: the costs of all pairs come from those of each.
    """
    settings, costs = work.settings, work.costs(placed, strategy)
    every = list(_stored_variants(work, placed, demands))
    kind = settings.program.kinds[placed.layer.kind]
    names = {first.name: op.name for first, op in zip(kind.ops, placed.layer.ops, strict=True)}
    recompute = [renamed_policy(how, names) for how in _recompute_variants(settings, kind.kind, demands)]
    choices = _running_in_pieces(settings, costs, recompute, demands)
    if not demands.offload:
        choices = [(cut, _worth_offloading(settings, placed.layer, running)) for cut, running in choices]
    training = own_training(settings.program, placed.layer, settings.training)
    ahead, back = costs.runs
    count = settings.num_microbatches

    def overlapped(how: str, cost: LayerCost) -> tuple[float, ...]:
        """With each way to store parameters; ways to keep activations that run as long again are the same."""
        again_s, runs_again = (cost.recompute_s / count,), is_layer_rerun(how, training)
        if (again_s, runs_again) not in known:
            again = ahead if runs_again else ComputingRuns(again_s, again_s)
            runs = ahead, again.then(back)
            known[again_s, runs_again] = tuple(
                overlapped_s(runs, *stored.transfers, stored.zero, count, training) for stored in every
            )
        return known[again_s, runs_again]

    known: dict[tuple[tuple[float], bool], tuple[float, ...]] = {}
    for cut, running in choices:
        if not (running and every):  # what would be offloaded has no room, or one device has nothing to shard
            continue
        hidden_s = np.array([overlapped(how, cost) for how, cost in running.items()])
        yield _Variants(policies, replace(strategy, pieces=cut), every, tuple(running.items()), hidden_s)


def _running_in_pieces(
    settings: StepSettings, costs: StrategyCosts, recompute: Sequence[str], demands: LayerDemands
) -> list[tuple[Pieces, dict[str, LayerCost]]]:
    """Collectives that run in pieces, and what ways to recompute then cost: those that are faster so, or all that can
    if it is demanded; none with products that are recomputed one by one.

    A compiler keeps more for backward where they are left out of what it compiles, so there none are a choice as well.
    """
    by_way = costs.pieces(recompute, demands.pieces)
    if demands.pieces:
        # Products that run again by themselves can't: to recompute them is no way around the demand.
        by_way = {how: pieces for how, pieces in by_way.items() if pieces} or by_way
    hows: dict[Pieces, list[str]] = {}
    for how, pieces in by_way.items():
        hows.setdefault(pieces, []).append(how)
    if settings.training.compiled and not demands.pieces:
        hows[()] = list(recompute)
    return [(pieces, costs.running(pieces, ways)) for pieces, ways in hows.items()]


def _stored_variants(work: LayerPricing, base: PlacedLayer, demands: LayerDemands) -> Iterator[StoredVariant]:
    seen: set[tuple[int, tuple[Layout, ...]]] = set()
    for zero, shard_axes in _zero_variants(work.settings, base.mesh, demands):
        storage = _storage(base, shard_axes, demands)
        # Where storage is not sharded beyond what compute shards, a level would be a claim only.
        level = zero if demands.zero >= 0 or storage != _storage(base, (), demands) else 0
        if (level, storage) not in seen:
            seen.add((level, storage))
            yield work.stored(base, level, storage)


def _zero_variants(
    settings: StepSettings, mesh: tuple[int, ...], demands: LayerDemands
) -> Iterator[tuple[int, tuple[int, ...]]]:
    axes = tuple(axis for axis, size in enumerate(mesh) if size > 1)
    subsets = [s for count in range(len(axes), 0, -1) for s in itertools.combinations(axes, count)]
    for zero in range(4) if demands.zero < 0 else (demands.zero,):
        if zero == 0:
            yield 0, ()
        elif zero != 2 or settings.num_microbatches > 1 or demands.zero == 2:
            yield from ((zero, subset) for subset in subsets)


def _storage(base: PlacedLayer, shard_axes: tuple[int, ...], demands: LayerDemands) -> tuple[Layout, ...]:
    layouts: list[Layout] = []
    for position, name in enumerate(base.layer.state):
        flow = base.flows[name]
        if not flow.is_parameter or name not in base.copies:
            layouts.append(base.storage[position])
        else:
            axes = () if position in demands.whole else shard_axes
            layouts.append(storage_layout(base.copies[name], flow.value.type, base.mesh, axes))
    return tuple(layouts)


def _recompute_variants(settings: StepSettings, kind: int, demands: LayerDemands) -> tuple[str, ...]:
    is_left = settings.training.compiled  # a compiler chooses by itself which cheap ops to run again
    if demands.recompute == OPS:
        offloads = demands.offload == "activations"
        named = tuple(rerun_policy_name(rerun_ops(name), offloads=offloads) for name in settings.reruns(kind))
        return named or matching_policies("none", offloads=offloads)
    if demands.offload or demands.recompute:
        if demands.offload:
            return matching_policies(demands.recompute, offloads=demands.offload == "activations")
        return (demands.recompute,)
    if not settings.training.is_training:
        return ("none",)
    policies, reruns = map(activation_policy, policy_names()), settings.reruns(kind)
    offloads = settings.prices.host.overlaps
    searched = (
        each.name
        for each in policies
        if each.is_searched and (offloads or not each.offloads) and not (is_left and each.reruns is not None)
    )
    # Eager layers have "selective+offload"; a compiler would keep what the first of these computes again.
    offloaded = (rerun_policy_name(rerun_ops(name), offloads=True) for name in reruns[: offloads and is_left])
    return *searched, *reruns, *offloaded


def _worth_offloading(settings: StepSettings, layer: Layer, costs: dict[str, LayerCost]) -> dict[str, LayerCost]:
    """Of those that offload, only the fastest and the smallest, if the host has room for what all such layers offload.

    None of them leaves anything on the device.  A pipeline that runs a part of the layers has as many microbatches in
    flight.
    """
    count = sum(each.kind == layer.kind for each in settings.program.layers)
    offloading = [name for name, cost in costs.items() if cost.host_bytes]
    fitting = [name for name in offloading if count * costs[name].host_bytes <= settings.prices.host.memory_bytes]
    fastest = min(fitting, key=lambda name: costs[name].total_s, default="")
    smallest = min(fitting, key=lambda name: costs[name].transient_bytes, default="")
    return {name: cost for name, cost in costs.items() if name not in offloading or name in (fastest, smallest)}


def _drop_dominated(settings: StepSettings, layer: Layer, variants: Iterable[_Variants]) -> Iterator[LayerCandidate]:
    """On one mesh between the same policies, those that no other beats in time, with and without what is overlapped,
    and in static (with microbatches in flight, else persistent), saved and transient bytes; in a pipeline also in those
    on the host, if it may be short of room.
    """
    count = sum(each.kind == layer.kind for each in settings.program.layers)
    counted_bytes = settings.prices.host.memory_bytes / (_MOST_IN_FLIGHT * count)
    groups: dict[tuple[object, ...], list[_Variants]] = {}
    for each in variants:
        groups.setdefault((each.strategy.mesh, *each.policies), []).append(each)
    for group in groups.values():
        rated = [each.rated(settings.in_flight, counted_bytes) for each in group]
        numbers = [(each, number) for each, own in zip(group, rated, strict=True) for number in range(len(own))]
        costs = np.concatenate(rated)
        kept: list[int] = []
        for index in np.lexsort(costs.T[::-1]).tolist():
            if not kept or not (costs[kept] <= costs[index]).all(axis=1).any():
                kept.append(index)
        for index in kept:
            each, number = numbers[index]
            yield each.finish(layer, number)
