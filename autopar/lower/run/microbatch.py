"""Several microbatches per step without a pipeline: forward and backward of each at once (gradient accumulation)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.lower.compat import run_backward
from autopar.lower.run.execution import Executor
from autopar.lower.run.step import StepGradients, release_later, trained_parameters

__all__ = ["join_microbatches", "run_microbatches"]


def run_microbatches(executor: Executor, tensors: Sequence[Tensor], base_seed: int) -> dict[str, Tensor]:
    """Run all microbatches of one step.

    Under grad mode their backward passes run here, too, and the loss that is returned carries their gradients: its
    backward releases them, scaled by the gradient that it gets.  Other outputs carry no gradient.

    Returns:
        Outputs (local parts in their own layouts, of the whole batch) and updates; the loss is whole.
    """
    program = executor.executable.program
    parameters = trained_parameters(executor)
    with_gradients = torch.is_grad_enabled() and bool(parameters)
    step = StepGradients(executor) if with_gradients else None
    found: list[dict[str, Tensor]] = []
    for microbatch in range(executor.num_microbatches):
        if step is not None:
            step.is_last = microbatch == executor.num_microbatches - 1
        values = executor.run(tensors, base_seed, microbatch, step.open_layer if step else None)
        values[program.loss] = executor.make_whole(program.loss, values[program.loss])
        if step is not None:
            run_backward(values[program.loss])
            step.finish_microbatch(executor.stages.ranges[0])
        executor.update_buffers_of_microbatch(values)
        found.append({name: value.detach() for name, value in values.items()})
    joined = {
        name: join_microbatches(executor, name, [values.pop(name) for values in found]) for name in tuple(found[0])
    }
    if step is not None:
        gradients = step.gradients(parameters)
        joined[program.loss] = release_later(joined[program.loss], gradients, list(parameters.values()))
    return joined


def join_microbatches(executor: Executor, name: str, parts: list[Tensor], *, are_whole: bool = False) -> Tensor:
    """The microbatches' parts of an output as one: terms add up, slices are laid side by side.

    The parts lie as the program puts them out, unless they `are_whole`.
    """
    time = executor.lies[name].time
    if time.kind == "P":
        return torch.stack(parts).sum(0)
    if not time.is_shard:
        return parts[-1]
    # The slices of devices and microbatches interleave, so what is to be plain is gathered along that dim first.
    if not are_whole and not executor.stays_cut(name):
        parts = [executor.gather_along(name, part, time.dim) for part in parts]
    return torch.cat(parts, time.dim)
