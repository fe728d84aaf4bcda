"""The outputs of a trained model in eval mode, and with other values in its buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from autopar.objects.made_buffers import MadeBuffers
from autopar.planning.call_traces import ExampleInputs
from autopar.trace.structure import describe

__all__ = ["eval_outputs"]


@torch.no_grad()
def eval_outputs(model: nn.Module, batches: Sequence[ExampleInputs]) -> dict[str, Tensor]:
    """The floating-point outputs of `model` on each of `batches`, by a description; changes its buffers.

    It runs in eval mode, then in both modes with other values in all floating-point buffers (as from a checkpoint).
    """
    if hasattr(model, "whole_outputs"):
        model.whole_outputs = True  # pyright: ignore[reportArgumentType]  (of a parallel module)
    made_buffers = MadeBuffers(model)
    outputs = dict(_outputs(model.eval(), batches, "in eval mode"))
    made_buffers.forget()  # what they follow from is changed here
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(1.25).add_(0.0 if buffer.any() else 1 / 64)
    outputs.update(_outputs(model, batches, "in eval mode with other buffers"))
    outputs.update(_outputs(model.train(), batches, "in training mode with other buffers"))
    return outputs


def _outputs(model: nn.Module, batches: Sequence[ExampleInputs], when: str) -> Iterator[tuple[str, Tensor]]:
    for number, batch in enumerate(batches):
        returned = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        call = " without a target" if number else ""
        for index, x in enumerate(describe(returned)[1]):
            if x.is_floating_point():
                yield f"output {index} {when}{call}", x.detach().clone()
