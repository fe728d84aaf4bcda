"""From a setting (candidates of every layer on one device group) to the numbers of a pipeline's problem."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from autopar.placement import local_shape
from autopar.program import itemsize_bytes
from autopar.search.boundary import arrival_layout
from autopar.search.stages.problem import Move, StageProblem, StageTable, Tie, Traveller
from autopar.search.trials import Setting
from autopar.step.boundary_values import Crossing, Placed, crossing_matrix
from autopar.step.plan_collectives import broadcast_s
from autopar.step.stage_costs import CostColumns

__all__ = [
    "stage_problem",
]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


def stage_problem(setting: Setting, limit_bytes: float) -> StageProblem:
    """The numbers of `setting`, under a limit per device."""
    task = setting.task
    tables = {first: _table(setting, first) for first in setting.by_class}
    moves, skips = _moves(setting)
    return StageProblem(
        setting.scene.num_microbatches,
        len(setting.states),
        tuple(tables[first] for first in task.classes),
        moves,
        skips,
        tuple(_travellers(setting)),
        tuple(_ties(setting)),
        broadcast_s(task.program, task.prices, task.pipeline_axis),
        limit_bytes,
    )


def _table(setting: Setting, first: int) -> StageTable:
    candidates, numbers = setting.by_class[first], setting.tables[first]
    splits = [candidate.strategy.splits_backward for candidate in candidates]
    costs = CostColumns.of([candidate.cost for candidate in candidates], splits, setting.scene.num_microbatches)
    return StageTable(**vars(costs), state_in=numbers.state_in, state_out=numbers.state_out)


def _moves(setting: Setting) -> tuple[tuple[Move | None, ...], tuple[Move, ...]]:
    """Between neighbours, and the skips; equal matrices are the same object."""
    between: dict[tuple[int, int], list[Crossing]] = {}
    for crossing in setting.crossings:
        between.setdefault((crossing.producer, crossing.reader), []).append(crossing)
    known: dict[tuple[object, ...], tuple[Array, Array]] = {}
    classes = setting.task.classes
    found: dict[tuple[int, int], Move] = {}
    for (producer, reader), crossings in between.items():
        key = (classes[producer], classes[reader], *(each.signature for each in crossings))
        if key not in known:
            known[key] = _matrices(setting, classes[producer], classes[reader], crossings)
        if any(matrix.any() for matrix in known[key]):
            found[producer, reader] = Move(producer, reader, *known[key])
    last = len(classes) - 1
    skips = tuple(move for (producer, reader), move in found.items() if reader > producer + 1)
    return tuple(found.get((index, index + 1)) for index in range(last)), skips


def _matrices(setting: Setting, producer: int, reader: int, crossings: list[Crossing]) -> tuple[Array, Array]:
    scene = setting.scene
    sources = np.unique(setting.tables[producer].state_out)
    targets = np.unique(setting.tables[reader].state_in)
    ahead, back = (np.zeros((len(setting.states), len(setting.states))) for _ in range(2))
    where = np.ix_(sources, targets)
    for crossing in crossings:
        ends = (_ends(setting, crossing, sources), _ends(setting, crossing, targets))
        forward = crossing_matrix(scene.prices, crossing.tensor, False, 1, *ends)
        ahead[where] += forward
        if crossing.requires_grad and scene.training.is_training:
            back[where] += crossing_matrix(scene.prices, crossing.tensor, True, 1, *ends) - forward
    return ahead, back


def _ends(setting: Setting, crossing: Crossing, numbers: Indices) -> list[Placed]:
    """Where the value lies in each of these states."""
    states = list(setting.states)
    chosen = [states[int(number)] for number in numbers]
    return [(m, arrival_layout(setting.scene.program, crossing.value, p, m, crossing.tensor)) for m, p in chosen]


def _travellers(setting: Setting) -> list[Traveller]:
    readers: dict[str, list[Crossing]] = {}
    for crossing in setting.crossings:
        readers.setdefault(crossing.value, []).append(crossing)
    known: dict[tuple[object, ...], tuple[Array, Array, Array]] = {}
    found: list[Traveller] = []
    for crossings in readers.values():
        first = crossings[0]
        key = (setting.task.classes[first.producer], first.output, first.tensor, first.requires_grad)
        if key not in known:
            known[key] = _sends(setting, first)
        found.append(Traveller(first.producer, tuple(each.reader for each in crossings), *known[key]))
    return found


def _sends(setting: Setting, crossing: Crossing) -> tuple[Array, Array, Array]:
    scene, task = setting.scene, setting.task
    seconds, num_bytes = np.zeros(len(setting.states)), np.zeros(len(setting.states))
    possible = set(np.unique(setting.tables[task.classes[crossing.producer]].state_out).tolist())
    for number, (mesh, policy) in enumerate(setting.states):
        if number in possible:
            layout = arrival_layout(scene.program, crossing.value, policy, mesh, crossing.tensor)
            shape = local_shape(crossing.tensor.shape, layout, mesh)
            num_bytes[number] = math.prod(shape) * itemsize_bytes(crossing.tensor.dtype)
            seconds[number] = scene.prices.collective_s("send", task.pipeline_axis, num_bytes[number])
    has_gradient = crossing.requires_grad and scene.training.is_training
    return seconds, seconds if has_gradient else np.zeros(len(seconds)), num_bytes


def _ties(setting: Setting) -> list[Tie]:
    layers = setting.task.program.layers
    return [
        Tie(
            tuple(index for index, layer in enumerate(layers) if name in layer.held),
            cost.memory.persistent_bytes,
            cost.step_s,
            cost.exchange_s,
        )
        for name, cost in setting.shared_costs.items()
    ]
