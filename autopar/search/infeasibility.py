"""What to say when nothing fits."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import InfeasibleError
from autopar.search.assembly import Choice, layer_costs
from autopar.search.stages.solve import Staged

__all__ = ["describe_infeasible"]

_GIB = 2.0**30


def describe_infeasible(
    choices: Iterable[Choice], limit_bytes: float, notes: Iterable[str] = (), smallest: Staged | None = None
) -> InfeasibleError:
    """The error that names the smallest of `choices`, what fills it, and what would help.

    `smallest` is the smallest of the pipelines that were considered, if any.
    """
    choices = list(choices)
    pipeline = f"with {_describe_pipeline(smallest)}" if smallest else "no pipeline was considered"
    if not choices:
        return InfeasibleError(
            f"no plan fits into {limit_bytes / _GIB:.6g} GiB per device: {pipeline}. Use more devices or microbatches, "
            "a smaller batch, or leave out constraints on the pipeline"
        )
    needed, parts, choice = min(((*_fill(choice), choice) for choice in choices), key=lambda entry: entry[0])
    filling = ", ".join(f"{name} {size / _GIB:.6g}" for name, size in parts.items())
    blockers = "".join(f" ({note})" for note in notes if "microbatches" in note or "accumulation" in note)
    return InfeasibleError(
        f"no plan fits into {limit_bytes / _GIB:.6g} GiB per device: the smallest takes "
        f"{needed / _GIB:.6g} GiB "
        f"({filling} GiB) on {choice.world_size} devices with {choice.scene.num_microbatches} microbatches. "
        f"{_advise(parts, choice)}{blockers}" + (f" ({pipeline})" if smallest else "")
    )


def _describe_pipeline(staged: Staged) -> str:
    shape = staged.shape
    return (
        f"{shape.num_stages} pipeline stages on {shape.num_groups} device groups, {shape.num_microbatches} "
        f"microbatches and {shape.schedule} the largest stage takes {staged.peak_bytes / _GIB:.6g} GiB"
    )


def _fill(choice: Choice) -> tuple[float, dict[str, float]]:
    costs = layer_costs(choice)
    parts = {
        "parameters": sum(cost.parameter_bytes for cost in costs),
        "gradients": sum(cost.gradient_bytes for cost in costs),
        "optimizer": sum(cost.optimizer_bytes for cost in costs),
        "activations": sum(cost.saved_bytes for cost in costs),
        "transients": max(cost.transient_bytes for cost in costs),
    }
    return sum(parts.values()), parts


def _advise(parts: dict[str, float], choice: Choice) -> str:
    states = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    if states >= parts["activations"] + parts["transients"]:
        return "Parameters and what belongs to them fill most: use more devices or a smaller optimizer state."
    if choice.num_samples > choice.scene.num_microbatches:
        return "Activations fill most: use a smaller batch, a shorter sequence or more devices."
    return "Activations fill most: use a shorter sequence or more devices."
