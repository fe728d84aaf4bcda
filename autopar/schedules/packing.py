"""Solves small packing linear programs by the simplex method: the largest sum under upper limits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["pack"]

Array = npt.NDArray[np.float64]

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
    # Rows are scaled to limits of 1; the basis begins with the slack variables.  The last row has the negated gains.
    scale = np.where(limits > 0, limits, 1.0)
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns] = coefficients / scale[:, None]
    table[:rows, columns : columns + rows] = np.eye(rows)
    table[:rows, -1] = limits / scale
    table[rows, :columns] = -1.0
    basis: npt.NDArray[np.intp] = np.arange(columns, columns + rows, dtype=np.intp)
    for _ in range(_MAX_PIVOTS):
        entering = int(table[rows, :-1].argmin())
        if table[rows, entering] >= -_ZERO:
            break
        column = table[:rows, entering]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(column > _ZERO, table[:rows, -1] / column, np.inf)
        leaving = int(ratios.argmin())
        if not np.isfinite(ratios[leaving]):
            break
        basis[leaving] = entering
        table[leaving] /= table[leaving, entering]
        factors = table[:, entering].copy()
        factors[leaving] = 0.0
        table -= np.outer(factors, table[leaving])
    gains = np.maximum(table[rows, columns : columns + rows], 0.0) / scale
    solution = np.zeros(columns + rows)
    solution[basis] = table[:rows, -1]
    return np.maximum(solution[:columns], 0.0), gains
