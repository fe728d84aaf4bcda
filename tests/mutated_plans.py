"""Plans with something changed, as a person or an accident would: most are illegal, some are other legal plans."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

from autopar.plan import Plan
from autopar.program import Program
from autopar.schedules import schedule_names
from autopar.step.activation_policies import policy_names

__all__ = ["mutated"]

_NUMBERS = (-1, 0, 1, 2, 3, 4, 7, 8, 10**30, -(10**9), 2**63, 0.5, 1e308, True)
_WORDS = ("", "garbage", "full", "selective", "none", *schedule_names(), "-", "~", "b", "m", "n")
_PLACEMENTS = ("R", "R", "S(0)", "S(1)", "S(2)", "P", "B")
_NO_LAYOUTS = ("S(7)", "S(-1)", "", "X", "R,R,R,R", "S(99999999999)")
_VERY_LONG = "a number of 5,000 digits"  # `json` can't write it
# Of a plan's decisions; those of strategies stand one level lower.
_FIELDS = (
    "world_size", "num_microbatches", "layers", "shared_mesh", "shared_storage", "stages", "schedule",
)  # fmt: skip

Place = tuple[Any, Any]  # what holds a value, and its key or index there


def mutated(plan: Plan, program: Program, seed: int) -> tuple[str, str]:
    """A decision's name, and the file of `plan` with that one changed at random; in every eighth file two more are."""
    rng = random.Random(seed)
    data: dict[str, Any] = json.loads(plan.to_json())
    decisions = data["decisions"]
    factors = sorted({o.factor for layer in program.layers for op in layer.ops for o in op.options})
    names = [_change_one(decisions, factors, rng) for _ in range(1 if seed % 8 else 3)]
    text = json.dumps(data).replace(f'"{_VERY_LONG}"', "9" * 5000)
    return names[0], text


def _change_one(decisions: dict[str, Any], factors: list[str], rng: random.Random) -> str:
    """Change a value in a random field; a field with many values is no likelier than one with few."""
    holders = [(decisions, name) for name in _FIELDS if name in decisions]
    strategies = [s for s in _list(decisions.get("strategies")) if isinstance(s, dict)]
    if strategies:
        chosen = rng.choice(strategies)
        holders += [(decisions, "strategies"), *((chosen, name) for name in chosen if name != "labels")]
    holder, name = rng.choice(holders)
    places = list(_places(holder, name)) if name != "strategies" else [(holder, name)]
    inner, key = rng.choice(places)
    inner[key] = _other(inner[key], name, factors, rng)
    return str(name)


def _other(old: Any, name: str, factors: list[str], rng: random.Random) -> Any:
    if isinstance(old, bool | int | float):
        near = [old - 1, old + 1, 2 * old]
        return rng.choice([*near, *near, rng.choice(_NUMBERS), rng.choice([_VERY_LONG, math.nan, "4"])])
    if rng.random() < 0.05:
        return rng.choice([{}, [], None, 3, "x"])
    if isinstance(old, str):
        return _other_text(old, name, factors, rng)
    if isinstance(old, dict):
        return _other_entries(old, rng)
    return _other_mesh(old, rng) if "mesh" in name and rng.random() < 0.7 else _other_list(old, rng)


def _other_text(old: str, name: str, factors: list[str], rng: random.Random) -> Any:
    if name in ("inputs", "outputs", "copies", "storage", "shared_storage") and _is_layout(old):
        axes = old.count(",") + 1
        like = ",".join(rng.choice(_PLACEMENTS) for _ in range(axes))
        return rng.choice([like, like, like, rng.choice(_NO_LAYOUTS)])
    if name in ("assignments", "time"):
        parts = old.split(" ")
        parts[rng.randrange(len(parts))] = rng.choice([*factors, "-", "~"])
        return rng.choice([" ".join(parts), " ".join(parts), " ".join(parts), rng.choice(_WORDS)])
    like = schedule_names() if name == "schedule" else policy_names() if name == "recompute" else _WORDS
    return rng.choice([*like, rng.choice(_WORDS)])


def _is_layout(text: str) -> bool:
    return bool(text) and all(part[:1] in "RSPB" and part[1:2] in ("", "(") for part in text.split(","))


def _other_mesh(old: list[Any], rng: random.Random) -> list[int]:
    """Another mesh, most often of as many devices."""
    size = rng.choice([math.prod(old)] * 3 + [2, 3, 8])
    mesh: list[int] = []
    while size > 1:
        axis = rng.choice([d for d in range(2, size + 1) if size % d == 0])
        mesh.append(axis)
        size //= axis
    return mesh + [1] * rng.choice([0, 0, 1])


def _other_entries(old: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Without one entry, or with two exchanged."""
    new = copy.deepcopy(old)
    if not new:
        return {"x": "R"}
    one, other = rng.choice([*new]), rng.choice([*new])
    if rng.random() < 0.5:
        del new[one]
    else:
        new[one], new[other] = new[other], new[one]
    return new


def _other_list(old: list[Any], rng: random.Random) -> list[Any]:
    new = copy.deepcopy(old)
    how = rng.choice(("drop", "repeat", "reverse", "swap", "swap", "empty"))
    if how == "drop" and new:
        new.pop(rng.randrange(len(new)))
    elif how == "repeat" and new:
        new.append(copy.deepcopy(rng.choice(new)))
    elif how == "swap" and new:
        new[rng.randrange(len(new))] = copy.deepcopy(rng.choice(new))
    elif how == "reverse":
        new.reverse()
    else:
        new.clear()
    return new


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _places(holder: Any, key: Any) -> Iterator[Place]:
    """Every value at and below a place."""
    value = holder[key]
    below = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    yield holder, key
    for each in below:
        yield from _places(value, each)
