"""Sections of charts, tables and text as one HTML file that holds all of them and what draws them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from autopar.errors import QuestionError
from autopar.pages.shapes import Cell, Figure, Number, Table

__all__ = ["Section", "render_page"]


@dataclass(frozen=True)
class Section:
    """A part of the page; `text` are paragraphs, `figures` and `tables` come below in this order."""

    name: str
    title: str
    text: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


def render_page(
    title: str,
    headline: str,
    cards: Sequence[tuple[str, str, Number, str]],
    verdict: str,
    asked: Sequence[str],
    shown: Sequence[Section],
) -> str:
    """Sections as one HTML text, which loads nothing from anywhere.

    Args:
        title: of the page.
        headline: the plan in one line, or what the page shows.
        cards: the numbers at the top: id, name, number and what stands below it.
        verdict: a sentence below them, without its full stop.
        asked: what the page is about, in short texts.
        shown: the sections in order.

    Raises:
        QuestionError: what draws pages is not installed.
    """
    try:
        jinja2: Any = importlib.import_module("jinja2")
        offline: Any = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise QuestionError(
            f"--html needs {error.name}: pip install 'autopar[report]' (or pip install plotly)"
        ) from error
    files = resources.files("autopar.pages")
    parts = {name: (files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    figures = {figure.name: figure.spec for section in shown for figure in section.figures}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(parts["page.html"]).render(
        title=title,
        headline=headline,
        cards=cards,
        verdict=verdict,
        asked=asked,
        sections=shown,
        style=parts["page.css"],
        script=parts["page.js"],
        plotly=offline.get_plotlyjs(),
        figures=json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c"),
        is_number=_is_number,
    )


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, Number)
