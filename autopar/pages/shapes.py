"""The elements of a page: charts as plotly's JSON, tables, and numbers with both their text and exact value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.user_text.quantities import size_unit, three_digits

__all__ = [
    "COLORS", "LEGEND", "MARGIN", "MEMORY_COLORS", "PATTERNS", "SERIES", "Cell", "Figure", "Number", "Table", "axis",
    "count", "digits", "milliseconds", "percent", "size",
]  # fmt: skip

# Okabe and Ito's colors, which people with any kind of color blindness can distinguish, and three of Paul Tol's.
SERIES = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8f8f8f", "#882255", "#6f5fc9",
)  # fmt: skip
PATTERNS = ("", "/", ".", "x")
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
MARGIN = {"t": 8, "r": 16, "b": 40, "l": 8}
COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "weight": "#6f5fc9",
    "recompute": "#8f8f8f",
    "optimizer": "#009e73",
    "optimizer gathers": "#d55e00",
    "activation communication": "#e69f00",
    "gather": "#f0e442",
    "reduce": "#d55e00",
    "parameter communication": "#d55e00",
    "send": "#cc79a7",
    "broadcast": "#882255",
    "offload": "#999933",
    "fetch": "#44aa99",
    "copies to the host": "#999933",
    "waiting in the pipeline": "#8f8f8f",
    "overlapped communication": "#8f8f8f",
}
MEMORY_COLORS = {
    "parameters": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "optimizer state": "#009e73",
    "saved": "#e69f00",
    "saved activations": "#e69f00",
    "transient": "#f0e442",
    "transients": "#f0e442",
    "gathered parameters": "#cc79a7",
    "pipeline buffers": "#882255",
    "overhead": "#8f8f8f",
}


@dataclass(frozen=True)
class Number:
    """A number as text for people, with its exact value for programs."""

    value: float
    text: str


Cell = str | Number


@dataclass(frozen=True)
class Table:
    """A table of numbers; `caption` says what the rows are."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def headings(self) -> tuple[tuple[str, bool], ...]:
        """The columns' names, and whether they contain numbers."""
        numbers = [any(isinstance(row[index], Number) for row in self.rows) for index in range(len(self.columns))]
        return tuple(zip(self.columns, numbers, strict=True))


@dataclass(frozen=True)
class Figure:
    """A chart.

    Args:
        name: its id on the page.
        description: a description for people who can't see it.
        data: plotly traces.
        layout: plotly layout, without colors of text and background, which the page sets.
        height: in pixels.
        has_zoom: whether it has buttons to zoom and pan along x.
        choices: (name, the traces that are visible if it is chosen); () for no choice.
    """

    name: str
    description: str
    data: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    height: int = 320
    has_zoom: bool = False
    choices: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def spec(self) -> dict[str, Any]:
        """The JSON that the page's script draws."""
        return {"data": list(self.data), "layout": dict(self.layout)}


def axis(title: str = "", **others: Any) -> dict[str, Any]:
    """A plotly axis whose numbers are never in scientific notation."""
    return {"title": {"text": title}, "automargin": True, "exponentformat": "none", "separatethousands": True, **others}


def milliseconds(seconds: float) -> Number:
    """Seconds, shown in ms."""
    return Number(seconds, digits(seconds * 1e3))


def digits(value: float) -> str:
    """Format with four digits, all digits of large numbers, and four decimals of small ones.

    Examples: ``"12,345"``, ``"12.34"``, ``"0.0012"``.
    """
    if abs(value) < 1:
        return f"{value:.4f}".rstrip("0").rstrip(".") if value else "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def size(num_bytes: float) -> Number:
    """Bytes, shown in a suitable unit."""
    factor, unit = size_unit(num_bytes)
    return Number(num_bytes, f"{three_digits(num_bytes / factor)} {unit}" if num_bytes else "0")


def percent(share: float) -> Number:
    """A share of 1, shown in percent."""
    return Number(share, f"{share:.1%}")


def count(value: float) -> Number:
    """A number, shown without decimals."""
    return Number(value, f"{value:,.0f}")
