"""Why a plan was chosen: where its time and memory go, what limits it, and the traffic of each link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.cluster import Device
from autopar.explain.planner import Answer
from autopar.explain.runners_up import RunnerUp, runners_up
from autopar.pages.shapes import size
from autopar.placement import Links
from autopar.plan import Plan
from autopar.plan.prediction import SPENT
from autopar.step.costs.plan_collectives import plan_collectives

__all__ = ["FULL", "Explanation", "KindRow", "LinkRow", "explain", "kind_rows"]


@dataclass(frozen=True)
class KindRow:
    """One layer kind under one strategy: seconds per step and bytes per device, of all its layers together.

    `layers` are their names.  ``transient`` bytes are those of one layer, as one runs at a time.
    """

    layers: tuple[str, ...]
    axes: str
    storage: str
    recompute: str
    seconds: tuple[tuple[str, float], ...]
    num_bytes: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class LinkRow:
    """What one kind of collective carries over one link in a step: bytes of a device's buffers, runs, seconds."""

    link: str
    kind: str
    runs: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class Explanation:
    """What there is to say about one plan.

    Args:
        shares: what the step's seconds are spent on, largest first; they add up to the step.
        kinds: where time and bytes go, by layer kind.
        links: collectives by link.
        binds: one sentence: what keeps the plan from being faster.
        memory_share: predicted peak over the limit.
        sources: `Plan.price_source`, the share of the seconds by what their prices rest on: ``"measured"`` here,
            ``"published"``, ``"calibrated"`` on published training runs, ``"estimate"``.
        memory_error: how far the peak memory can be off, relative to it; 0: not known.
        optimality_gap: the step takes at most ``1 + optimality_gap`` times that of the best plan in the search space.
        runners_up: the best plans of other kinds, and by how much they lose.
        planning_s: seconds that planning took, by part.
    """

    shares: tuple[tuple[str, float], ...]
    kinds: tuple[KindRow, ...]
    links: tuple[LinkRow, ...]
    binds: str
    memory_share: float
    sources: tuple[tuple[str, float], ...]
    memory_error: float
    optimality_gap: float
    runners_up: tuple[RunnerUp, ...]
    planning_s: tuple[tuple[str, float], ...]


_SOURCES = ("measured", "published", "calibrated", "estimate")  # the surest first
FULL = 0.9  # of the limit: the error of a predicted peak is half of what is left, so such a plan was cut to fit
_SAID = 0.01  # of the step
_BYTES = {
    "parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes",
    "saved": "saved_bytes", "transient": "transient_bytes",
}  # fmt: skip


def explain(answer: Answer) -> Explanation:
    """Explain a plan from its own costs and collectives."""
    plan = answer.plan
    spent = plan.prediction.spent(plan.num_groups)
    links = _links(answer)
    return Explanation(
        shares=tuple(sorted(spent.items(), key=lambda item: -item[1])),
        kinds=tuple(kind_rows(plan)),
        links=links,
        binds=_binds(plan, answer.question.cluster.device, links),
        memory_share=plan.peak_memory_bytes / plan.memory_limit_bytes if plan.memory_limit_bytes else 0.0,
        sources=tuple((name, dict(plan.price_source).get(name, 0.0)) for name in _SOURCES),
        memory_error=plan.memory_error,
        optimality_gap=plan.optimality_gap,
        runners_up=runners_up(answer.considered, plan),
        planning_s=plan.planning_s,
    )


def kind_rows(plan: Plan) -> Iterable[KindRow]:
    """Where time and bytes go, by layer kind and strategy."""
    layers: dict[int, list[int]] = {}
    for index, layer in enumerate(plan.layers):
        layers.setdefault(layer.strategy, []).append(index)
    for number, own in layers.items():
        strategy, costs = plan.strategies[number], [plan.costs[index] for index in own]
        yield KindRow(
            tuple(plan.layers[index].name for index in own),
            strategy.degrees,
            strategy.storage_name,
            strategy.recompute_name,
            tuple((name, sum(getattr(cost, field) for cost in costs)) for name, field in SPENT.items()),
            tuple((name, _joined(name, [getattr(cost, field) for cost in costs])) for name, field in _BYTES.items()),
        )


def _joined(name: str, sizes: list[float]) -> float:
    return max(sizes) if name == "transient" else sum(sizes)


def _links(answer: Answer) -> tuple[LinkRow, ...]:
    cluster = answer.question.cluster
    rows: dict[tuple[str, str], list[float]] = {}
    for run in plan_collectives(answer.program, answer.plan, answer.training):
        is_between = Links.NETWORK in run.axis.links(cluster.devices_per_node)
        link = cluster.between.name if is_between else cluster.within.name
        row = rows.setdefault((link, run.kind), [0, 0.0, 0.0])
        row[0] += run.times
        row[1] += run.times * run.num_bytes
        row[2] += run.times * answer.prices.collective_s(run.kind, run.axis, run.num_bytes)
    results = [LinkRow(link, kind, int(runs), size, seconds) for (link, kind), (runs, size, seconds) in rows.items()]
    return tuple(sorted(results, key=lambda row: -row.seconds))


def _binds(plan: Plan, device: Device, links: tuple[LinkRow, ...]) -> str:
    """By the shares that the plan prints."""
    total = plan.step_time_s or 1.0
    shares = {name: seconds / total for name, seconds in plan.prediction.summary(plan.num_groups).items()}
    first = max(("compute", "exposed communication", "waiting in the pipeline"), key=lambda name: shares.get(name, 0.0))
    others = [(name, share) for name, share in shares.items() if name != first and share >= _SAID]
    main = ", ".join([f"{first} is {shares[first]:.0%} of the step", *(f"{n} {share:.0%}" for n, share in others)])
    if first == "exposed communication" and links:
        main += f"; of all communication most is {links[0].kind} over {links[0].link}"
    return f"{main}; {_memory(plan, device)}"


def _memory(plan: Plan, device: Device) -> str:
    full = plan.peak_memory_bytes / plan.memory_limit_bytes if plan.memory_limit_bytes else 0.0
    text = f"memory is {full:.0%} full"
    if plan.memory_limit_bytes == device.usable_memory_bytes and device.overhead_bytes:
        whole, rest = size(device.memory_bytes).text, size(device.overhead_bytes).text
        text += f" (of {whole}, {rest} are reserved for the context, communicators and fragments)"
    return f"{text}, so it limits the plan" if full > FULL else text
