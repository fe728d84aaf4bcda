"""The tables of an answer, for a terminal (`autopar.explain.text`) and for the page (`autopar.explain.report`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.explain.alternatives import Alternative, efficiencies
from autopar.explain.comparison import Difference
from autopar.explain.explanation import Explanation, KindRow
from autopar.explain.runners_up import RunnerUp
from autopar.pages.shapes import Cell, Number, Table, count, digits, milliseconds, percent, size
from autopar.plan import Plan
from autopar.search.considered_plans import describe_plan

__all__ = [
    "difference_table", "forced_table", "kind_name", "kind_table", "link_table", "runner_table", "scaling",
    "share_table", "sweep_table", "what_if_table",
]  # fmt: skip

_SHORT = {
    "activation communication": "act. comm.",
    "parameter communication": "par. comm.",
    "copies to the host": "copies",
    "forward": "fwd",
    "backward": "bwd",
    "recompute": "recomp.",
    "optimizer": "optim.",
}
_HIDDEN = {"overlapped communication": "of it overlapped or merged"}


def kind_name(layers: Sequence[str]) -> str:
    """The layers of a kind in short: ``"layers.0 .. (12)"``."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. ({len(layers)})"


def share_table(explanation: Explanation, step_s: float) -> Table:
    """What the step's seconds are spent on."""
    rows = [
        (_HIDDEN.get(name, name), milliseconds(seconds), percent(seconds / step_s))
        for name, seconds in explanation.shares
        if seconds
    ]
    return Table("Time of the step", ("time spent on", "ms", "share"), tuple(rows))


def kind_table(kinds: Sequence[KindRow]) -> Table:
    """Time and bytes of each layer kind."""
    spent = [name for name, _ in kinds[0].seconds if any(dict(kind.seconds)[name] for kind in kinds)]
    rows = tuple(
        (kind_name(kind.layers), *(milliseconds(dict(kind.seconds)[name]) for name in spent),
         size(sum(each for _, each in kind.num_bytes)))
        for kind in kinds
    )  # fmt: skip
    columns = ("layers", *(_SHORT.get(name, name) for name in spent), "memory")
    return Table("Layer kinds: ms and bytes of all layers of a kind, not all held at the same time", columns, rows)


def link_table(explanation: Explanation) -> Table:
    """Runs, bytes and seconds by link and kind of collective."""
    rows: list[tuple[Cell, ...]] = []
    for row in explanation.links:
        rate = row.num_bytes / row.seconds if row.seconds else 0.0
        gigabytes_per_s = Number(rate, digits(rate / 1e9))
        rows.append(
            (row.link, row.kind, count(row.runs), size(row.num_bytes), milliseconds(row.seconds), gigabytes_per_s)
        )
    columns = ("link", "collective", "runs", "bytes", "ms", "GB/s")
    return Table("Collectives of one device in one step (bytes and GB/s as in the NCCL tests)", columns, tuple(rows))


def runner_table(runners: Sequence[RunnerUp]) -> Table:
    """The plans that came next."""
    rows = tuple(
        (each.what, milliseconds(each.step_time_s), "yes" if each.is_simulated else "no, a sum",
         _change(each.loses), size(each.peak_memory_bytes))
        for each in runners
    )  # fmt: skip
    columns = ("most layers", "ms", "simulated", "vs. the plan", "memory")
    return Table("Runners-up: the best plans of other kinds that fit", columns, rows)


def forced_table(rows: Sequence[Alternative], plan: Plan) -> Table:
    """What it costs to decide otherwise."""
    return _alternatives("Other choices, forced by a constraint", "constraint", rows, "vs. plan", _versus(plan))


def what_if_table(rows: Sequence[Alternative], plan: Plan) -> Table:
    """The plans of what-ifs below the first one."""
    every = [Alternative("as given", plan), *rows]
    return _alternatives("What if", "what if", every, "vs. plan", _versus(plan))


def sweep_table(text: str, rows: Sequence[Alternative]) -> Table:
    """A plan for each value, with how well they scale."""
    efficiency = dict(zip((row.change for row in rows), efficiencies(rows), strict=True))
    caption = f"Sweep over {text}{scaling(rows)}"
    return _alternatives(
        caption, text.partition("=")[0], rows, "efficiency", lambda row: percent(efficiency[row.change])
    )


def scaling(rows: Sequence[Alternative]) -> str:
    """Of plans for several numbers of devices, whether the batch stays (strong scaling) or grows with them (weak)."""
    plans = [row.plan for row in rows if row.plan is not None]
    if len({plan.world_size for plan in plans}) < 2:
        return ""
    if len({plan.samples_per_step for plan in plans}) == 1:
        return f": strong scaling, {plans[0].samples_per_step} rows on any number of devices"
    if len({plan.samples_per_step / plan.world_size for plan in plans}) == 1:
        return f": weak scaling, {plans[0].samples_per_step / plans[0].world_size:.3g} rows per device"
    return ""


def _versus(plan: Plan) -> Callable[[Alternative], Number]:
    return lambda row: _change(row.plan.step_time_s / plan.step_time_s - 1 if row.plan else 0.0)


def _alternatives(
    caption: str, what: str, rows: Sequence[Alternative], compared: str, compare: Callable[[Alternative], Number]
) -> Table:
    plans = [row.plan for row in rows if row.plan is not None]
    # What is the same in all of them is left out, so that the last column has room.
    has_devices = len({plan.world_size for plan in plans}) > 1
    has_rates = has_devices or len({plan.samples_per_step for plan in plans}) > 1
    columns = (
        what, *["devices"] * has_devices, "ms", compared, *["rows/s"] * has_rates, "memory", "most layers"
    )  # fmt: skip
    cells: list[tuple[Cell, ...]] = []
    problems: dict[str, list[str]] = {}
    for row in rows:
        if row.plan is None:
            problems.setdefault(row.problem, []).append(row.change)
    for row in rows:
        plan = row.plan
        if plan is None:
            changes = problems.pop(row.problem, [])  # rows with one problem share a line
            cells += [("; ".join(changes), *["-"] * (len(columns) - 2), row.problem)] if changes else []
            continue
        devices, rates = [count(plan.world_size)] * has_devices, [_rows_per_s(plan)] * has_rates
        cells.append(
            (row.change, *devices, milliseconds(plan.step_time_s), compare(row), *rates, size(plan.peak_memory_bytes),
             describe_plan(plan).what)
        )  # fmt: skip
    return Table(caption, columns, tuple(cells))


def difference_table(title: str, first: Plan, second: Plan, differences: Sequence[Difference]) -> Table:
    """Two plans compared: what they are predicted to take, and the decisions that differ."""
    pairs = (
        ("step (ms)", milliseconds(first.step_time_s), milliseconds(second.step_time_s)),
        ("rows per second", _rows_per_s(first), _rows_per_s(second)),
        ("peak memory", size(first.peak_memory_bytes), size(second.peak_memory_bytes)),
    )
    rows: list[tuple[Cell, ...]] = [
        (what, one, other, _change(other.value / one.value - 1) if one.value else "") for what, one, other in pairs
    ]
    rows += [(f"{each.where}: {each.what}", each.first, each.second, "") for each in differences]
    return Table(title, ("", "first", "second", "change"), tuple(rows))


def _rows_per_s(plan: Plan) -> Number:
    rate = plan.samples_per_step / plan.step_time_s if plan.step_time_s else 0.0
    return Number(rate, digits(rate))


def _change(share: float) -> Number:
    return Number(share, f"{share:+.1%}")
