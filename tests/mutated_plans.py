"""Plans with one thing changed, as a person or an accident would: most are illegal, some are other legal plans."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from autopar.plan import Plan
from autopar.program import Program

__all__ = ["mutated"]

_LAYOUTS = ("R", "S(0)", "S(1)", "S(7)", "P", "B", "R,R", "S(0),R", "R,S(1)", "S(0),S(0)", "", "X")
_NUMBERS = (-1, 0, 1, 2, 3, 4, 7, 8, 10**30, -(10**9), 0.5, True)
_WORDS = ("", "garbage", "full", "selective", "none", "gpipe", "1f1b", "zbv", "-", "~", "b", "m", "n")
# Of a plan's file, what decides how it runs; the rest is provenance and prediction.
_DECIDING = (
    "world_size", "num_microbatches", "layers", "strategies", "shared_mesh", "shared_storage", "stages", "schedule",
)  # fmt: skip


def mutated(plan: Plan, program: Program, seed: int) -> str:
    """The file of `plan` with one random change of its decisions."""
    rng = random.Random(seed)
    data: dict[str, Any] = json.loads(plan.to_json())
    decisions = data.get("decisions", data)
    factors = sorted({o.factor for layer in program.layers for op in layer.ops for o in op.options})
    places = [each for name in _DECIDING if name in decisions for each in _places(decisions, name)]
    holder, key = rng.choice(places)
    old = holder[key]
    if isinstance(old, bool | int | float):
        holder[key] = rng.choice(_NUMBERS)
    elif isinstance(old, str):
        is_layout = any(letter in old for letter in "RSPB") and old.upper() == old
        choices = _LAYOUTS if is_layout else (*_WORDS, *factors, *(" ".join([a, old.split(" ")[-1]]) for a in factors))
        holder[key] = rng.choice(choices)
    elif isinstance(old, list):
        holder[key] = _other_list(old, rng)
    else:
        holder[key] = rng.choice([{}, [], None, 3, "x"])
    return json.dumps(data)


def _other_list(old: list[Any], rng: random.Random) -> Any:
    new = copy.deepcopy(old)
    how = rng.choice(("drop", "repeat", "reverse", "empty", "other"))
    if how == "drop" and new:
        new.pop(rng.randrange(len(new)))
    elif how == "repeat" and new:
        new.append(copy.deepcopy(rng.choice(new)))
    elif how == "reverse":
        new.reverse()
    elif how == "other":
        return rng.choice([None, 3, "x", {}])
    else:
        new.clear()
    return new


def _places(holder: Any, key: Any) -> Iterator[tuple[Any, Any]]:
    """Every value below, by what holds it; leaves are likelier than what holds them."""
    value = holder[key]
    below = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    yield holder, key
    for each in below:
        yield from _places(value, each)
