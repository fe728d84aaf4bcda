"""Renders sections of charts, tables and text as one self-contained HTML file."""

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
    """A part of the page: the paragraphs of `text`, then `figures`, then `tables`."""

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
    subject: Sequence[str],
    sections: Sequence[Section],
    advice: Sequence[str] = (),
) -> str:
    """Render sections as the text of an HTML page, which loads nothing from the network.

    Args:
        title: of the page.
        headline: the plan in one line, or a description of the page.
        cards: the numbers at the top: id, name, number and the text below it.
        verdict: a sentence below the cards, without its full stop.
        subject: short texts that say what the page is about.
        sections: in order.
        advice: sentences on what to try next.

    Raises:
        QuestionError: a package that draws pages is not installed.
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
    figures = {figure.name: figure.spec for section in sections for figure in section.figures}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(parts["page.html"]).render(
        title=title,
        headline=headline,
        cards=cards,
        verdict=verdict,
        subject=subject,
        advice=advice,
        sections=sections,
        style=parts["page.css"],
        script=parts["page.js"],
        plotly=offline.get_plotlyjs(),
        figures=json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c"),
        is_number=_is_number,
    )


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, Number)
