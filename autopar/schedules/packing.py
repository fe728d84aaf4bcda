"""Small linear programs of one form, by the simplex method: as much as possible under limits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["pack"]

Array = npt.NDArray[np.float64]

_PIVOTS = 3000  # of programs of 300 by 300 none needed more than 1500; one takes 30 us
_ZERO = 1e-11


def pack(takes: Array, limits: Array) -> tuple[Array, Array]:
    """The ``x >= 0`` of the largest sum with ``takes @ x <= limits``, and what that would gain per unit of each limit.

    Stopped early, the sum is too small and the gains are those of the way so far.

    Args:
        takes: ``[limit, thing]``, none negative; every thing takes something.
        limits: none negative.
    """
    rows, columns = takes.shape
    # Scaled rows; the basis begins with what is left of each limit.  The last row has the gains, negated.
    scale = np.where(limits > 0, limits, 1.0)
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns] = takes / scale[:, None]
    table[:rows, columns : columns + rows] = np.eye(rows)
    table[:rows, -1] = limits / scale
    table[rows, :columns] = -1.0
    basis: npt.NDArray[np.intp] = np.arange(columns, columns + rows, dtype=np.intp)
    for _ in range(_PIVOTS):
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
    found = np.zeros(columns + rows)
    found[basis] = table[:rows, -1]
    return np.maximum(found[:columns], 0.0), gains
