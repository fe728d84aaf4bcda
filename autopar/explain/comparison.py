"""Two plans compared: what differs, and what that does to time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.plan import LayerStrategy, Plan

__all__ = ["Difference", "compare_plans"]


@dataclass(frozen=True)
class Difference:
    """One thing that two plans decide differently; `where` is "plan" or names layers."""

    where: str
    what: str
    first: str
    second: str


def compare_plans(first: Plan, second: Plan) -> tuple[Difference, ...]:
    """Everything in which `second` differs from `first`, the plan's own decisions before those of layers."""
    return (*_plan_differences(first, second), *_layer_differences(first, second))


def _plan_differences(first: Plan, second: Plan) -> Iterator[Difference]:
    pairs = {
        "devices": (f"{first.world_size} x {first.device}", f"{second.world_size} x {second.device}"),
        "microbatches": (first.num_microbatches, second.num_microbatches),
        "stages": (_stages(first), _stages(second)),
        "rows per step": (first.samples_per_step, second.samples_per_step),
    }
    for what, (one, other) in pairs.items():
        if one != other:
            yield Difference("plan", what, str(one), str(other))


def _stages(plan: Plan) -> str:
    if not plan.stages:
        return "none"
    cuts = ", ".join(plan.layers[stage.start].name for stage in plan.stages[1:])
    return f"{len(plan.stages)} on {plan.num_groups} device groups ({plan.schedule}), cut before {cuts}"


def _layer_differences(first: Plan, second: Plan) -> Iterator[Difference]:
    names = [layer.name for layer in first.layers]
    others = [layer.name for layer in second.layers]
    if names != others:
        yield Difference("plan", "layers", f"{len(names)}: {names[0]} ...", f"{len(others)}: {others[0]} ...")
        return
    rows: dict[tuple[str, str, str], list[str]] = {}
    for layer, other in zip(first.layers, second.layers, strict=True):
        one, two = first.strategies[layer.strategy], second.strategies[other.strategy]
        for what, a, b in _strategy_differences(one, two):
            rows.setdefault((what, a, b), []).append(layer.name)
    for (what, a, b), layers in rows.items():
        where = layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]} ({len(layers)})"
        yield Difference(where, what, a, b)


def _strategy_differences(first: LayerStrategy, second: LayerStrategy) -> Iterator[tuple[str, str, str]]:
    pairs = {
        "mesh": (first.axes, second.axes),
        "storage": (first.storage_name, second.storage_name),
        "recompute": (first.recompute, second.recompute),
        "collectives in pieces": (first.pieces_name or "none", second.pieces_name or "none"),
    }
    results = [(what, one, other) for what, (one, other) in pairs.items() if one != other]
    yield from results
    if not results and first != second:
        yield "layouts", "as in the first plan", "other factors or layouts on the same axes"
