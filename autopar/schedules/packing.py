"""Solves small packing linear programs by the simplex method: the largest sum under upper limits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["pack"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MAX_PIVOTS = 3000  # programs of 600 by 800 needed at most 1800 pivots, of 0.08 ms each
_ZERO = 1e-8  # smaller pivots were rounding errors: down to 1e-11, gains were wrong by up to 140 %, so by 0.01 %
# Pivots whose changes of the table are made at once, as a product of matrices: one by one, each reads and writes the
# whole table, which takes twelve times as long.
_BLOCK = 32
_SLICE = 8  # rows of such a product: BLAS starts threads for larger ones, which takes longer on busy cores


def pack(coefficients: Array, limits: Array) -> tuple[Array, Array]:
    """Return the ``x >= 0`` of the largest sum with ``coefficients @ x <= limits``, and the gain per unit of a limit.

    If it stops after `_MAX_PIVOTS`, the sum is smaller than the optimum, and the gains are those at that point.

    Args:
        coefficients: ``[limit, variable]``, nonnegative; every variable has a positive coefficient.
        limits: nonnegative.
    """
    rows, columns = coefficients.shape
    # Rows are scaled to limits of 1; the basis begins with the slack variables.  Columns of the basis are unit vectors,
    # so only the others are kept: `outside` says whose they are.  In a step the column of the variable that enters
    # becomes that of the one that leaves, and the table is less by ``outer(factors, changes)``.
    scale = np.where(limits > 0, limits, 1.0)
    table = coefficients / scale[:, None]
    left, negated_gains = limits / scale, np.full(columns, -1.0)
    factors, changes = np.zeros((_BLOCK, rows)), np.zeros((_BLOCK, columns))
    outside: Indices = np.arange(columns, dtype=np.intp)
    basis: Indices = np.arange(columns, columns + rows, dtype=np.intp)
    for number in range(_MAX_PIVOTS):
        due = number % _BLOCK  # changes that are still to be made
        for first in range(0, rows if due == 0 and number else 0, _SLICE):
            table[first : first + _SLICE] -= factors[:, first : first + _SLICE].T @ changes
        gain = float(negated_gains.min())
        if gain >= -_ZERO:
            break
        entering = min(np.flatnonzero(negated_gains == gain).tolist(), key=outside.__getitem__)
        column = table[:, entering] - changes[:due, entering] @ factors[:due]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(column > _ZERO, left / column, np.inf)
        leaving = int(ratios.argmin())
        if not np.isfinite(ratios[leaving]):
            break
        basis[leaving], outside[entering] = outside[entering], basis[leaving]
        pivot = column[leaving]
        row = (table[leaving] - factors[:due, leaving] @ changes[:due]) / pivot
        row[entering] = 1 / pivot
        factors[due], changes[due] = column, row
        # Row and column of the pivot are made at once, as products would round what is left of them.
        table[leaving], factors[: due + 1, leaving] = row, 0.0
        table[:, entering] = -column / pivot
        table[leaving, entering] = 1 / pivot
        changes[: due + 1, entering] = 0.0
        left -= ratios[leaving] * column
        left[leaving] = ratios[leaving]
        negated_gains -= gain * row
        negated_gains[entering] = -gain / pivot
    gains, solution = np.zeros((2, columns + rows))
    gains[outside] = np.maximum(negated_gains, 0.0)
    solution[basis] = left
    return np.maximum(solution[:columns], 0.0), gains[columns:] / scale
