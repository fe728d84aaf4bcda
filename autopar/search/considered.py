"""What a search looked at: time against memory, the fast ones and a sample of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.plan import LayerStrategy
from autopar.search.candidates import Candidate
from autopar.search.labels import axis_labels
from autopar.search.request import Considered
from autopar.search.stages.solve import Staged
from autopar.search.trials import Setting, Trial

__all__ = ["considered_paths", "considered_pipeline"]

_MOST_ON_FRONT = 40  # paths of one trial that are named
_MOST_BEHIND = 60


def considered_paths(trial: Trial) -> Iterator[Considered]:
    """Paths of the trial: those that no other beats in time and memory, and some that are beaten."""
    time_s, peak = np.array(trial.paths.time_s), np.array(trial.paths.peak_bytes)
    order = np.lexsort((peak, time_s))
    is_front = peak[order] < np.concatenate([[np.inf], np.minimum.accumulate(peak[order])[:-1]])
    front, behind = order[is_front].tolist(), order[~is_front].tolist()
    for kept in (_spread(front, _MOST_ON_FRONT), _spread(behind, _MOST_BEHIND)):
        for index in kept:
            path = trial.paths.paths[index].tolist()
            what = _describe(trial.setting, path, "")
            yield Considered(float(time_s[index]), float(peak[index]), what)


def considered_pipeline(staged: Staged) -> Considered:
    """A pipeline that was simulated."""
    shape = staged.shape
    stages = f"{shape.num_stages} stages on {shape.num_groups} groups ({shape.schedule}), "
    return Considered(staged.step_s, staged.peak_bytes, _describe(staged.setting, staged.path, stages))


def _spread(indices: list[int], most: int) -> list[int]:
    """At most so many of them, the first and the last included."""
    if len(indices) <= most:
        return indices
    return [indices[number * (len(indices) - 1) // (most - 1)] for number in range(most)]


def _describe(setting: Setting, path: Sequence[int], stages: str) -> str:
    """How most layers run, in a few words."""
    chosen = [candidates[index] for candidates, index in zip(setting.candidates, path, strict=True)]
    most = Counter(map(id, chosen)).most_common(1)[0][0]
    usual = next(candidate for candidate in chosen if id(candidate) == most)
    count = setting.scene.num_microbatches
    passes = f", {count} microbatches" if count > 1 else ""
    return f"{stages}{_strategy(setting, usual)}{passes}"


def _strategy(setting: Setting, candidate: Candidate) -> str:
    strategy: LayerStrategy = candidate.strategy
    labels = axis_labels(setting.task.program, candidate.layer, strategy)
    axes = " x ".join(f"{size} {label}" for size, label in zip(strategy.mesh, labels, strict=True) if size > 1)
    recompute = "" if strategy.recompute == "none" else f", {strategy.recompute} recompute"
    return f"{axes or 'one device'}, ZeRO-{strategy.zero}{recompute}"
