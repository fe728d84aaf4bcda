"""Solves small packing linear programs by the simplex method: the largest sum under upper limits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Packing", "pack"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MAX_PIVOTS = 3000  # programs of 600 by 800 needed at most 1800 pivots, of 0.08 ms each
_ZERO = 1e-8  # smaller pivots were rounding errors: down to 1e-11, gains were wrong by up to 140 %, so by 0.01 %
# Pivots whose changes of the table are made at once, as a product of matrices: one by one, each reads and writes the
# whole table, which takes twelve times as long.
_BLOCK = 32
_SLICE = 8  # rows of such a product: BLAS starts threads for larger ones, which takes longer on busy cores


def pack(coefficients: Array, limits: Array) -> tuple[Array, Array]:
    """Solve one program (`Packing.solve`)."""
    return Packing(coefficients, limits).solve()


class Packing:
    """The ``x >= 0`` of the largest sum with ``coefficients @ x <= limits``.

    A program with one more limit, or with other limits, is solved from the solution before (by the dual simplex
    method), which takes a few pivots in place of all.

    Args:
        coefficients: ``[limit, variable]``, nonnegative; every variable has a positive coefficient.
        limits: ``[limit]``, nonnegative.
    """

    def __init__(self, coefficients: Array, limits: Array) -> None:
        rows, columns = coefficients.shape
        # Rows are scaled to limits of 1; the basis begins with the slack variables.  Columns of the basis are unit
        # vectors, so only the others are kept: `_outside` says whose they are.
        self._scale = np.where(limits > 0, limits, 1.0)
        self._table = coefficients / self._scale[:, None]
        self._left, self._negated_gains = limits / self._scale, np.full(columns, -1.0)
        self._outside: Indices = np.arange(columns, dtype=np.intp)
        self._basis: Indices = np.arange(columns, columns + rows, dtype=np.intp)
        # In a step the column of the variable that enters the basis becomes that of the one that leaves, and the table
        # is less by ``outer(factors, changes)``: the first `_due` of these are still to be made.
        self._factors, self._changes, self._due = np.zeros((_BLOCK, rows)), np.zeros((_BLOCK, columns)), 0

    def add_limit(self, coefficients: Array, limit: float) -> None:
        """Let ``coefficients @ x <= limit`` as well, with ``limit > 0``."""
        columns = len(self._outside)
        self._make_changes()
        own = np.zeros(columns + len(self._basis))
        own[:columns] = coefficients / limit
        self._table = np.vstack([self._table, own[self._outside] - own[self._basis] @ self._table])
        self._left = np.append(self._left, 1.0 - own[self._basis] @ self._left)
        self._basis = np.append(self._basis, len(own))
        self._scale = np.append(self._scale, limit)
        self._factors = np.zeros((_BLOCK, len(self._basis)))

    def change_limits(self, limits: Array) -> None:
        """Let these be the limits."""
        columns = len(self._outside)
        self._make_changes()
        own = np.concatenate([np.zeros(columns), limits / self._scale])
        self._left = own[self._basis] + self._table @ own[self._outside]

    def solve(self) -> tuple[Array, Array]:
        """The solution ``x``, and the gain of its sum per unit of a limit.

        If it stops after `_MAX_PIVOTS`, the sum is not the optimum, and the gains are those at that point.
        """
        for _ in range(_MAX_PIVOTS):
            if not (self._mend() or self._improve()):
                break
        rows, columns = len(self._basis), len(self._outside)
        gains, solution = np.zeros((2, columns + rows))
        gains[self._outside] = np.maximum(self._negated_gains, 0.0)
        solution[self._basis] = self._left
        return np.maximum(solution[:columns], 0.0), gains[columns:] / self._scale

    def _improve(self) -> bool:
        """Let the variable that gains most enter the basis; False if none gains."""
        gain = float(self._negated_gains.min())
        if gain >= -_ZERO:
            return False
        entering = min(np.flatnonzero(self._negated_gains == gain).tolist(), key=self._outside.__getitem__)
        column = self._column(entering)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(column > _ZERO, self._left / column, np.inf)
        leaving = int(ratios.argmin())
        if not np.isfinite(ratios[leaving]):
            return False
        self._pivot(leaving, entering, column, self._row(leaving))
        return True

    def _mend(self) -> bool:
        """Let the variable that is most below 0 leave the basis, where sums have no gain to lose; False if there is
        none.
        """
        leaving = int(self._left.argmin())
        if self._left[leaving] >= -_ZERO:
            return False
        row = self._row(leaving)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(row < -_ZERO, np.maximum(self._negated_gains, 0.0) / -row, np.inf)
        entering = int(ratios.argmin())
        if not np.isfinite(ratios[entering]):
            return False
        self._pivot(leaving, entering, self._column(entering), row)
        return True

    def _column(self, entering: int) -> Array:
        due = slice(0, self._due)
        return self._table[:, entering] - self._changes[due, entering] @ self._factors[due]

    def _row(self, leaving: int) -> Array:
        due = slice(0, self._due)
        return self._table[leaving] - self._factors[due, leaving] @ self._changes[due]

    def _pivot(self, leaving: int, entering: int, column: Array, row: Array) -> None:
        pivot, due = column[leaving], self._due
        row = row / pivot
        row[entering] = 1 / pivot
        self._basis[leaving], self._outside[entering] = self._outside[entering], self._basis[leaving]
        self._factors[due], self._changes[due] = column, row
        # Row and column of the pivot are made at once, as products would round what is left of them.
        self._table[leaving], self._factors[: due + 1, leaving] = row, 0.0
        self._table[:, entering] = -column / pivot
        self._table[leaving, entering] = 1 / pivot
        self._changes[: due + 1, entering] = 0.0
        amount, gain = self._left[leaving] / pivot, self._negated_gains[entering]
        self._left -= amount * column
        self._left[leaving] = amount
        self._negated_gains -= gain * row
        self._negated_gains[entering] = -gain / pivot
        self._due += 1
        if self._due == _BLOCK:
            self._make_changes()

    def _make_changes(self) -> None:
        due = slice(0, self._due)
        for first in range(0, len(self._table) if self._due else 0, _SLICE):
            own = slice(first, first + _SLICE)
            self._table[own] -= self._factors[due, own].T @ self._changes[due]
        self._due = 0
