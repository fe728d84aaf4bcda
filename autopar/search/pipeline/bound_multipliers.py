"""Which shares of chains and prices of memory make the bound of a relaxed pipeline largest.

A bound is the least value over all paths (cuts and candidates)::

    sum over chains   a * seconds of the chain   +   sum over moments   m * (bytes held / limit - 1)

Each bound says which path attained it.  A mix of these paths that takes no more than so many seconds on any chain, and
no more than the limit at any moment, exists if and only if the largest mix of amounts (whose sum need not be 1) within
these limits has a sum of at least 1: a packing program.  What its limits are worth are the ``a`` and ``m`` that would
be best if there were no other paths, and they say which bound is the largest possible one.  As there are other paths,
the next ``a`` and ``m`` lie between these and the best so far (Wentges, "Weighted Dantzig-Wolfe decomposition for
linear mixed-integer programming", International Transactions in Operational Research 4, 1997).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.schedules.packing import pack

__all__ = ["MultiplierSearch", "Multipliers"]

Array = npt.NDArray[np.float64]
Multipliers = tuple[Array, Array]

# How much of the best multipliers is kept.  For a 405B model on 16,384 devices (interleaved 1F1B, 128 stages), 60 steps
# with 0.5 gave 6.276 s, with 0.7 6.288 s and with 0.85 6.297 s, where no more than 6.31 s was possible.
_KEPT = 0.85
_NEARLY = 1e-3  # bounds that are so near to the largest possible one are not raised


@dataclass(eq=False)
class MultiplierSearch:
    """The best multipliers so far, and the paths that attained bounds.

    Args:
        value: the bound for these multipliers, the seconds of each chain on the path that attains it, and how much more
            than the limit that holds at each moment, relative (empty without a limit).
        fixed_s: seconds that any chain takes besides.
        possible_s: the largest bound that is sought; in the end, the largest that the known paths leave possible.
    """

    value: Callable[[Multipliers], tuple[float, Array, Array]]
    fixed_s: float
    possible_s: float
    best: Multipliers = field(default_factory=lambda: (np.zeros(0), np.zeros(0)))
    best_s: float = 0.0
    _paths: list[Array] = field(default_factory=list[Array])

    @property
    def is_open(self) -> bool:
        """Whether a larger bound is possible and sought."""
        return 0 < self.best_s < self.possible_s

    def improves(self, multipliers: Multipliers) -> bool:
        """Try multipliers; whether their bound is the largest so far."""
        bound_s, chains_s, excess = self.value(multipliers)
        if math.isfinite(bound_s):
            self._paths.append(np.maximum(0.0, np.concatenate([chains_s, excess + 1])))
        is_better = bound_s > self.best_s
        if is_better or not len(self.best[0]):
            self.best, self.best_s = multipliers, bound_s
        return is_better

    def next(self) -> Multipliers:
        """Multipliers between the best and those that would be best if there were no other paths than known ones."""
        count, with_memory = len(self.best[0]), len(self._paths[0])
        target_s = self.possible_s - self.fixed_s
        limits = np.concatenate([np.full(count, target_s), np.ones(with_memory - count)])
        gains = pack(np.stack(self._paths, axis=1), limits)[1]
        # A mix of known paths has a sum of so much: divided by it, a mix of 1 takes as much less on each chain.
        mix = float(gains @ limits)
        possible_s = self.fixed_s + target_s / mix
        self.possible_s = min(self.possible_s, max(self.best_s, possible_s * (1 - _NEARLY)))
        # Both are scaled, as what few paths leave may be worth nothing for any chain.
        known = np.concatenate(self.best)[:with_memory] / (target_s + float(self.best[1].sum()))
        mixed = _KEPT * known + (1 - _KEPT) * gains / mix
        memory_s = np.zeros(len(self.best[1]))
        memory_s[: with_memory - count] = mixed[count:]
        total = mixed[:count].sum()
        return mixed[:count] / total, memory_s / total
