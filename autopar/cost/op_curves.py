"""Seconds of ops from a profile's curves, interpolated between measured sizes.

There are curves for products, convolutions, attention, ops that move bytes, and views.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from autopar.cost.profile import Curve
from autopar.ops import Work

__all__ = ["OpCurves", "ProductCurves", "around", "between", "between_affine"]


def around(known: Sequence[int], size: int) -> tuple[tuple[int, float], ...]:
    """The neighbors of `size` among the sorted sizes `known`, with their weights; outside of them the nearest one."""
    right = bisect_right(known, size)
    if right == 0:
        return ((known[0], 1.0),)
    if right == len(known):
        return ((known[-1], 1.0),)
    low, high = known[right - 1], known[right]
    share = math.log(size / low) / math.log(high / low)
    return ((low, 1.0 - share), (high, share))


def between(known: Sequence[int], size: int, seconds: Callable[[int], float]) -> float:
    """Interpolate `seconds` at `size` between the `known` sizes, linearly in the logarithms of both."""
    return math.exp(sum(share * math.log(seconds(neighbor)) for neighbor, share in around(known, size)))


def between_affine(known: Sequence[int], size: int, seconds: Callable[[int], float]) -> float:
    """Interpolate `seconds` at `size` linearly between the `known` sizes; outside of them the nearest one counts."""
    right = bisect_right(known, size)
    if right in (0, len(known)):
        return seconds(known[min(right, len(known) - 1)])
    low, high = known[right - 1], known[right]
    share = (size - low) / (high - low)
    return (1.0 - share) * seconds(low) + share * seconds(high)


class OpCurves:
    """Prices as functions of bytes.

    An op that works row by row (a softmax) was measured for several widths of a row; between them the logarithm of the
    seconds is linear in that of the width, at the same number of bytes; narrower rows cost as much as the narrowest
    measured ones.  An op with a number as an operand, which has to be converted to a tensor first, has a curve of its
    own.  Ops that weren't measured are priced as ``mul``.
    """

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        """Index the curves of ops among all curves of a profile."""
        self._curves = curves
        self._by_width: dict[tuple[str, str], dict[int, Curve]] = {}
        for key, curve in curves.items():
            family, _, rest = key.partition("/")
            name, _, rest = rest.partition("/")
            width, _, direction = rest.partition("/")
            if family == "op" and width.isdecimal():
                self._by_width.setdefault((name, direction), {})[int(width)] = curve

    def find(self, name: str, work: Work, direction: str) -> tuple[float, float] | None:
        """Seconds of an op that has a curve of its own, and its overhead without bytes; None if it has none."""
        amount = work.backward_num_bytes if direction == "backward" else work.num_bytes
        widths = self._by_width.get((name, direction))
        if widths:
            smallest = min(curve.overhead_s for curve in widths.values())
            amount *= max(1.0, min(widths) / work.width)  # narrower rows cost as much as the narrowest ones
            return between(sorted(widths), work.width, lambda width: widths[width].seconds(amount)), smallest
        with_number = f"op/{name}/number/{direction}" if work.is_with_number else ""
        curve = self._curves.get(with_number) or self._curves.get(f"op/{name}/{direction}")
        return (curve.seconds(amount), curve.overhead_s) if curve else None

    def seconds(self, name: str, work: Work, direction: str) -> float | None:
        """Seconds of an op that moves bytes; None if neither it nor ``mul`` was measured."""
        seconds_and_overhead = self.find(name, work, direction)
        if seconds_and_overhead is None:
            with_number = f"op/aten.mul/number/{direction}" if work.is_with_number else ""
            curve = self._curves.get(with_number) or self._curves.get(f"elementwise/{direction}")
            if curve is None:
                return None
            amount = work.backward_num_bytes if direction == "backward" else work.num_bytes
            seconds_and_overhead = curve.seconds(amount), curve.overhead_s
        seconds, overhead_s = seconds_and_overhead
        if direction == "backward" and work.is_passed_on:
            return overhead_s + self.summing_s(work.backward_num_bytes, work.width)
        return seconds

    def view_s(self, name: str, work: Work, direction: str) -> float | None:
        """Seconds of a view; its gradient is a view too, unless elements were dropped or repeated."""
        curve = self._curves.get(f"view/{direction}")
        if curve is None:
            return None
        seconds_and_overhead = self.find(name, work, direction)
        if direction == "forward" or not work.backward_num_bytes:
            return seconds_and_overhead[1] if seconds_and_overhead else curve.overhead_s
        if seconds_and_overhead:
            return seconds_and_overhead[0]
        return max(curve.overhead_s, self.summing_s(work.backward_num_bytes, work.width))

    def summing_s(self, num_bytes: float, width: int) -> float:
        """Seconds to sum `num_bytes` in rows of this width; 0.0 for none."""
        if not num_bytes:
            return 0.0
        widths = self._by_width.get(("aten.sum", "forward"))
        if widths:
            return between(sorted(widths), width, lambda width: widths[width].seconds(num_bytes))
        curve = self._curves.get("elementwise/forward")
        return curve.seconds(num_bytes) if curve else 0.0


class ProductCurves:
    """Prices as functions of floating-point operations.

    Products of two matrices were measured for a grid of inner extents and columns, each over a range of rows.  Between
    the four nearest points of the grid, at the same number of rows, seconds are linear in inner extent and columns: a
    constant per call, and work.  Above the grid they grow in proportion to the operations, below it they stay constant.

    Attention was measured for some head sizes and lengths, each over a range of heads.  At the same number of
    heads seconds are linear in the head size, and in the pairs of positions.
    """

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        """Index the curves of products and attention among all curves of a profile."""
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
        """Seconds of `work` in this direction; None if no similar work was measured."""
        is_backward = direction == "backward"
        amount = work.backward_flops if is_backward else work.flops
        # Both gradients of a product have twice, all three of attention two and a half times the FLOPs of the forward.
        whole = (2.0 if work.kind == "matmul" else 2.5) * work.flops if is_backward else work.flops
        if not whole:
            return None
        grid = self._grids.get((work.dtype, direction))
        how = "plain" if work.is_plain else "causal" if work.is_causal else "full"
        heads = self._attentions.get((work.dtype, how, direction))
        if work.kind == "matmul" and work.extents and grid:
            whole_s = _on_grid(grid, work.extents, 2.0 if is_backward else 1.0)
        elif work.kind == "attention" and heads:
            whole_s = _by_head(heads, work, whole)
        else:
            curve = self._curve(work, direction)
            if curve is None:
                return None
            whole_s = curve.seconds(whole)
        return whole_s * amount / whole

    def _curve(self, work: Work, direction: str) -> Curve | None:
        family = work.kind
        if family == "matmul":
            family = "convolution" if work.is_convolution else "batched"
        fallback = self._curves.get(f"{work.kind}/{work.dtype}/{direction}")
        return self._curves.get(f"{family}/{work.dtype}/{direction}") or fallback


def _on_grid(grid: Mapping[tuple[int, int], Curve], extents: tuple[int, ...], passes: float) -> float:
    """Seconds of a product from a grid of curves, which may have gaps: a sweep may have been interrupted."""
    rows, inner, columns = extents
    widths: dict[int, list[int]] = {}
    for known_inner, known_columns in sorted(grid):
        widths.setdefault(known_inner, []).append(known_columns)

    def seconds(known_inner: int) -> float:
        grid_columns = widths[known_inner]
        interpolated_s = between_affine(
            grid_columns,
            columns,
            lambda width: grid[known_inner, width].seconds(2.0 * passes * rows * known_inner * width),
        )
        return interpolated_s * max(1.0, columns / grid_columns[-1])

    return between_affine(list(widths), inner, seconds) * max(1.0, inner / max(widths))


def _by_head(heads: Mapping[int, Mapping[int, Curve]], work: Work, flops: float) -> float:
    """Interpolate between head sizes, at the same number of heads and pairs of positions."""
    known_sizes = sorted(heads)
    interpolated_s = between_affine(
        known_sizes, work.head_dim, lambda head: _by_length(heads[head], work, flops * head / work.head_dim)
    )
    return interpolated_s * max(1.0, work.head_dim / known_sizes[-1])


def _by_length(lengths: Mapping[int, Curve], work: Work, flops: float) -> float:
    """Interpolate between numbers of pairs of positions, at the same number of heads."""
    pairs = math.prod(work.extents)
    by_pairs = {length**2: curve for length, curve in sorted(lengths.items())}
    interpolated_s = between_affine(list(by_pairs), pairs, lambda known: by_pairs[known].seconds(flops * known / pairs))
    return interpolated_s * max(1.0, pairs / max(by_pairs))
