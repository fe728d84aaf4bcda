"""Outputs that are computed when the caller reads them: `Program.late`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import OutputError
from autopar.lower.autograd import refuse_gradient
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.kernels import run_ops
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.run.execution import Executor
from autopar.program import LateOutput

__all__ = ["LateReader", "with_late_outputs"]


@dataclass(frozen=True)
class LateReader:
    """How a late output comes to be.

    Args:
        read: ``(name, check, compute)`` -> ``compute()``, when all ranks have come to read the output of that name, and
            ``check()`` raises on none.
        whole: a parameter by its name in the module, whole; all ranks call it.
        with_gradient: ``(place, output)`` -> the output, with a gradient (`autopar.lower.run.run_step.StepResults`);
            None: there is none to be had.
    """

    read: Callable[[str, Callable[[], None], Callable[[], Tensor]], Tensor]
    whole: Callable[[str], Tensor]
    with_gradient: Callable[[int, Tensor], Tensor] | None = None


def with_late_outputs(
    executor: Executor, outputs: Sequence[Tensor | None], store: ParameterStore, reader: LateReader
) -> list[Tensor | None]:
    """The outputs with late ones in place of what they are computed from."""
    made = list(outputs)
    for late in executor.executable.program.late:
        source = made[late.place]
        made[late.place] = None if source is None else _late(executor, late, source, store, reader)
    return made


def _late(executor: Executor, late: LateOutput, source: Tensor, store: ParameterStore, reader: LateReader) -> Tensor:
    program, device = executor.executable.program, executor.communicator.device
    value = program.values[late.result]
    made = {name for op in late.ops for name in op.results}
    given = late.ops[0].operands[0]
    names = tuple(dict.fromkeys(n for op in late.ops for n in op.operands if n not in made and n != given))
    members = {name: program.parameters[name] for name in names}
    versions = store.versions()
    is_recorded = torch.is_grad_enabled() and value.requires_grad

    def check() -> None:
        if versions != store.versions():
            raise OutputError(
                f"output {late.result!r} is computed when it is read (this plan makes logits in pieces of "
                f"{program.piece_tokens} tokens), but parameters have changed since the call that returned it: read it "
                "before optimizer.step(), or plan with the constraint 'logits=whole'"
            )

    def compute() -> Tensor:
        hidden = source.whole() if isinstance(source, LateTensor) else source

        def run() -> Tensor:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                whole = {
                    name: reader.whole(member).to(device=device, dtype=getattr(torch, program.type_of(name).dtype))
                    for name, member in members.items()
                }
                return run_ops(late.ops, {given: hidden.detach(), **whole})[late.result]

        output = reader.read(late.result, check, run)
        if not (is_recorded and torch.is_grad_enabled()):
            return output
        if reader.with_gradient is not None:
            return reader.with_gradient(late.place, output)
        return refuse_gradient(output, _no_gradient(late.result))

    # Rows may be this rank's own.
    shape = (*source.shape[:1], *value.type.shape[1:]) if source.dim() == len(value.type.shape) else value.type.shape
    dtype: torch.dtype = getattr(torch, value.type.dtype)
    like = torch.empty((), dtype=dtype, device=device).expand(shape)
    return LateTensor.of(like.requires_grad_(is_recorded), compute)


def _no_gradient(name: str) -> OutputError:
    return OutputError(
        f"a loss is computed from the output {name!r}, of which this plan has no gradients: it makes logits in "
        "pieces of tokens, forward and backward together, and ranks pass their own rows. Compute that loss in the "
        "model's forward"
    )
