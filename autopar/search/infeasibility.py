"""The error for a model that no plan fits into memory: the smallest plan, and what uses its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.errors import InfeasibleError
from autopar.plan import Decisions
from autopar.search.chain.single_stage import SingleStagePaths
from autopar.search.pipeline.pipeline_candidates import PipelineCandidate
from autopar.search.search_context import SearchContext
from autopar.search.settings.request import SearchRequest
from autopar.step.costs.plan_collectives import step_collectives
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.pricing import layer_costs
from autopar.step.simulation.step_memory import peak_bytes, step_memory

__all__ = ["describe_infeasible"]

_GIB = 2.0**30
_WALKED = 4  # of the smallest paths of each number of microbatches: up to 0.1 s each, and most need the same memory


def describe_infeasible(
    searched: Sequence[SingleStagePaths],
    limit_bytes: float,
    request: SearchRequest,
    notes: Iterable[str] = (),
    smallest: PipelineCandidate | None = None,
) -> InfeasibleError:
    """The error that names the smallest plan without stages of those that were searched, what fills it, and what would
    help.

    `limit_bytes` is what the user allows.  `smallest` is the smallest of the pipelines that were considered, if any.
    """
    known = _smallest(searched, 1 + request.memory_error)
    pipeline = f"with {_describe_pipeline(smallest)}" if smallest else "no pipeline was considered"
    if known is None:
        return InfeasibleError(
            f"no plan fits into {limit_bytes / _GIB:.6g} GiB per device: {pipeline}, so a step would run out of "
            "memory. Use more devices or microbatches, a smaller batch, or leave out constraints on the pipeline"
        )
    needed, parts, decisions = known
    has_rows = searched[0].candidates.context.program.batch_size > decisions.num_microbatches
    filling = ", ".join(f"{name} {size / _GIB:.6g}" for name, size in parts.items())
    blockers = "".join(f" ({note})" for note in notes if "microbatches" in note or "accumulation" in note)
    return InfeasibleError(
        f"no plan fits into {limit_bytes / _GIB:.6g} GiB per device: the smallest needs "
        f"{needed / _GIB:.6g} GiB "
        f"({filling} GiB) on {decisions.world_size} devices with {decisions.num_microbatches} microbatches, and would "
        f"run out of memory. {_advise(parts, has_rows)}{blockers}" + (f" ({pipeline})" if smallest else "")
    )


def _describe_pipeline(pipeline: PipelineCandidate) -> str:
    shape = pipeline.shape
    return (
        f"{shape.num_stages} pipeline stages on {shape.num_groups} device groups, {shape.num_microbatches} "
        f"microbatches and {shape.schedule} the largest stage needs {pipeline.peak_bytes / _GIB:.6g} GiB"
    )


def _smallest(searched: Iterable[SingleStagePaths], error: float) -> tuple[float, dict[str, float], Decisions] | None:
    """The bytes with which a plan is sure to be found, what fills them, and its decisions.

    The bytes are the estimate of the search or those of the simulated step, whichever is more, times `error`, because
    predictions may be off.
    """
    best: tuple[float, dict[str, float], Decisions] | None = None
    for paths in searched:
        context = paths.candidates.context
        for path in paths.front[:_WALKED]:
            if best is not None and error * paths.pool.peak_bytes[path] >= best[0]:
                break
            decisions = paths.decisions(path)
            layers = PlannedLayers(context.program, decisions, context.facts)
            parts = _fill(layers, context)
            (walk,) = step_memory(layers, context.request.training, None)
            needed = error * max(sum(parts.values()), peak_bytes(walk))
            best = (needed, parts, decisions) if best is None or needed < best[0] else best
    return best


def _fill(layers: PlannedLayers, context: SearchContext) -> dict[str, float]:
    training = context.request.training
    costs = layer_costs(layers, step_collectives(layers, training), context.prices, training)
    return {
        "batch": training.batch_bytes(context.program),
        "parameters": sum(cost.parameter_bytes for cost in costs),
        "gradients": sum(cost.gradient_bytes for cost in costs),
        "optimizer": sum(cost.optimizer_bytes for cost in costs),
        "activations": sum(cost.saved_bytes for cost in costs),
        "transients": max(cost.transient_bytes for cost in costs),
    }


def _advise(parts: dict[str, float], has_rows: bool) -> str:
    states = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    if states >= parts["activations"] + parts["transients"]:
        return (
            "Parameters, gradients and optimizer state use most of it: use more devices or a smaller optimizer state."
        )
    if has_rows:
        return "Activations use most of it: use a smaller batch, a shorter sequence or more devices."
    return "Activations use most of it: use a shorter sequence or more devices."
