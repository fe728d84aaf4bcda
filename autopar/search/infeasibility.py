"""What to say when nothing fits."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import InfeasibleError
from autopar.search.assembly import Choice, layer_costs

__all__ = ["describe_infeasible"]

_GIB = 2.0**30


def describe_infeasible(choices: Iterable[Choice], limit_bytes: float, notes: Iterable[str] = ()) -> InfeasibleError:
    """The error that names the smallest of `choices`, what fills it, and what would help."""
    needed, parts, choice = min(((*_fill(choice), choice) for choice in choices), key=lambda entry: entry[0])
    filling = ", ".join(f"{name} {size / _GIB:.6g}" for name, size in parts.items())
    blockers = "".join(f" ({note})" for note in notes if "microbatches" in note or "accumulation" in note)
    return InfeasibleError(
        f"no plan fits into {limit_bytes / _GIB:.6g} GiB per device: the smallest takes "
        f"{needed / _GIB:.6g} GiB "
        f"({filling} GiB) on {choice.world_size} devices with {choice.scene.num_microbatches} microbatches. "
        f"{_advise(parts, choice)}{blockers}"
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
