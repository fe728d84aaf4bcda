"""Which pairs of boundary policies are worth a candidate: those that no other pair, reshards to and from its
boundaries included, beats at the same price of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.search.layer.layer_problem import LayerProblem
from autopar.search.layer.layer_solutions import LayerSolutions
from autopar.step.layer.boundary_values import transfer_matrices

__all__ = ["BoundaryCosts", "boundary_costs", "useful_pairs"]

Array = npt.NDArray[np.float64]

# A pair is dropped if another is as fast with boundary reshards discounted by this share of the layer's best time: what
# would gain less is below the error of prices, and makes every later step slower.
_DISCOUNT = 0.002
# In a run of equal layers, a pair is dropped if it takes so much longer than the best, in all layers of the run and
# with the moves between them.  No proof, as what follows may save memory or suit neighbors: of a decoder of 8B
# parameters on 64 devices, free and under 5 constraints, nearly all layers of simulated plans had strategies that were
# at most 0.005 slower, none was more than 0.12, and all plans are the same with and without it.
_SLOWER = 0.25


@dataclass(frozen=True)
class BoundaryCosts:
    """Reshards between the boundary states (problem, policy) of a layer, numbered through.

    `before_s` and `behind_s` are the seconds to move what crosses from one state to another; `new_before` and
    `new_behind` say which states are the first of their problem with their layouts.
    """

    before_s: Array
    behind_s: Array
    new_before: list[bool]
    new_behind: list[bool]


def boundary_costs(problems: Sequence[LayerProblem]) -> BoundaryCosts:
    """Of one layer's problems on all meshes."""
    if not problems:
        return BoundaryCosts(np.zeros((0, 0)), np.zeros((0, 0)), [], [])
    first = problems[0]
    before = tuple(name for name in first.layer.inputs if name not in first.program.inputs)
    behind = tuple(name for name in first.layer.outputs if name not in first.free_outputs)
    return BoundaryCosts(
        _reshard_seconds(problems, before), _reshard_seconds(problems, behind), _are_new(problems, before),
        _are_new(problems, behind),
    )  # fmt: skip


def _reshard_seconds(problems: Sequence[LayerProblem], names: tuple[str, ...]) -> Array:
    count = sum(len(problem.policies) for problem in problems)
    total, first = np.zeros((count, count)), problems[0]
    for name in names:
        flow = first.flows[name]
        has_gradient = flow.value.requires_grad and first.settings.training.is_training
        ends = [(problem.mesh, layout) for problem in problems for layout in problem.boundary_layouts[name]]
        total += transfer_matrices(
            first.prices, first.view.value_type(flow), has_gradient, first.settings.num_microbatches,
            ends, ends,
        ).sum(axis=0)  # fmt: skip
    return total


def _are_new(problems: Sequence[LayerProblem], names: tuple[str, ...]) -> list[bool]:
    are_new: list[bool] = []
    for problem in problems:
        columns = [problem.boundary_layouts[name] for name in names]
        keys = list(zip(*columns, strict=True)) or [()] * len(problem.policies)
        are_new += [keys.index(key) == position for position, key in enumerate(keys)]
    return are_new


def useful_pairs(
    solved: Sequence[LayerSolutions],
    costs: BoundaryCosts,
    suits: Callable[[int, int, int], bool],
    *,
    is_repeated: bool,
) -> Iterator[tuple[int, int, int]]:
    """(problem, policy before, policy behind) that suit and that no other such pair, boundary moves included, beats.

    Only pairs that look useful are checked, until all of them are.  If the layer `is_repeated`, pairs that are clearly
    slower than others in a run of such layers are left out.
    """
    sizes = [len(solutions.problem.policies) for solutions in solved]
    places = [(number, i) for number, size in enumerate(sizes) for i in range(size)]
    objective = _joint_objective(solved, sizes)
    objective[~np.array(costs.new_before, dtype=bool)] = np.inf
    objective[:, ~np.array(costs.new_behind, dtype=bool)] = np.inf
    while np.isfinite(objective).any():
        useful = [tuple(pair) for pair in np.argwhere(_is_unbeaten(objective, costs)).tolist()]
        wrong = [(i, j) for i, j in useful if not suits(*places[i], places[j][1])]
        if not wrong:
            in_run_s = {(i, j): float(objective[i, j] + costs.before_s[j, i]) for i, j in useful}
            limit_s = (1 + _SLOWER) * min(in_run_s.values()) if is_repeated else np.inf
            yield from ((*places[i], places[j][1]) for (i, j), own_s in in_run_s.items() if own_s <= limit_s)
            return
        objective[tuple(np.transpose(wrong))] = np.inf


def _joint_objective(solved: Sequence[LayerSolutions], sizes: list[int]) -> Array:
    """The objective of every pair of states; only those of one problem can be a pair."""
    objective = np.full((sum(sizes), sum(sizes)), np.inf)
    start = 0
    for solutions, size in zip(solved, sizes, strict=True):
        objective[start : start + size, start : start + size] = solutions.objective_s
        start += size
    return objective


def _is_unbeaten(objective: Array, costs: BoundaryCosts) -> npt.NDArray[np.bool_]:
    discount = _DISCOUNT * float(objective.min())
    closed = _min_plus(np.maximum(costs.before_s - discount, 0.0), objective)
    closed = _min_plus(closed, np.maximum(costs.behind_s - discount, 0.0))
    # Strictly faster is what beats: so nothing is dropped in a circle.
    return np.isfinite(objective) & (objective <= closed * (1 + 1e-12))


def _min_plus(first: Array, second: Array) -> Array:
    """``out[i, j] = min over k of first[i, k] + second[k, j]``."""
    return np.stack([(row[:, None] + second).min(axis=0) for row in first])
