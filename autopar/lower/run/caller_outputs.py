"""What the caller of a parallel module gets of the values that its layers computed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.lower.run.execution import Executor

__all__ = ["caller_outputs"]


def caller_outputs(executor: Executor, values: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The program's outputs in order; None where only other stages have one.

    Args:
        executor: that computed the values; `Executor.whole_outputs` says in what form the caller wants them.
        values: by name, this rank's parts.
    """
    names = executor.executable.program.outputs
    made = {name: _output(executor, name, values.get(name)) for name in dict.fromkeys(names)}
    return [made[name] for name in names]


def _output(executor: Executor, name: str, value: Tensor | None) -> Tensor | None:
    program = executor.executable.program
    is_loss = name == program.loss
    is_done = executor.num_microbatches > 1 and is_loss
    if executor.stages.is_pipeline and (is_loss or not program.loss):
        return value
    made = value if is_done or value is None else executor.make_output(name, value)
    return executor.share_across_groups(name, made) if executor.whole_outputs else made
