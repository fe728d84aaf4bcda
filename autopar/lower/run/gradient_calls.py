"""The call that gives gradients of another call's inputs, where these have gradients themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import (
    AutoparError,
    ConstraintError,
    ExampleInputsError,
    InfeasibleError,
    OutputError,
    TraceError,
)
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.run.execution import Executor
from autopar.lower.run.second_run import StepCall, buffers_of, set_buffers
from autopar.objects.gradient_requests import GradientRequest, with_request

__all__ = ["GradientCall", "gradients_refused"]

_WHAT = "create_graph=True asks for gradients of a parallel model that have gradients themselves"
_INSTEAD = (
    "take torch.autograd.grad(..., create_graph=True) in the forward of a module around the model, let it return the "
    "loss, penalty included, and parallelize that module"
)


class GradientCall:
    """Of one call; it holds the buffers that the call updates as they were, and must be made before the call runs."""

    def __init__(
        self, executor: Executor, tensors: Sequence[Tensor], call: StepCall, run: Callable[[Mapping[str, Any]], Any]
    ) -> None:
        """Nothing has run.

        Args:
            executor: of the call.
            tensors: its inputs.
            call: itself.
            run: calls the model with the call's arguments, but with these keyword arguments.
        """
        self._executor = executor
        self._tensors = tensors
        self._call = call
        self._run = run
        self._versions = executor.store.versions()
        self._buffers = buffers_of(executor.store, executor.executable.program)

    def __call__(self, incoming: Mapping[int, Tensor], wanted: Sequence[int]) -> list[Tensor | None]:
        """The gradients, with a graph, of the inputs at the places `wanted`, where those of outputs are `incoming`.

        Every rank calls it.

        Raises:
            OutputError: parameters have changed since the call.
            AutoparError: there is no such program.
        """
        self._check()
        store, device = self._executor.store, self._executor.communicator.device
        program, autocast = self._executor.executable.program, self._call.autocast
        kwargs = with_request(self._call.kwargs, GradientRequest(incoming, wanted))
        now = buffers_of(store, program)
        set_buffers(store, self._buffers)
        try:
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                made = self._run(kwargs)
        except (TraceError, ExampleInputsError, ConstraintError, InfeasibleError) as error:
            raise type(error)(f"{_WHAT}, and there is no program of these: {error}") from error
        finally:
            set_buffers(store, now)
        return [_like(self._tensors[place], x) for place, x in zip(wanted, made, strict=True)]

    def _check(self) -> None:
        if self._executor.stages.is_pipeline:
            raise AutoparError(
                f"{_WHAT}, which they don't have with pipeline stages: plan without ('pipeline=1'). Or {_INSTEAD}"
            )
        if self._executor.is_random:
            raise AutoparError(
                f"{_WHAT}, but the model draws random numbers (dropout, noise), and the program that computes them "
                "would draw others: draw noise outside and pass it to the call, or set dropout probabilities to 0"
            )
        if self._executor.store.versions() != self._versions:
            raise OutputError(f"{_WHAT}, but parameters have changed since the call: take them before optimizer.step()")


def _like(x: Tensor, gradient: Tensor | None) -> Tensor | None:
    """`gradient`, whole, with rows of zeros where `x` was padded."""
    whole = gradient.whole() if isinstance(gradient, LateTensor) else gradient
    if whole is None or whole.shape == x.shape:
        return whole
    for dim, (own, size) in enumerate(zip(whole.shape, x.shape, strict=True)):
        rest = whole.new_zeros((*whole.shape[:dim], size - own, *whole.shape[dim + 1 :]))
        whole = torch.cat([whole, rest], dim)
    return whole


def gradients_refused() -> AutoparError:
    """The error of a backward that wants such gradients of something else."""
    return AutoparError(
        f"{_WHAT}. Those of its inputs do (without inputs='local' and outputs='local'), but not those of parameters: "
        f"{_INSTEAD}; with torch.compile, compile a function that does so, after "
        "torch._dynamo.config.trace_autograd_ops = True"
    )
