"""Seconds of ops that move bytes, and of views, from a profile's curves."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost.interpolation import between
from autopar.cost.profile import Curve
from autopar.ops import Work

__all__ = ["OpCurves"]


class OpCurves:
    """Prices by bytes.

    An op that works row by row (a softmax) was measured for several widths of a row; between them the logarithm of the
    seconds is linear in that of the width, at the same number of bytes; narrower rows take as long as the narrowest
    that were measured.  An op with a number for an operand, which has to be made a tensor first, has a curve of its
    own.  What wasn't measured is priced as ``mul``.
    """

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        """Of all curves of a profile, those that belong here."""
        self._curves = curves
        self._by_width: dict[tuple[str, str], dict[int, Curve]] = {}
        for key, curve in curves.items():
            family, _, rest = key.partition("/")
            name, _, rest = rest.partition("/")
            width, _, direction = rest.partition("/")
            if family == "op" and width.isdecimal():
                self._by_width.setdefault((name, direction), {})[int(width)] = curve

    def find(self, name: str, work: Work, direction: str) -> tuple[float, float] | None:
        """Seconds of an op that has a curve of its own, and of one that moves nothing; None if it has none."""
        amount = work.backward_num_bytes if direction == "backward" else work.num_bytes
        widths = self._by_width.get((name, direction))
        if widths:
            smallest = min(curve.overhead_s for curve in widths.values())
            amount *= max(1.0, min(widths) / work.width)  # rows take time, however narrow they are
            return between(sorted(widths), work.width, lambda width: widths[width].seconds(amount)), smallest
        own = f"op/{name}/number/{direction}" if work.is_with_number else ""
        curve = self._curves.get(own) or self._curves.get(f"op/{name}/{direction}")
        return (curve.seconds(amount), curve.overhead_s) if curve else None

    def seconds(self, name: str, work: Work, direction: str) -> float | None:
        """Seconds of an op that moves bytes; None if nothing was measured."""
        result = self.find(name, work, direction)
        if result is None:
            number = f"op/aten.mul/number/{direction}" if work.is_with_number else ""
            curve = self._curves.get(number) or self._curves.get(f"elementwise/{direction}")
            if curve is None:
                return None
            amount = work.backward_num_bytes if direction == "backward" else work.num_bytes
            result = curve.seconds(amount), curve.overhead_s
        if direction == "backward" and work.is_passed_on:
            return result[1] + self.summing_s(work.backward_num_bytes, work.width)
        return result[0]

    def view_s(self, name: str, work: Work, direction: str) -> float | None:
        """Seconds of a view; its gradient is one too, unless elements were left out or repeated."""
        curve = self._curves.get(f"view/{direction}")
        if curve is None:
            return None
        result = self.find(name, work, direction)
        if direction == "forward" or not work.backward_num_bytes:
            return result[1] if result else curve.overhead_s
        if result:
            return result[0]
        return max(curve.overhead_s, self.summing_s(work.backward_num_bytes, work.width))

    def summing_s(self, num_bytes: float, width: int) -> float:
        """Seconds to add up so many bytes, in rows of this width; 0.0 for none."""
        if not num_bytes:
            return 0.0
        widths = self._by_width.get(("aten.sum", "forward"))
        if widths:
            return between(sorted(widths), width, lambda width: widths[width].seconds(num_bytes))
        curve = self._curves.get("elementwise/forward")
        return curve.seconds(num_bytes) if curve else 0.0
