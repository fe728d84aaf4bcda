"""What a search looked at: time against memory, the fast ones and a sample of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.plan import LayerStrategy, Plan
from autopar.search.chain import unbeaten
from autopar.search.labels import axis_labels
from autopar.search.request import Considered
from autopar.search.stages.solve import Staged
from autopar.search.trials import Setting, Trial

__all__ = ["considered_paths", "considered_pipeline", "considered_plan"]

_MOST_ON_FRONT = 40  # paths of one trial that are named
_MOST_BEHIND = 60


def considered_paths(trial: Trial) -> Iterator[Considered]:
    """Paths of the trial: those that no other beats in time and memory, and some that are beaten."""
    time_s, peak = trial.paths.time_s, trial.paths.peak_bytes
    front = unbeaten(time_s, peak)
    on_front = set(front)
    behind = [index for index in np.lexsort((peak, time_s)).tolist() if index not in on_front]
    for kept in (_spread(front, _MOST_ON_FRONT), _spread(behind, _MOST_BEHIND)):
        for index in kept:
            path = trial.paths.paths[index].tolist()
            yield Considered(time_s[index], peak[index], _describe(trial.setting, path, ""))


def considered_pipeline(staged: Staged) -> Considered:
    """A pipeline whose schedule was simulated, with communication and compute one after the other."""
    shape = staged.shape
    stages = _stages(shape.num_stages, shape.num_groups, shape.schedule)
    return Considered(staged.step_s, staged.peak_bytes, _describe(staged.setting, staged.path, stages))


def considered_plan(plan: Plan) -> Considered:
    """A plan whose step was simulated."""
    stages = _stages(len(plan.stages), plan.num_groups, plan.schedule) if plan.stages else ""
    words = [
        _strategy(plan.strategies[number], plan.strategies[number].labels) for number in range(len(plan.strategies))
    ]
    usual = Counter(words[layer.strategy] for layer in plan.layers).most_common(1)[0][0]
    what = f"{stages}{usual}{_passes(plan.num_microbatches)}"
    return Considered(plan.step_time_s, plan.peak_memory_bytes, what, is_simulated=True)


def _spread(indices: list[int], most: int) -> list[int]:
    """At most so many of them, the first and the last included."""
    if len(indices) <= most:
        return indices
    return [indices[number * (len(indices) - 1) // (most - 1)] for number in range(most)]


def _describe(setting: Setting, path: Sequence[int], stages: str) -> str:
    """How most layers run, in a few words."""
    chosen = [candidates[index] for candidates, index in zip(setting.candidates, path, strict=True)]
    distinct = {id(candidate): candidate for candidate in chosen}
    program = setting.task.program
    words = {key: _strategy(c.strategy, axis_labels(program, c.layer, c.strategy)) for key, c in distinct.items()}
    usual = Counter(words[id(candidate)] for candidate in chosen).most_common(1)[0][0]
    return f"{stages}{usual}{_passes(setting.scene.num_microbatches)}"


def _strategy(strategy: LayerStrategy, labels: Sequence[str]) -> str:
    axes = " x ".join(f"{size} {label}" for size, label in zip(strategy.mesh, labels, strict=True) if size > 1)
    recompute = "" if strategy.recompute == "none" else f", {strategy.recompute} recompute"
    return f"{axes or 'one device'}, ZeRO-{strategy.zero}{recompute}"


def _stages(num_stages: int, num_groups: int, schedule: str) -> str:
    return f"{num_stages} stages on {num_groups} groups ({schedule}), "


def _passes(num_microbatches: int) -> str:
    return f", {num_microbatches} microbatches" if num_microbatches > 1 else ""
