"""Calibration without a source, and its error there: what to expect of rows that nobody has seen.

Constants are fitted one after the other, each to the smallest mean absolute error over the rows that it matters for,
twice around, from what one would take without any rows; from the first to the last and the other way, and the way
that ends with the smaller error over these rows counts.  A constant that no remaining row tells anything about keeps
its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from benchmarks.published.calibration import PRIORS, Calibration
from benchmarks.published.clusters import preset_of
from benchmarks.published.runs import Run
from benchmarks.published.stacks import stack_of
from benchmarks.published.step import predict_s

__all__ = ["Fitted", "Fitter"]

_SUSTAINED = "sustained "
_SUSTAINED_PRIOR = 0.85
_FRACTIONS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
_GRIDS: Mapping[str, tuple[float, ...]] = {
    "taken": (0.1, 0.15, 0.2, 0.25, 0.3),
    "hidden_tensor": (0.0, 0.25, 0.5, 0.75),
    "omni_path": (0.15, 0.25, 0.35, 0.5, 1.0),
    "row_scaled": (0.6, 0.75, 0.9, 1.0),
    "power_limited": (0.4, 0.5, 0.6, 0.8, 1.0),
}

Fitted = Mapping[str, float]


class _Known(NamedTuple):
    """A row and the constants that its price depends on."""

    run: Run
    names: tuple[str, ...]


class Fitter:
    """Fits constants to any part of `runs`; prices are kept, as they are asked for again and again."""

    def __init__(self, runs: Iterable[Run]) -> None:
        """Find out which constants matter for which row."""
        self._known = {run.id: _Known(run, _names(run)) for run in runs}
        self._errors: dict[tuple[str, tuple[float, ...]], float] = {}

    def error(self, run: Run, fitted: Fitted) -> float:
        """Relative error of the throughput of a row."""
        names = self._known[run.id].names
        key = (run.id, tuple(fitted[name] for name in names))
        if key not in self._errors:
            values = dict(zip(names, key[1], strict=True))
            self._errors[key] = run.measured_s / predict_s(run, _calibration(values)) - 1
        return self._errors[key]

    def fit(self, runs: Iterable[Run]) -> dict[str, float]:
        """All constants, fitted to these rows."""
        rows = [self._known[run.id] for run in runs]
        presets = sorted({name for known in self._known.values() for name in known.names if name not in PRIORS})
        names = (*presets, *PRIORS)

        def total(fitted: Fitted) -> float:
            return sum(abs(self.error(known.run, fitted)) for known in rows)

        return min((self._descended(order, rows, presets) for order in (names, names[::-1])), key=total)

    def _descended(self, order: tuple[str, ...], rows: list[_Known], presets: list[str]) -> dict[str, float]:
        fitted = dict(PRIORS) | dict.fromkeys(presets, _SUSTAINED_PRIOR)
        for name in order * 2:
            matter = [known.run for known in rows if name in known.names]
            if matter:
                fitted[name] = self._best(name, matter, fitted)
        return fitted

    def _best(self, name: str, runs: list[Run], fitted: dict[str, float]) -> float:
        def total(value: float) -> float:
            return sum(abs(self.error(run, fitted | {name: value})) for run in runs)

        return min(_GRIDS.get(name, _FRACTIONS), key=total)


def _names(run: Run) -> tuple[str, ...]:
    stack, precision = stack_of(run), run.precision.lower()
    conditions = {
        "hidden_tensor": run.tensor > 1 and (stack.hides_tensor or run.is_asynchronous),
        "omni_path": "Omni-Path" in run.interconnect and run.num_devices > run.devices_per_node,
        "row_scaled": "rowwise" in precision,
        "power_limited": "power limited" in run.gpu,
    }
    return (_SUSTAINED + _base_preset(run), "taken", *(name for name, holds in conditions.items() if holds))


def _base_preset(run: Run) -> str:
    """Devices with the same chip and power share what they sustain."""
    name = preset_of(run.gpu)
    return {"a100-40gb": "a100-80gb", "h200": "h100", "h100-500w": "h100"}.get(name, name)


def _calibration(values: Mapping[str, float]) -> Calibration:
    sustained: dict[str, float] = {}
    for name, value in values.items():
        if name.startswith(_SUSTAINED):
            base = name.removeprefix(_SUSTAINED)
            sustained[base] = value
            if base == "a100-80gb":
                sustained["a100-40gb"] = value
            if base == "h100":
                sustained |= {"h200": value, "h100-500w": value * 500 / 700}
    others = {name: value for name, value in values.items() if name in PRIORS}
    return Calibration(**others, sustained=sustained)
