"""Formats quantities with three digits and a suitable unit, never in scientific notation."""

from __future__ import annotations

from decimal import Decimal

__all__ = ["count_unit", "format_seconds", "short_count", "size_unit", "three_digits"]

_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def three_digits(value: float) -> str:
    """Format with three significant digits, and all digits in front of the point: ``0.00123``, ``12.3``, ``1,234``.

    >>> [three_digits(value) for value in (0.0000123, 0.0123456, 99.96, 999.6, 1040.2)]
    ['0.0000123', '0.0123', '100', '1,000', '1,040']
    """
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{Decimal(text):f}" if "e" in text else text


def count_unit(value: float) -> tuple[float, str]:
    """The largest power of 1000 that isn't above `value`, and its letter."""
    return next((pair for pair in _COUNTS if abs(value) >= pair[0]), (1.0, ""))


def size_unit(num_bytes: float) -> tuple[float, str]:
    """The bytes of the largest unit that isn't above `num_bytes`, and its name."""
    return next((pair for pair in _SIZES if num_bytes >= pair[0]), (1.0, "bytes"))


def short_count(value: float) -> str:
    """Format with three digits and k, M, G or T.

    >>> short_count(8123)
    '8.12k'
    """
    factor, unit = count_unit(value)
    return f"{three_digits(value / factor)}{unit}"


def format_seconds(seconds: float) -> str:
    """Format in s, ms, us or ns, with three digits.

    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    scale, unit = next((pair for pair in _TIMES if abs(seconds) >= pair[0]), (1e-9, "ns"))
    return f"{three_digits(seconds / scale)} {unit}"
