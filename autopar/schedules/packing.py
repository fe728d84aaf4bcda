"""Solves small packing linear programs by the simplex method: the largest sum under upper limits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["pack"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MAX_PIVOTS = 3000  # programs of 300 by 300 needed at most 1500 pivots, of 30 us each
_ZERO = 1e-11  # rounding errors in float64 with rows scaled to limits of 1 are smaller, entries that matter larger


def pack(coefficients: Array, limits: Array) -> tuple[Array, Array]:
    """Return the ``x >= 0`` of the largest sum with ``coefficients @ x <= limits``, and the gain per unit of a limit.

    If it stops after `_MAX_PIVOTS`, the sum is smaller than the optimum, and the gains are those at that point.

    Args:
        coefficients: ``[limit, variable]``, nonnegative; every variable has a positive coefficient.
        limits: nonnegative.
    """
    rows, columns = coefficients.shape
    # Rows are scaled to limits of 1; the basis begins with the slack variables.  The last row has the negated gains,
    # and the last column the limits.  Columns of the basis are unit vectors, so only the others are kept: `outside`
    # says whose they are.  In a step the column of the variable that enters becomes that of the one that leaves.
    scale = np.where(limits > 0, limits, 1.0)
    table = np.zeros((rows + 1, columns + 1))
    table[:rows, :columns] = coefficients / scale[:, None]
    table[:rows, -1] = limits / scale
    table[rows, :columns] = -1.0
    outside: Indices = np.arange(columns, dtype=np.intp)
    basis: Indices = np.arange(columns, columns + rows, dtype=np.intp)
    for _ in range(_MAX_PIVOTS):
        gain = float(table[rows, :-1].min())
        if gain >= -_ZERO:
            break
        entering = min(np.flatnonzero(table[rows, :-1] == gain).tolist(), key=outside.__getitem__)
        factors = table[:, entering].copy()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(factors[:rows] > _ZERO, table[:rows, -1] / factors[:rows], np.inf)
        leaving = int(ratios.argmin())
        if not np.isfinite(ratios[leaving]):
            break
        basis[leaving], outside[entering] = outside[entering], basis[leaving]
        table[:, entering] = 0.0
        table[leaving, entering] = 1.0
        table[leaving] /= factors[leaving]
        factors[leaving] = 0.0
        table -= np.outer(factors, table[leaving])
    gains, solution = np.zeros((2, columns + rows))
    gains[outside] = np.maximum(table[rows, :-1], 0.0)
    solution[basis] = table[:rows, -1]
    return np.maximum(solution[:columns], 0.0), gains[columns:] / scale
