"""Lower bounds on the compute of each layer on a device group, whatever its strategy: enough to rule out
pipelines before their candidates are made, which takes a hundred times as long.

Every op has its cheapest local types on any mesh of the group; collectives, the optimizer, copies and memory cost
nothing, and neither does what runs again in backward, unless that is demanded.  So no pipeline is faster than
`relaxed_bounds` of these tables say, also where compute hides everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from autopar.ops import is_fused
from autopar.program import Layer
from autopar.search.chain.cost_tables import CostTables, LayerCosts
from autopar.search.layer.layer_problem import LayerProblem, StepSettings
from autopar.search.search_context import SearchContext
from autopar.search.settings.space_splits import only_space
from autopar.step.costs.layer_cost import weight_share
from autopar.step.training import is_differentiable, own_training

__all__ = ["least_compute"]


def least_compute(context: SearchContext, count: int, factors: Mapping[int, tuple[str, ...]]) -> CostTables:
    """One boundary state, and per layer two candidates: backwards that can't be split, and that can as far as possible.

    Args:
        context: the search on the device groups.
        count: microbatches.
        factors: layer kind -> per op, the factor that microbatches split.
    """
    program, training = context.program, context.request.training
    kinds = tuple((layer.kind, again) for layer, again in zip(program.layers, context.run_again, strict=True))
    key = (
        "least",
        context.num_devices,
        context.meshes,
        training,
        count,
        tuple(factors.items()),
        _space(context),
        kinds,
    )

    def make() -> CostTables:
        settings = StepSettings(program, context.prices, training, count, dict(factors), {})
        of_kind = {
            (kind, again): _layer_costs(context, settings, program.kinds[kind], again)
            for kind, again in dict.fromkeys(kinds)
        }
        layers = tuple(of_kind[each] for each in kinds)
        return CostTables(count, 1, layers, (None,) * (len(layers) - 1))

    return context.request.known.get((program, context.prices), key, make)


def _space(context: SearchContext) -> int:
    return context.demands[0].space


def _layer_costs(context: SearchContext, settings: StepSettings, layer: Layer, again: frozenset[int]) -> LayerCosts:
    allowed = only_space(layer, _space(context))
    problems = [LayerProblem(settings, layer, mesh, allowed) for mesh in context.meshes]
    forward_s = backward_s = weight_s = again_s = 0.0
    for index, op in enumerate(layer.ops):
        ahead_s, back_s = np.min([*_op_seconds(context, problems, index)], axis=0)
        forward_s += float(ahead_s)
        backward_s += float(back_s)
        if not context.request.training.compiled:  # whose backwards are not split
            weight_s += float(back_s) * weight_share(context.program, op)
        again_s += float(ahead_s) * (index in again)
    backward_s += again_s
    nothing, only = np.zeros(2), np.zeros(2, dtype=np.intp)
    return LayerCosts(
        forward_s=np.full(2, forward_s), backward_s=np.full(2, backward_s), weight_s=np.array([0.0, weight_s]),
        step_s=nothing, static_bytes=nothing, saved_bytes=nothing, transient_bytes=nothing, split_bytes=nothing,
        state_in=only, state_out=only, leave_s=nothing, return_s=nothing, begin_s=nothing, host_bytes=nothing,
    )  # fmt: skip


def _op_seconds(context: SearchContext, problems: list[LayerProblem], index: int) -> Iterator[tuple[float, float]]:
    """Forward and backward seconds of one microbatch, for each way to run an op."""
    settings, layer = problems[0].settings, problems[0].layer
    op, training = layer.ops[index], own_training(context.program, layer, settings.training)
    if training.compiled and is_fused(op):  # a part of kernels: at best as fast as on one device, shared out
        whole = context.whole_s[layer.kind][index]
        parts = settings.num_microbatches * context.num_devices
        yield whole.forward_s / parts, whole.backward_s / parts
        return
    differentiable = is_differentiable(context.program, op, training)
    kinds = dict.fromkeys((s.work_types, s.result_types) for each in problems for s in each.states[index])
    for operands, results in kinds:
        time = context.prices.op_s(op, operands, results, differentiable)
        yield time.forward_s, time.backward_s
    if not kinds:  # no mesh suits it
        yield 0.0, 0.0
