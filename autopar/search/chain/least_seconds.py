"""The least seconds that layers take on a device group, known before its candidates are made.

Two things hold whatever the strategy: no device computes more than its share at the full rate, and to cut a batch into
more microbatches makes nothing faster.  So what candidates of an earlier search took at least holds for as many
microbatches or more, on the same meshes or some of them, and for eager layers if they were compiled: the seconds of
fused kernels are never more than those of their ops.

It mostly holds on fewer devices, too, which is a heuristic.  A strategy of a group with 1/k of the devices has a twin
on all of them: the outermost axis is k times as large, the batch is split on it, and there are 1/k as many
microbatches.  The twin does in each microbatch what the strategy does, and so 1/k as much in all.  But it may not be
among the candidates, as it gathers and reduces more of parameters: for a decoder of 405B parameters on 16,384 devices,
where these take longer than compute, groups need 0.75 times what all devices say.  So all devices only speak for groups
if their best plan takes little more than its layers at least (`_NEAR`), and if neither the data degree nor collectives
of parameters in each microbatch are demanded.  Of decoders of 8B and 70B parameters on 64 devices, free and with tensor
degrees of 4 and 8, groups took 0.998 to 1.13 times as long as all devices said, whatever `_NEAR`; hence `_SAME`.  What
is known of layers without demands is taken to hold for those that demand something.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.search.chain.candidate_sets import CandidateSet
from autopar.search.search_context import SearchContext
from autopar.search.settings.constraints import LayerDemands

__all__ = ["least_layers", "least_of", "remember_least"]

Array = npt.NDArray[np.float64]

_SAME = 0.99  # of what its twin on all devices took at least, a layer takes
# So many times the least seconds of its layers the best plan takes, if collectives of parameters barely show: 1.1 for
# the 8B above, about 2 for the 405B.
_NEAR = 1.15


@dataclass(frozen=True, eq=False)
class _LeastSeconds:
    """What candidates of a layer take at least on so many devices, all microbatches together: forward, and forward and
    backward seconds.
    """

    num_devices: int
    num_microbatches: int
    meshes: frozenset[tuple[int, ...]]
    compiled: bool
    seconds: tuple[float, float]
    speaks_for_groups: bool


def least_layers(context: SearchContext, count: int) -> Array:
    """Forward, and forward and backward seconds that each layer takes at least in `count` microbatches, [2, layers]."""
    forward_s, backward_s = context.ideal_layers_s
    ideal_s = np.stack([forward_s, forward_s + context.ideal_again_s + backward_s])
    known_s = {first: _known_s(context, first, count) for first in dict.fromkeys(context.classes)}
    return np.maximum(ideal_s, np.array([known_s[first] for first in context.classes]).T)


def least_of(candidates: CandidateSet) -> Array:
    """As `least_layers`, of the candidates of one set."""
    count, layers = candidates.settings.num_microbatches, candidates.least_tables.layers
    ahead_s = {id(each): count * float(each.forward_s.min()) for each in layers}
    both_s = {id(each): count * float((each.forward_s + each.backward_s).min()) for each in layers}
    return np.array([[ahead_s[id(each)] for each in layers], [both_s[id(each)] for each in layers]])


def remember_least(context: SearchContext, count: int, least: Array, best_s: float = math.inf) -> None:
    """Let later searches know the `least_of` candidates with `count` microbatches.

    `best_s` are the seconds of the best plan, if it has no stages.
    """
    speaks_for_groups = best_s <= _NEAR * float(least[1].sum())
    for first in dict.fromkeys(context.classes):
        ahead_s, both_s = least[:, first].tolist()
        own = _LeastSeconds(
            context.num_devices, count, frozenset(context.meshes_of(context.program.layers[first])),
            context.request.training.compiled, (ahead_s, both_s), speaks_for_groups,
        )  # fmt: skip
        _known(context, first, context.demands[first]).append(own)


def _known_s(context: SearchContext, first: int, count: int) -> tuple[float, float]:
    """Of a class of layers, by all that is known."""
    own = context.demands[first]
    known = [(each, 1.0, own) for each in _known(context, first, own)]
    none = LayerDemands(space=own.space)
    if own != none:
        known += [(each, _SAME, none) for each in _known(context, first, none)]
    meshes, ahead_s, both_s = context.meshes_of(context.program.layers[first]), 0.0, 0.0
    for each, scale, demands in known:
        times = each.num_devices // context.num_devices
        twins = {(times * mesh[0], *mesh[1:]) for mesh in meshes}
        is_slower = context.request.training.compiled <= each.compiled and times * each.num_microbatches <= count
        if is_slower and twins <= each.meshes and (times == 1 or (each.speaks_for_groups and _has_twins(demands))):
            if times == 1:  # forwards of small layers took groups 0.98 times what all devices took
                ahead_s = max(ahead_s, scale * each.seconds[0])
            both_s = max(both_s, scale * each.seconds[1] * (1.0 if times == 1 else _SAME * times))
    return ahead_s, both_s


def _has_twins(demands: LayerDemands) -> bool:
    """Whether strategies that meet the demands have twins on more devices that do, and take no longer."""
    return demands.zero < 2 and "data" not in dict(demands.degrees)


def _known(context: SearchContext, first: int, demands: LayerDemands) -> list[_LeastSeconds]:
    """Those of candidates of a class of layers, which meet these demands."""
    training = context.request.training.running(compiled=False)
    key = "least seconds", demands, context.boundary_facts(first), training
    return context.request.known.get((context.program.layers[first], context.prices), key, list[_LeastSeconds])
