"""A step as the caller sees it: outputs at once, gradients in ``backward()``.

- With the loss in the program and several microbatches or stages, forward and backward of all microbatches run in the
  call; the loss that comes back carries their gradients, and its ``backward()`` hands them out, scaled by the gradient
  that it gets.
- Else the call runs the forward actions, and ``backward()`` of what the caller makes of the outputs runs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.lower.autograd import backward_token, call_function
from autopar.lower.compat import keeps_graph, local_part_of
from autopar.lower.run.execution import Executor
from autopar.lower.run.step_runner import BACKWARD, FORWARD, StepRunner, trained_parameters
from autopar.lower.run.tied_gradients import sum_over_groups

__all__ = ["release_later", "run_step"]

Gradients = Sequence[Tensor | None]


def run_step(executor: Executor, tensors: Sequence[Tensor], base_seed: int) -> dict[str, Tensor]:
    """Run one step; every rank calls it with the whole batch.

    Returns:
        Of outputs and updates the local parts, of the whole batch, on the group of the stage that computes them; those
        of `OutputLayouts.returned_whole` are whole and on every rank.
    """
    inputs = [tensors] * executor.num_microbatches
    if not (torch.is_grad_enabled() and _is_differentiable(executor, tensors)):
        step = StepRunner(executor, executor.forward_actions, inputs, base_seed)
        with torch.no_grad():
            step.run(FORWARD)
        if executor.store.host is not None:
            executor.store.host.finish()  # the caller may change parameters now
        with torch.no_grad():
            return executor.with_tail(step.values.results())
    step = StepRunner(executor, executor.training_actions, inputs, base_seed)
    step.begin()
    loss = executor.executable.program.loss
    with torch.enable_grad():
        if loss and not executor.training_actions.is_single:
            return _run_to_the_end(step, loss)
        step.run(FORWARD)
    results = step.values.results()
    values = executor.executable.program.values
    # With stages all ranks must agree, and this one may not have computed them.
    agreed = {name for name in executor.outputs.returned_whole if values[name].requires_grad}
    names = [
        name for name in results if name in (agreed if executor.stages.is_pipeline else step.values.differentiable)
    ]
    later = _BackwardHalf(step, names)
    outputs = _as_outputs([results[name] for name in names], later, list(later.sources.values()))
    return executor.with_tail(results | dict(zip(names, outputs, strict=True)))


def _is_differentiable(executor: Executor, tensors: Sequence[Tensor]) -> bool:
    if executor.stages.is_pipeline:  # decided by what all ranks know: this one may have nothing to train
        program = executor.executable.program
        return any(program.values[name].requires_grad for name in executor.outputs.returned_whole)
    return bool(trained_parameters(executor)) or any(x.requires_grad for x in tensors)


def _run_to_the_end(step: StepRunner, loss: str) -> dict[str, Tensor]:
    executor = step.executor
    results = _run_with_tail(step) if executor.executable.program.is_loss_late else _run_all(step, loss)
    step.end()
    gradients = step.gradients()
    if executor.stages.is_pipeline:
        sum_over_groups(step, gradients)
    gradients = _with_others(step, step.stored_gradients(gradients))
    sources = _sources(step)
    results[loss] = release_later(results[loss], [gradients.get(name) for name in sources], list(sources.values()))
    return results


def _run_all(step: StepRunner, loss: str) -> dict[str, Tensor]:
    """Forward and backward of all microbatches, whose losses add up."""
    executor = step.executor
    like = executor.executable.program.type_of(loss)
    dtype: torch.dtype = getattr(torch, like.dtype)
    step.values.expect({loss: torch.ones(like.shape, dtype=dtype, device=executor.communicator.device)})
    step.run(FORWARD | BACKWARD)
    with torch.no_grad():
        return executor.with_tail(step.values.results())


def _run_with_tail(step: StepRunner) -> dict[str, Tensor]:
    """The forwards of all microbatches, the tail on their sums, and all backwards with the gradients of these."""
    tail = step.executor.tail
    assert tail is not None
    step.run(FORWARD)
    results = step.values.results()
    made, gradients = tail.run_with_gradients(results)
    step.values.expect(gradients)
    step.run(BACKWARD)
    return results | made


def _sources(step: StepRunner) -> dict[str, Tensor]:
    """What the caller may want a gradient of, by name: inputs of the program and parameters."""
    return {**step.values.differentiable_inputs, **step.trained, **step.trained_elsewhere}


def _with_others(step: StepRunner, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """These, and gradients without elements of what gets its gradient on other ranks in this step."""
    program = step.executor.executable.program
    reached = {program.parameters[x] for x in step.values.differentiated if x in program.parameters}
    others = {name: p for name, p in step.trained_elsewhere.items() if name in reached}
    return gradients | {name: torch.zeros_like(p, requires_grad=False) for name, p in others.items()}


def _locals(gradients: Gradients) -> list[Tensor]:
    return [local_part_of(g) for g in gradients if g is not None]


# --- where the caller's backward enters


def release_later(loss: Tensor, gradients: Gradients, sources: Sequence[Tensor]) -> Tensor:
    """`loss` with a backward that gives `gradients` to `sources`, scaled by the gradient that comes in.

    Args:
        loss: a scalar outside autograd.
        gradients: one per source.
        sources: where they go; there may be none, and the loss is differentiable all the same.
    """
    return _as_outputs([loss], _Release(list(gradients)), sources)[0]


class _Release:
    """Gradients that wait for ``loss.backward()``; they can be taken once."""

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self._gradients: list[Tensor | None] | None = gradients

    def __call__(self, incoming: list[Tensor | None]) -> Gradients:
        """The gradients, times the one of the loss."""
        if self._gradients is None:
            raise AutoparError(
                "the gradients of this step were already released by an earlier backward(): with "
                "microbatches or pipeline stages, call the model again before each backward()"
            )
        gradients, self._gradients = self._gradients, None
        (scale,) = incoming
        assert scale is not None
        for local in _locals(gradients):
            local.mul_(scale.to(local))
        return gradients


class _BackwardHalf:
    """The backward actions of a step whose loss is the caller's."""

    def __init__(self, step: StepRunner, names: Sequence[str]) -> None:
        self.sources = _sources(step)
        self._step = step
        self._outputs = names
        self._has_run = False

    def __call__(self, incoming: list[Tensor | None]) -> Gradients:
        """The gradients of `sources` when these are those of the outputs."""
        step, executor = self._step, self._step.executor
        is_pipeline = executor.stages.is_pipeline
        if is_pipeline and self._has_run:
            raise AutoparError(
                "backward() has already run through the stages of this forward pass: call the model again before each "
                "backward(), or add the losses up and call it once"
            )
        self._has_run = True
        given = {name: g for name, g in zip(self._outputs, incoming, strict=True) if g is not None}
        incoming.clear()
        step.run_backward(given, keep_graph=keeps_graph() and not is_pipeline)
        step.end()
        gradients = step.gradients()
        if is_pipeline:
            sum_over_groups(step, gradients)
        gradients = _with_others(step, step.stored_gradients(gradients))
        return [gradients.get(name) for name in self.sources]


def _as_outputs(
    outputs: Sequence[Tensor], backward: Callable[[list[Tensor | None]], Gradients], sources: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """`outputs`, which are outside autograd, as if computed from `sources`; `backward` may empty the list that it gets.

    Two nodes, as autograd holds what it gives to a node until that is through: one takes the gradients of the outputs,
    which may be as large as logits, and the other runs the step's backward.
    """
    incoming: list[Tensor | None] = []
    anchor = torch.zeros((), requires_grad=True)  # there may be no source on this rank
    token = backward_token(lambda: (None, *backward(incoming)), anchor, *sources)
    return call_function(_Outputs, tuple(outputs), incoming, token)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: tuple[Tensor, ...], incoming: list[Tensor | None], token: Tensor) -> Any:
        ctx.incoming = incoming
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise AutoparError(
                "create_graph=True asks for gradients of a parallel model that have gradients themselves, which they "
                "don't have. Take torch.autograd.grad(..., create_graph=True) in the forward of a module around the "
                "model, let it return the loss, penalty included, and parallelize that module"
            )
        ctx.incoming[:] = gradients
        return None, None, torch.zeros(())
