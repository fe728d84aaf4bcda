"""What the caller of a parallel module gets of the values that its layers computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Executable
from autopar.lower.run.output_tensor import OutputTensor

__all__ = ["caller_outputs", "do_outputs_fit"]

Later = Callable[[str, Callable[[], Tensor]], Tensor]
"""``(name, gather)`` -> ``gather()``, when all ranks have come to read the output of that name."""


def caller_outputs(executor: Executor, values: Mapping[str, Tensor], later: Later | None = None) -> list[Tensor | None]:
    """The program's outputs in order; None where only other stages have one.

    Args:
        executor: that computed the values; `Executor.whole_outputs` says in what form the caller wants them.
        values: by name, this rank's parts.
        later: gather those that are not whole when the caller reads them.
    """
    names = executor.executable.program.outputs
    made = {name: _output(executor, name, values.get(name), later) for name in dict.fromkeys(names)}
    return [made[name] for name in names]


def do_outputs_fit(executable: Executable) -> bool:
    """Whether all outputs beside the loss fit whole into a device's memory, next to what the plan needs.

    The same on all ranks.
    """
    program, plan = executable.program, executable.plan
    others = {name for name in program.outputs if name != program.loss}
    whole_bytes = sum(program.type_of(name).num_bytes for name in others)
    return plan.peak_memory_bytes * (1 + plan.memory_error) + whole_bytes <= plan.memory_limit_bytes


def _output(executor: Executor, name: str, value: Tensor | None, later: Later | None) -> Tensor | None:
    program = executor.executable.program
    is_loss = name == program.loss
    is_done = executor.num_microbatches > 1 and is_loss
    if executor.stages.is_pipeline and (is_loss or not program.loss):
        return value
    if later is not None and executor.is_apart(name):
        return _read_later(executor, name, value, later)
    made = value if is_done or value is None else executor.make_output(name, value)
    return executor.share_across_groups(name, made) if executor.whole_outputs else made


def _read_later(executor: Executor, name: str, value: Tensor | None, later: Later) -> Tensor:
    wanted = executor.executable.program.type_of(name)
    dtype: torch.dtype = getattr(torch, wanted.dtype)
    is_differentiable = value is not None and value.requires_grad and not executor.stages.is_pipeline

    def gather() -> Tensor:
        with torch.set_grad_enabled(is_differentiable):
            whole = None if value is None else executor.join_devices(name, value)
            return executor.share_across_groups(name, whole)

    like = torch.empty((), dtype=dtype, device=executor.communicator.device).expand(wanted.shape)
    return OutputTensor.of(like.requires_grad_(is_differentiable), lambda: later(name, gather))
