"""Prints a profile as tables."""

from __future__ import annotations

import statistics
from collections.abc import Container, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from autopar.cost.measure.probe import Probe
from autopar.cost.profile import Profile, Readings
from autopar.user_text.quantities import count_unit, format_seconds, three_digits

__all__ = ["print_probes", "print_profile"]


def print_profile(profile: Profile, console: Console) -> None:
    """Print everything in `profile`, one line for each curve, reading and layer."""
    software = ", ".join(f"{name} {value}" for name, value in profile.software.items() if value)
    console.print(
        f"{profile.device}, {profile.num_ranks} processes at a time, {profile.date}; {software}", markup=False
    )
    if profile.curves:
        _print_curves(profile, console)
    if profile.readings:
        table = _table("reading", "points", "amount", "value", "spread")
        for key, readings in sorted(profile.readings.items()):
            table.add_row(key, *_cells(readings))
        console.print(table)
    if profile.layers:
        table = _table("layer", "forward", "backward", "spread")
        for key, layer in sorted(profile.layers.items()):
            table.add_row(key, format_seconds(layer.forward_s), format_seconds(layer.backward_s), f"{layer.spread:.0%}")
        console.print(table)
    console.print("spread: interquartile range over median (for interference: the interquartile range)")


def print_probes(probes: Sequence[Probe], missing: Container[Probe], console: Console) -> None:
    """Print `probes`, and which of them have run."""
    table = _table("measured", "points", "what")
    for probe in probes:
        state = "no" if probe in missing else "yes"
        table.add_row(state, str(probe.num_points), " and ".join(probe.keys))
    console.print(table)


def _print_curves(profile: Profile, console: Console) -> None:
    table = _table("curve", "points", "work", "time", "best rate", "spread")
    for key, curve in sorted(profile.curves.items()):
        first, last = curve.points[0], curve.points[-1]
        times = _range(
            format_seconds(min(p.seconds for p in curve.points)), format_seconds(max(p.seconds for p in curve.points))
        )
        is_work = key.split("/")[0] != "view"
        unit = "flop" if key.startswith(("matmul/", "batched/", "convolution/", "attention/")) else "B"
        work = _range(_scaled(first.amount), _scaled(last.amount)) + f" {unit}" if is_work else ""
        rate = f"{_scaled(max(p.amount / p.seconds for p in curve.points))}{unit}/s" if is_work else ""
        table.add_row(key, str(len(curve.points)), work, times, rate, f"{curve.spread:.0%}")
    console.print(table)


def _cells(readings: Readings) -> tuple[str, ...]:
    amounts = _range(_scaled(readings.points[0].amount), _scaled(readings.points[-1].amount))
    values = [point.value for point in readings.points]
    spread = statistics.median(point.spread for point in readings.points)
    return str(len(values)), amounts, _range(_scaled(min(values)), _scaled(max(values))), f"{spread:.2g}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        is_text = column in ("curve", "reading", "layer", "what", "measured")
        table.add_column(column, overflow="fold", justify="left" if is_text else "right")
    return table


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low.rstrip()} .. {high}"


def _scaled(number: float) -> str:
    factor, unit = count_unit(number)
    return f"{three_digits(number / factor)} {unit}"
