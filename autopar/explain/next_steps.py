"""What to try next, from what binds a plan: each a sentence with the option to type."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.explain.alternatives import Alternative, faster
from autopar.explain.explanation import FULL, Explanation
from autopar.explain.planner import Answer
from autopar.pages.shapes import size

__all__ = ["next_steps"]

_MOST_SLOWER = 0.05  # a runner-up that is slower by less is worth a look where it needs less memory
_LESS_MEMORY = 0.9  # of the plan's peak
_MOST = 0.8  # of the step
_LITTLE = 0.02  # of the step
_MANY = 0.1  # of the step: less of it is no reason to change anything


def next_steps(answer: Answer, explanation: Explanation, forced: tuple[Alternative, ...] = ()) -> Iterator[str]:
    """What could make the step faster, or smaller, most promising first."""
    plan, question = answer.plan, answer.question
    for row in faster(forced, plan):
        yield (
            f"{row.change} is faster than the plan, and the search did not consider it: "
            f"{' '.join(f'--constraint {text}' for text in row.change.split(', '))}."
        )
    for name, times in plan.prediction.speedups:
        yield f"The model computes in float32; {name} is {times:.2g}x as fast by estimate: --precision {name}."
    faster_kinds = [runner for runner in explanation.runners_up if runner.loses < 0 and runner.is_simulated]
    if not plan.compiled and any("compiled" in runner.what for runner in faster_kinds):
        gain = -min(runner.loses for runner in faster_kinds)
        yield f"Compiling makes the step {gain:.1%} faster, too little for the search to choose it: --compile does so."
    total = plan.step_time_s or 1.0
    shares = {name: seconds / total for name, seconds in plan.prediction.summary(plan.num_groups).items()}
    if shares.get("exposed communication", 0.0) >= _MANY:
        link = "inter" if question.cluster.num_nodes > 1 else "intra"
        rate = question.cluster.between if question.cluster.num_nodes > 1 else question.cluster.within
        twice = 2 * rate.gather_bytes_per_s / 1e9
        yield (
            f"Exposed communication is {shares['exposed communication']:.0%} of the step. To see the gain of twice "
            f"the bandwidth: --what-if link.{link}={twice:.0f}GB/s; of larger batches: --what-if batch="
            f"{2 * plan.samples_per_step}."
        )
    if shares.get("waiting in the pipeline", 0.0) >= _MANY:
        yield (
            f"Devices wait in the pipeline for {shares['waiting in the pipeline']:.0%} of the step. More microbatches "
            f"shorten that: --what-if batch={2 * plan.samples_per_step}; so do fewer device groups: --constraint "
            f"pipeline={max(1, plan.num_groups // 2)}."
        )
    if explanation.memory_share > FULL:
        yield (
            f"Memory is {explanation.memory_share:.0%} full and limits the plan. To see the gain of more: --what-if "
            f"memory={2 * plan.memory_limit_bytes / 2**30:.0f}GiB."
        )
    if shares.get("compute", 0.0) >= _MOST and question.cluster.world_size > 1:
        recomputes = shares.get("recompute", 0.0) >= _LITTLE
        less = "less recomputation (more memory), " if recomputes else ""
        nodes = question.cluster.num_nodes
        yield (
            f"{shares['compute']:.0%} of the step is compute: only {less}a lower precision or more devices make it "
            f"faster. To see how it scales: --sweep nodes={nodes},{2 * nodes} --weak."
        )
    for runner in explanation.runners_up:
        small = runner.peak_memory_bytes < _LESS_MEMORY * plan.peak_memory_bytes
        if small and runner.is_simulated and runner.loses <= _MOST_SLOWER:
            yield (
                f"{runner.what} needs {size(runner.peak_memory_bytes).text} instead of "
                f"{size(plan.peak_memory_bytes).text} and is {runner.loses:.1%} slower: --memory "
                f"{runner.peak_memory_bytes * 1.01 / 2**30:.3g}GiB finds it, or a better one."
            )
            break
