"""The best plans under other conditions: other choices, each forced by a constraint, and the values of a sweep."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.errors import AutoparError, DeadlineError, InfeasibleError, QuestionError
from autopar.explain.planner import Planner
from autopar.explain.question import Question, change, check_varied
from autopar.plan import Plan
from autopar.search.plan_selection import preferred_s
from autopar.user_text.progress import phase

__all__ = [
    "Alternative", "alternative_before", "efficiencies", "faster", "forced_choices", "sweep", "sweep_questions",
    "what_if",
]  # fmt: skip

_ROUNDING = 1e-6  # relative: sums in another order differ by less


@dataclass(frozen=True)
class Alternative:
    """The best plan after a change of the question (``nodes=2``; constraints with ", " between them); without a plan,
    the problem.
    """

    change: str
    plan: Plan | None = None
    problem: str = ""


def _alternative(
    planner: Planner, name: str, question: Question, deadline: float = math.inf, late: str = ""
) -> Alternative:
    """The best plan, or the problem: `late` if it is not found before the deadline (of `time.perf_counter`)."""
    try:
        answer = planner.answer(question, is_alternative=True, seeks_gap=False, deadline=deadline)
        return Alternative(name, answer.plan)
    except DeadlineError:
        return Alternative(name, problem=late)
    except AutoparError as error:
        return Alternative(name, problem=_in_short(error))


def _in_short(error: AutoparError) -> str:
    return f"{type(error).__name__}: {str(error).split('. ')[0]:.90}"


def what_if(planner: Planner, text: str, question: Question) -> Alternative:
    """The best plan for `question`, which is another one with the change `text`; or why nothing fits.

    It is compared with the first plan alone, so its search need not look at what it can rule out.

    Raises:
        AutoparError: the question can't be used.
    """
    try:
        return Alternative(text, planner.answer(question, is_alternative=question.lengths is None).plan)
    except InfeasibleError as error:
        return Alternative(text, problem=_in_short(error))


def alternative_before(planner: Planner, question: Question, text: str, deadline: float) -> Alternative:
    """The best plan after one change (see `change`), if it is found before `deadline` (of `time.perf_counter`)."""
    if time.perf_counter() > deadline:
        return Alternative(text, problem="not searched, the time ran out (--seconds)")
    try:
        changed = change(question, text)
        planner.program(changed)
    except QuestionError as error:
        return Alternative(text, problem=str(error))
    return _alternative(planner, text, changed, deadline, "stopped, the time ran out (--seconds)")


def sweep_questions(
    planner: Planner, question: Question, text: str, *, is_weak: bool = False
) -> tuple[tuple[str, Question], ...]:
    """A question for each value of ``name=value,value,...``; `is_weak`: of nodes, whose batch grows with them.

    Raises:
        QuestionError: the text is of another form, or a value is no value of that name.
    """
    name, separator, values = text.partition("=")
    if not separator or not values:
        raise QuestionError(f"--sweep {text!r}: write name=value,value,..., such as nodes=1,2,4,8")
    if is_weak and name != "nodes":
        raise QuestionError(f"--sweep {text!r} --weak: a batch grows with nodes; write --sweep nodes=1,2,4,8 --weak")
    questions = [(value, change(question, f"{name}={value}")) for value in values.split(",")]
    check_varied(name, f"--sweep {text!r}")
    if is_weak:
        rows = planner.program(question).batch_size
        questions = [(value, _with_rows_of(question, changed, rows)) for value, changed in questions]
    return tuple(questions)


@phase("planning the values of a sweep")
def sweep(planner: Planner, questions: Iterable[tuple[str, Question]]) -> tuple[Alternative, ...]:
    """A plan for each value."""
    return tuple(_alternative(planner, value, changed) for value, changed in questions)


def _with_rows_of(question: Question, changed: Question, rows: int) -> Question:
    """`changed` with as many rows per node as `question`, whose batch has so many."""
    before, nodes = question.cluster.num_nodes, changed.cluster.num_nodes
    if rows * nodes % before:
        raise QuestionError(
            f"--weak: {rows} rows on {before} nodes scale to no whole number of rows on {nodes}: choose another --batch"
        )
    return replace(changed, batch=rows * nodes // before)


def efficiencies(rows: Sequence[Alternative]) -> tuple[float, ...]:
    """Rows per second and device, relative to the first of these plans; 0.0 without a plan."""
    plans = [row.plan for row in rows]
    rates = [plan.samples_per_step / plan.step_time_s / plan.world_size if plan else 0.0 for plan in plans]
    first = next(filter(None, rates), 1.0)
    return tuple(rate / first for rate in rates)


@phase("pricing other choices")
def forced_choices(planner: Planner, question: Question, plan: Plan, budget_s: float) -> tuple[Alternative, ...]:
    """The usual alternatives to the decisions of `plan`, without its own number of device groups, while there is time
    for one more search as long as the longest; one that takes longer is stopped.
    """
    own = f"pipeline={plan.num_groups}" if plan.stages else "pipeline=1"
    rows: list[Alternative] = []
    started = before = time.perf_counter()
    longest_s = 0.0
    for text in (text for text in _constraints(question) if text != own):
        if before - started + longest_s > budget_s:
            rows.append(Alternative(text, problem=f"not searched: the {budget_s:g} s of --why-seconds ran out"))
            continue
        constraints = (*question.constraints, *text.split(", "))
        changed = replace(question, constraints=constraints)
        stopped = f"stopped: the {budget_s:g} s of --why-seconds ran out"
        rows.append(_alternative(planner, text, changed, started + budget_s, stopped))
        now = time.perf_counter()
        longest_s, before = max(longest_s, now - before), now
    return tuple(rows)


def faster(rows: Iterable[Alternative], plan: Plan) -> tuple[Alternative, ...]:
    """Those that a search would take rather than `plan`: one with fewer choices looks at more of them."""
    most_s = preferred_s(plan) * (1 - _ROUNDING)
    return tuple(row for row in rows if row.plan is not None and preferred_s(row.plan) < most_s)


def _constraints(question: Question) -> list[str]:
    """Constraints on what the user has left open, those first that differ most from what plans usually are.

    All but those on stages are without stages, unless the user says: a search without them takes a third of the time.
    """
    cluster = question.cluster
    given = {text.partition("=")[0].strip() for text in question.constraints}
    node = min(cluster.devices_per_node, cluster.world_size)
    texts = ["zero=3", "zero=0", "recompute=full", "recompute=none"]
    if node > 1:
        texts.insert(1, f"tensor={node}")
    if node % 4 == 0 and node > 4:
        texts.append(f"tensor={node // 4}")
    texts = [text for text in texts if text.partition("=")[0] not in given]
    if cluster.world_size > 1 and "pipeline" not in given:
        return [*(f"pipeline=1, {text}" for text in texts), "pipeline=1", "pipeline=2"]
    return texts
