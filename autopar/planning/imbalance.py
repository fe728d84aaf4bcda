"""How unevenly tokens are expected to be spread over experts: what prices and memory assume of the busiest device.

Devices that share experts wait for the one whose experts got the most rows, and what they send each other is as long as
its slice (`autopar.lower.kernels.experts`).  For n devices that is a number of times the mean, from 1 (all alike) to n
(all rows to one).  It comes from a number that the user gives, from a lognormal distribution of the experts' loads, or
from a histogram that was measured (`StepReport.expert_rows`).
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from autopar.errors import ConstraintError
from autopar.ops import with_rule
from autopar.ops.experts import EXPERTS, read_body
from autopar.program import Op, Option, Program

__all__ = ["BALANCED", "ExpectedRouting", "Imbalance", "read_imbalance", "with_imbalance"]

_Rows = Sequence[float]
ExpectedRouting = float | str | _Rows | Sequence[_Rows] | Mapping[str, _Rows] | None
"""What users pass as ``imbalance``; see `read_imbalance`."""

_SHUFFLES = 64
"""The mean of the maximum over so many orders of experts is within 3 % of that over 4096 (256 experts, sigma 1)."""


@dataclass(frozen=True)
class Imbalance:
    """What is expected of routing; at most one of the last three is given.

    Args:
        what: as the plan says it.
        times: rows of the busiest device over the mean, however many devices share the experts.
        sigma: experts' loads are lognormal: the standard deviation of their logarithms.
        loads: rows of each expert, layer by layer.
    """

    what: str
    times: float = 1.0
    sigma: float = 0.0
    loads: tuple[tuple[float, ...], ...] = ()

    def busiest(self, num_experts: int) -> tuple[tuple[int, float], ...]:
        """(number of devices that share so many experts, rows of the busiest one over the mean), where it is not 1.

        Raises:
            ConstraintError: what was measured is of other numbers of experts.
        """
        counts = [n for n in range(2, num_experts + 1) if num_experts % n == 0]
        ratios = ((n, self._busiest(num_experts, n)) for n in counts)
        return tuple((n, times) for n, times in ratios if times > 1.0)

    def _busiest(self, num_experts: int, devices: int) -> float:
        if self.sigma:
            return _mean_of_shuffles(_lognormal(num_experts, self.sigma), devices)
        if not self.loads:
            return min(self.times, float(devices))
        # Layers wait one after the other, so a step takes the mean over them.
        own = [_most(layer, devices) for layer in self.loads if len(layer) == num_experts]
        if not own:
            raise ConstraintError(
                f"imbalance: rows were counted for {len(self.loads[0])} experts a layer, and this model has "
                f"{num_experts}: pass the expert_rows of a report of this model, or a number such as imbalance=1.5"
            )
        return statistics.fmean(own)


BALANCED = Imbalance("that gives every expert equally many tokens")


def _most(loads: Sequence[float], devices: int) -> float:
    """Of devices that have neighboring experts each, the rows of the busiest over the mean."""
    per_device = len(loads) // devices
    sums = [sum(loads[first : first + per_device]) for first in range(0, len(loads), per_device)]
    return max(sums) * devices / sum(sums) if sum(sums) else 1.0


def _lognormal(num_experts: int, sigma: float) -> list[float]:
    """Equally probable loads, relative to the largest."""
    normal = statistics.NormalDist()
    logs = [sigma * normal.inv_cdf((place + 0.5) / num_experts) for place in range(num_experts)]
    return [math.exp(log - max(logs)) for log in logs]


def _mean_of_shuffles(loads: Sequence[float], devices: int) -> float:
    draw = random.Random(0)  # prices are the same each time
    return statistics.fmean(_most(draw.sample(loads, len(loads)), devices) for _ in range(_SHUFFLES))


def read_imbalance(given: Any) -> Imbalance:
    """The argument `imbalance`: None, a number, ``"lognormal:0.5"``, or rows of each expert by layer: a list, a dict of
    lists (`StepReport.expert_rows`), a tensor, or the path of a JSON file with such.

    Raises:
        ConstraintError: it is none of these.
    """
    if given is None:
        return BALANCED
    if isinstance(given, str) and given.endswith(".json"):
        return _measured(_read_file(given), f"as measured in {given}")
    if isinstance(given, str) and given.startswith("lognormal:"):
        sigma = _number(given, given.removeprefix("lognormal:"), 0.0)
        return Imbalance(f"that loads experts lognormally, with sigma {sigma:g}", sigma=sigma) if sigma else BALANCED
    if isinstance(given, str | int | float):
        times = _number(given, given, 1.0)
        return replace(
            BALANCED,
            what=f"that gives the busiest device {times:g} times the mean of those that share experts",
            times=times,
        )
    return _measured(given, "as measured")


def _number(given: Any, value: str | float, least: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise ConstraintError(
            f"imbalance={given!r:.80}: write how many times the mean the busiest device gets, at least 1, such as 1.5; "
            "'lognormal:0.5' for loads whose logarithms deviate by 0.5; or rows of each expert by layer, such as "
            "model.report(step).expert_rows, or the path of a .json file with them"
        )
    return number


def _read_file(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConstraintError(
            f"imbalance={path!r}: no JSON can be read there: {error}. Write one with "
            "json.dump(model.report(step).expert_rows, file)"
        ) from error


def _measured(given: Any, what: str) -> Imbalance:
    """Of rows counted."""
    layers: Any = list(cast("Mapping[str, Any]", given).values()) if isinstance(given, Mapping) else given
    layers = layers.tolist() if hasattr(layers, "tolist") else layers
    try:
        nested: list[Any] = list(layers)
        rows: list[Any] = nested if nested and isinstance(nested[0], Iterable) else [nested]
        loads = tuple(tuple(float(count) for count in layer) for layer in rows)
    except (TypeError, ValueError):
        loads = ()
    if not loads or any(not layer or not all(0 <= count < math.inf for count in layer) for layer in loads):
        raise ConstraintError(
            f"imbalance={given!r:.80} is not a count of rows: pass a list with the rows of each expert, or one such "
            "list a layer, such as model.report(step).expert_rows"
        )
    return Imbalance(what, loads=loads)


def with_imbalance(program: Program, expected: Imbalance) -> Program:
    """`program`, whose prices and memory are those of the busiest device; as it is without experts that are one op.

    Raises:
        ConstraintError: what is expected is of another number of experts.
    """
    ratios = {
        op.args[5]: expected.busiest(int(cast("int", op.args[5])))
        for layer in program.kinds
        for op in layer.ops
        if op.target == EXPERTS
    }
    if not ratios:
        note = "imbalance: this program has no experts that run as one op, so it changes nothing"
        return program if expected is BALANCED else replace(program, notes=(*program.notes, note))
    program = replace(program, notes=(*program.notes, f"experts: prices and memory are for routing {expected.what}"))
    if not any(ratios.values()):
        return program
    known: dict[tuple[object, ...], tuple[Option, ...]] = {}  # equal for layers of one kind

    def change(op: Op) -> Op:
        if op.target != EXPERTS:
            return op
        operands, results = (tuple(map(program.type_of, names)) for names in (op.operands, op.results))
        body = read_body(str(op.args[6]))
        kept_bytes = op.saved_extra_bytes / max(1, operands[0].shape[0])
        text = replace(body, busiest=ratios[op.args[5]], kept_bytes=kept_bytes).text()
        made = replace(op, args=(*op.args[:6], text))
        needs = tuple(program.values[name].requires_grad for name in op.operands)
        key = (text, operands, results, needs)
        if key not in known:
            options = with_rule(made, operands, results).options
            known[key] = tuple(option.with_gradients_of(needs) for option in options)
        return replace(made, options=known[key])

    return replace(program, layers=tuple(replace(layer, ops=tuple(map(change, layer.ops))) for layer in program.layers))
