"""Gradients of outputs other than the loss, where a step's backward is over when the caller gets its outputs.

With microbatches or stages, backward runs inside the forward call, from the loss that the model returns.  That a
caller's own loss reads other outputs (a penalty on logits, a distillation, a sum of several losses) is not known before
backward comes to one of them.  Then the step runs once more, by a plan whose backward begins with the caller's
gradients, and further steps with such inputs run by that plan alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import OutputError
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.run.execution import Executor
from autopar.program import Program

__all__ = ["SecondRun", "StepCall", "buffers_of", "runs_again", "same_tensors", "set_buffers"]

_LOGGER = logging.getLogger("autopar")


class StepCall(NamedTuple):
    """A call of a module, as it is made again.

    Args:
        kind: what it is, with a place for its number.
        args: the whole batch.
        kwargs: likewise.
        part: the submodule that is called; ``""``: the model.
        autocast: to which dtype it is autocast; None: to none.
    """

    kind: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    part: str = ""
    autocast: torch.dtype | None = None


def runs_again(executor: Executor) -> bool:
    """Whether a step of `executor` may have to run again: it has outputs that one device could differentiate, and its
    backward runs inside the call.
    """
    program = executor.executable.program
    if not (program.training and program.loss and torch.is_grad_enabled()) or executor.training_actions.is_single:
        return False
    late = (program.values[each.result] for each in program.late)
    others = (program.values[name] for name in program.outputs if name != program.loss)
    return any(value.requires_grad for value in (*others, *late))


class SecondRun:
    """What runs a step again; it holds the step's inputs, and the buffers that the step updates as they were."""

    def __init__(
        self,
        executor: Executor,
        tensors: Sequence[Tensor],
        run: Callable[[Sequence[Tensor]], list[Tensor | None]],
    ) -> None:
        """It is about to run for the first time.

        Args:
            executor: of the first run.
            tensors: its inputs.
            run: runs the step by another plan on those of these inputs that are its own, and gives its outputs.
        """
        self._store = executor.store
        self._program = executor.executable.program
        self._is_told = executor.communicator.rank == 0 and executor.is_random
        self._tensors = tensors
        self._versions = executor.store.versions()
        self._run = run
        self._buffers = buffers_of(executor.store, self._program)

    def __call__(self, given: Mapping[int, Tensor], sources: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The gradients of `sources` for gradients of outputs, by place; every rank calls it.

        Raises:
            OutputError: parameters have changed since.
            AutoparError: no plan whose backward begins with the caller's loss fits in memory.
        """
        if self._store.versions() != self._versions:
            names = ", ".join(self._program.outputs[place] for place in sorted(given))
            raise OutputError(
                f"a loss is computed from the outputs {names}, but parameters have changed since the call that "
                "returned them: call backward() before optimizer.step()"
            )
        if self._is_told:
            _LOGGER.warning(
                "the step runs again for the gradients of other outputs than the loss, and draws other random numbers "
                "(dropout) than when these outputs were computed; later steps run once"
            )
        now = buffers_of(self._store, self._program)
        set_buffers(self._store, self._buffers)
        try:
            with torch.enable_grad():
                outputs = self._run(self._tensors)
        finally:
            set_buffers(self._store, now)
        roots = [(_plain(outputs[place]), given[place]) for place in sorted(given)]
        untyped: Any = torch.autograd
        return list(
            untyped.grad([x for x, _ in roots], list(sources.values()), [g for _, g in roots], allow_unused=True)
        )


def same_tensors(names: Sequence[str], first: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of a second run: its own, but those of the first that get a gradient.

    Raises:
        OutputError: one of these has another shape (rows are padded).
    """
    for name, x, y in zip(names, first, own, strict=True):
        if x.requires_grad and x.shape != y.shape:
            raise OutputError(
                f"a loss is computed from other outputs than the loss, by which input {name!r} would get a gradient, "
                "but its rows were padded for this plan. Compute that loss in the model's forward, or pass a batch "
                "that the plan's devices and microbatches divide"
            )
    return [x if x.requires_grad else y for x, y in zip(first, own, strict=True)]


def _plain(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.whole() if isinstance(x, LateTensor) else x.full_tensor() if isinstance(x, DTensor) else x


def buffers_of(store: ParameterStore, program: Program) -> dict[str, Tensor]:
    """Copies of the buffers that a step of `program` updates."""
    return {name: store.buffer(name).clone() for name in map(program.parameters.__getitem__, program.updates)}


@torch.no_grad()
def set_buffers(store: ParameterStore, values: Mapping[str, Tensor]) -> None:
    """Write these values to buffers."""
    for name, value in values.items():
        store.buffer(name).copy_(value)
