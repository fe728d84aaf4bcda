"""A plan as one page for a browser: charts that need no network, with the same numbers as tables below them."""

from autopar.explain.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
