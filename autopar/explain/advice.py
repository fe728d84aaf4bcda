"""A recommendation in ten lines: the plan, why, the next best, what would help, and how to run it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from autopar.explain.alternatives import Alternative, alternative_before
from autopar.explain.explanation import Explanation, explain
from autopar.explain.parallel_calls import call_in_parallel
from autopar.explain.planner import Answer, Planner
from autopar.explain.question import Question
from autopar.pages.shapes import milliseconds
from autopar.plan.headline import describe_gap
from autopar.planning.arguments import read_bytes

__all__ = ["Advice", "advice_lines", "advise"]

_MARGIN = 11
_MOST_RUNNERS = 2
# Less than this share is within the error of predicted steps (4.6 % on published runs): the change is no reason to buy.
_WORTH_IT = 0.01


@dataclass(frozen=True, eq=False)
class Advice:
    """A plan and what it would gain by twice as much of what is given.

    Args:
        recipe: the line of a script that makes the model and its inputs.
        answer: the plan.
        explanation: why it is so.
        helps: the plans for twice the memory, the links' rate and the batch.
    """

    recipe: str
    answer: Answer
    explanation: Explanation
    helps: tuple[Alternative, ...]


def advise(planner: Planner, question: Question, budget_s: float) -> Advice:
    """Plan, and plan again for what could help, as long as those searches begin in the first `budget_s` after that.

    Those searches keep the plan's number of device groups, so they take a third of the time, and gains are at least
    what they find.

    Raises:
        InfeasibleError: nothing fits.
        AutoparError: the target or the question can't be used.
    """
    answer = planner.answer(question)
    same_groups = question
    if question.cluster.world_size > 1 and not any(text.startswith("pipeline") for text in question.constraints):
        groups = f"pipeline={answer.plan.num_groups if answer.plan.stages else 1}"
        same_groups = replace(question, constraints=(*question.constraints, groups))
    deadline = time.perf_counter() + budget_s
    searches = [
        partial(alternative_before, planner, same_groups, text, deadline)
        for text in _doubled(question, answer.plan.samples_per_step)
    ]
    helps = call_in_parallel(searches[0], searches[1:]) if budget_s > 0 else []
    return Advice(planner.model(question).recipe, answer, explain(answer), tuple(helps))


def _doubled(question: Question, rows: int) -> Iterator[str]:
    """Twice of each given value, as `change` reads it; the longest search comes last."""
    cluster = question.cluster
    limit = read_bytes(question.memory) if question.memory is not None else cluster.device.usable_memory_bytes
    yield f"memory={2 * limit / 2**30:.4g}GiB"
    if cluster.world_size > 1:
        name, link = ("inter", cluster.between) if cluster.num_nodes > 1 else ("intra", cluster.within)
        yield f"link.{name}={2 * link.gather_bytes_per_s / 1e9:.4g}GB/s"
    yield f"batch={2 * rows}"


def advice_lines(advice: Advice, saved: str | None) -> Iterator[str]:
    """Ten lines, and fewer on one device; `saved` is the path that the plan was written to."""
    plan, explanation = advice.answer.plan, advice.explanation
    yield plan.headline.replace("see table; ", "")  # there is none here
    sources = ", ".join(f"{name} {share:.0%}" for name, share in explanation.sources if share)
    devices = f"{plan.world_size} x {plan.device}"
    step = f"{milliseconds(plan.step_time_s).text} ms for {plan.samples_per_step} rows on {devices}"
    yield _labeled("step", f"{step}; {describe_gap(plan.optimality_gap)}; prices: {sources or 'none'}")
    yield _labeled("because", explanation.binds)
    for place, runner in enumerate(explanation.runners_up[:_MOST_RUNNERS]):
        note = "" if runner.is_simulated else ", a sum without overlap"
        yield _labeled("" if place else "next best", f"{runner.what} (step {runner.loses:+.1%}{note})")
    yield _labeled("would help", _what_helps(advice))
    yield from _script(advice, saved)


def _labeled(label: str, text: str) -> str:
    return f"{label:{_MARGIN}}{text}"


def _what_helps(advice: Advice) -> str:
    """The changes by how much faster each device would be, most first."""
    plan = advice.answer.plan
    gains = [(f"precision={name}", speedup - 1) for name, speedup in plan.prediction.speedups]
    rate = plan.samples_per_step / plan.step_time_s
    gains += [
        (row.change, row.plan.samples_per_step / row.plan.step_time_s / rate - 1) for row in advice.helps if row.plan
    ]
    parts = [
        f"{text} {gain:+.1%} rows/s" for text, gain in sorted(gains, key=lambda pair: -pair[1]) if gain >= _WORTH_IT
    ]
    little = [text for text, gain in gains if gain < _WORTH_IT]
    if little:
        parts.append(f"less than {_WORTH_IT:.0%}: {', '.join(little)}")
    problems: dict[str, list[str]] = {}
    for row in advice.helps:
        if row.plan is None:
            problems.setdefault(row.problem, []).append(row.change)
    parts += [f"{', '.join(changes)}: {problem}" for problem, changes in problems.items()]
    return " · ".join(parts) or "not searched"


def _script(advice: Advice, saved: str | None) -> Iterator[str]:
    """The command, and what the script has for it."""
    question = advice.answer.question
    cluster, device = question.cluster, json.dumps(question.cluster.device.type)
    nodes = f"--nnodes {cluster.num_nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    where = nodes if cluster.num_nodes > 1 else "--standalone"
    yield _labeled(
        "run", f"torchrun {where} --nproc-per-node {cluster.devices_per_node} train.py    # with these lines:"
    )
    yield f"dist.init_process_group(); mesh = init_device_mesh({device}, ({cluster.world_size},))"
    yield advice.recipe
    yield f"model = autopar.parallelize(model, mesh, inputs{''.join(_arguments(question, saved))})"


def _arguments(question: Question, saved: str | None) -> Iterable[str]:
    """What `parallelize` has to be told so that it runs this plan."""
    given: dict[str, object] = {"precision": question.precision}
    if question.optimizer != "adamw":
        given["optimizer"] = question.optimizer
    if saved is not None:
        given["plan"] = saved
    else:
        given |= {
            "memory": question.memory, "constraints": list(question.constraints) or None,
            "compile": question.compile, "imbalance": question.imbalance, "documents": question.documents,
        }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            yield f", {name}={value!r}"
