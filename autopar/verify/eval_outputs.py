"""The outputs of a trained model in eval mode, and with other values in its buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from autopar.planning.call_traces import ExampleInputs
from autopar.trace.calls.structure import describe

__all__ = ["eval_outputs"]


@torch.no_grad()
def eval_outputs(
    model: nn.Module, batches: Sequence[ExampleInputs], fresh: nn.Module | None = None
) -> dict[str, Tensor]:
    """The floating-point outputs of `model` on each of `batches`, by a description; changes its buffers.

    It runs in eval mode, then in both modes with other values in all floating-point buffers (as from a checkpoint).  If
    given, `fresh` is a copy of the model that was not called yet, which has made no tables of its buffers: it runs with
    the others.
    """
    if hasattr(model, "whole_outputs"):
        model.whole_outputs = True  # pyright: ignore[reportArgumentType]  (of a parallel module)
    outputs = dict(_outputs(model.eval(), batches, "in eval mode"))
    if fresh is not None:
        _copy_values(model, fresh)
        model = fresh.eval()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(1.25).add_(0.0 if buffer.any() else 1 / 64)
    outputs.update(_outputs(model, batches, "in eval mode with other buffers"))
    outputs.update(_outputs(model.train(), batches, "in training mode with other buffers"))
    return outputs


def _copy_values(model: nn.Module, fresh: nn.Module) -> None:
    values = dict(chain(model.named_parameters(), model.named_buffers()))
    for name, own in chain(fresh.named_parameters(), fresh.named_buffers()):
        if own.shape == values[name].shape:  # else a table that grows
            own.copy_(values[name])


def _outputs(model: nn.Module, batches: Sequence[ExampleInputs], when: str) -> Iterator[tuple[str, Tensor]]:
    for number, batch in enumerate(batches):
        returned = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        call = " without a target" if number else ""
        for index, x in enumerate(describe(returned)[1]):
            if x.is_floating_point():
                yield f"output {index} {when}{call}", x.detach().clone()
