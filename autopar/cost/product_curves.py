"""Seconds of matrix products, convolutions and attention from a profile's curves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.cost.interpolation import between_affine
from autopar.cost.profile import Curve
from autopar.ops import Work

__all__ = ["ProductCurves"]


class ProductCurves:
    """Prices by floating-point operations.

    Products of two matrices were measured for a grid of inner extents and columns, each over a range of rows.  Between
    the four nearest of the grid, at the same number of rows, seconds are linear in inner extent and columns: what a
    call takes by itself, and work.  Beyond it they grow (or, for fewer, stay) in proportion to the operations.

    Attention was measured for some sizes of a head and lengths, each over a range of heads.  At the same number of
    heads seconds are linear in the size of a head, and in the pairs of positions.
    """

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        """Of all curves of a profile, those that belong here."""
        self._curves = curves
        self._grids: dict[tuple[str, str], dict[tuple[int, int], Curve]] = {}
        self._attentions: dict[tuple[str, str, str], dict[int, dict[int, Curve]]] = {}
        for key, curve in curves.items():
            family, _, rest = key.partition("/")
            dtype, _, rest = rest.partition("/")
            widths, _, direction = rest.partition("/")
            if family == "matmul" and direction:
                inner, columns = widths.split("x")
                self._grids.setdefault((dtype, direction), {})[int(inner), int(columns)] = curve
            elif family == "attention" and direction:
                head, length, direction = direction.split("/")
                by_head = self._attentions.setdefault((dtype, widths, direction), {})
                by_head.setdefault(int(head), {})[int(length)] = curve

    def seconds(self, work: Work, direction: str) -> float | None:
        """Seconds of `work` in this direction; None if nothing like it was measured."""
        is_backward = direction == "backward"
        amount = work.backward_flops if is_backward else work.flops
        # Both gradients of a product take twice, all three of attention two and a half times what its forward does.
        whole = (2.0 if work.kind == "matmul" else 2.5) * work.flops if is_backward else work.flops
        if not whole:
            return None
        grid = self._grids.get((work.dtype, direction))
        how = "plain" if work.is_plain else "causal" if work.is_causal else "full"
        heads = self._attentions.get((work.dtype, how, direction))
        if work.kind == "matmul" and work.extents and grid:
            result = _on_grid(grid, work.extents, 2.0 if is_backward else 1.0)
        elif work.kind == "attention" and heads:
            result = _by_head(heads, work, whole)
        else:
            curve = self._curve(work, direction)
            if curve is None:
                return None
            result = curve.seconds(whole)
        return result * amount / whole

    def _curve(self, work: Work, direction: str) -> Curve | None:
        family = work.kind
        if family == "matmul":
            family = "convolution" if work.is_convolution else "batched"
        plain = self._curves.get(f"{work.kind}/{work.dtype}/{direction}")
        return self._curves.get(f"{family}/{work.dtype}/{direction}") or plain


def _on_grid(grid: Mapping[tuple[int, int], Curve], extents: tuple[int, ...], passes: float) -> float:
    """Not all of the grid need be there: a sweep may have been interrupted."""
    rows, inner, columns = extents
    widths: dict[int, list[int]] = {}
    for known_inner, known_columns in sorted(grid):
        widths.setdefault(known_inner, []).append(known_columns)

    def seconds(known_inner: int) -> float:
        known = widths[known_inner]
        result = between_affine(
            known, columns, lambda width: grid[known_inner, width].seconds(2.0 * passes * rows * known_inner * width)
        )
        return result * max(1.0, columns / known[-1])

    return between_affine(list(widths), inner, seconds) * max(1.0, inner / max(widths))


def _by_head(heads: Mapping[int, Mapping[int, Curve]], work: Work, flops: float) -> float:
    """Between sizes of a head, at the same number of heads and pairs of positions."""
    known = sorted(heads)
    result = between_affine(
        known, work.head_dim, lambda head: _by_length(heads[head], work, flops * head / work.head_dim)
    )
    return result * max(1.0, work.head_dim / known[-1])


def _by_length(lengths: Mapping[int, Curve], work: Work, flops: float) -> float:
    """Between numbers of pairs of positions, at the same number of heads."""
    pairs = math.prod(work.extents)
    by_pairs = {length**2: curve for length, curve in sorted(lengths.items())}
    result = between_affine(list(by_pairs), pairs, lambda known: by_pairs[known].seconds(flops * known / pairs))
    return result * max(1.0, pairs / max(by_pairs))
