"""A step as the caller sees it: outputs at once, gradients in ``backward()``.

- With the loss in the program and several microbatches or stages, forward and backward of all microbatches run in the
  call; the loss that comes back carries their gradients, and its ``backward()`` hands them out, scaled by the gradient
  that it gets.  If a gradient of another output comes, the step runs again (`autopar.lower.run.second_run`).
- Else the call runs the forward actions, and ``backward()`` of what the caller makes of the outputs runs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.lower.autograd import backward_token, call_untraced
from autopar.lower.compat import keeps_graph, local_part_of
from autopar.lower.run.execution import Executor
from autopar.lower.run.gradient_calls import gradients_refused
from autopar.lower.run.step_runner import BACKWARD, FORWARD, StepRunner, trained_parameters
from autopar.lower.run.tied_gradients import sum_over_groups

__all__ = ["RunAgain", "StepResults", "release_later", "run_step"]

Gradients = Sequence[Tensor | None]
RunAgain = Callable[[Mapping[int, Tensor], Mapping[str, Tensor]], Gradients]
"""``(gradients, sources)`` -> the gradients of these sources, where those are of outputs, by their places in
`Program.outputs`."""


class StepResults(NamedTuple):
    """What a step gives.

    Args:
        values: of outputs and updates the local parts, of the whole batch, on the group of the stage that computes
            them; those of `OutputLayouts.returned_whole` are whole and on every rank.
        with_gradient: ``(place, output)`` -> that output, outside autograd till then, with a backward that runs the
            step again; None if no step can or needs to.
    """

    values: dict[str, Tensor]
    with_gradient: Callable[[int, Tensor], Tensor] | None = None


def run_step(
    executor: Executor, tensors: Sequence[Tensor], base_seed: int, again: RunAgain | None = None
) -> StepResults:
    """Run one step; every rank calls it with the whole batch.

    `again` runs it once more if its backward is over when a gradient of another output than the loss comes.
    """
    inputs = [tensors] * executor.num_microbatches
    if not (torch.is_grad_enabled() and _is_differentiable(executor, tensors)):
        step = StepRunner(executor, executor.forward_actions, inputs, base_seed)
        with torch.no_grad():
            step.run(FORWARD)
        if executor.store.host is not None:
            executor.store.host.finish()  # the caller may change parameters now
        with torch.no_grad():
            return StepResults(executor.with_tail(step.values.results()))
    step = StepRunner(executor, executor.training_actions, inputs, base_seed)
    step.begin()
    loss = executor.executable.program.loss
    with torch.enable_grad():
        if loss and not executor.training_actions.is_single:
            return _run_to_the_end(step, loss, again)
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
    return StepResults(executor.with_tail(results | dict(zip(names, outputs, strict=True))))


def _is_differentiable(executor: Executor, tensors: Sequence[Tensor]) -> bool:
    if executor.stages.is_pipeline:  # decided by what all ranks know: this one may have nothing to train
        program = executor.executable.program
        return any(program.values[name].requires_grad for name in executor.outputs.returned_whole)
    return bool(trained_parameters(executor)) or any(x.requires_grad for x in tensors)


def _run_to_the_end(step: StepRunner, loss: str, again: RunAgain | None) -> StepResults:
    executor = step.executor
    results = _run_with_tail(step) if executor.executable.program.is_loss_late else _run_all(step, loss)
    step.end()
    gradients = step.gradients()
    if executor.stages.is_pipeline:
        sum_over_groups(step, gradients)
    gradients = _with_others(step, step.stored_gradients(gradients))
    sources = _sources(step)
    ended = _Ended([gradients.get(name) for name in sources], again and (lambda given: again(given, sources)))
    place = executor.executable.program.outputs.index(loss)
    with_gradient = partial(_with_gradient, ended, _token(ended, list(sources.values())))
    results[loss] = with_gradient(place, results[loss])
    ended.loss_place = place
    return StepResults(results, None if again is None else with_gradient)


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
    """What the caller may want a gradient of, by name: inputs of the program and parameters.

    With stages, parameters are in one order on all ranks: hooks on them run in it, and may read whole gradients.
    """
    parameters = {**step.trained, **step.trained_elsewhere}
    if step.executor.stages.is_pipeline:
        store = step.executor.store
        places = {name: place for place, name in enumerate(store.stored)}
        order = sorted(parameters, key=lambda name: places[store.first_name.get(name, name)])
        parameters = {name: parameters[name] for name in order}
    return {**step.values.differentiable_inputs, **parameters}


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
    ended = _Ended(list(gradients))
    return _with_gradient(ended, _token(ended, sources), ended.loss_place, loss)


class _Ended:
    """Gradients of a step whose backward is over; the caller's first backward gets them, or those of another run.

    It knows nothing of the outputs, whose graph refers to it.

    Attributes:
        loss_place: the loss among the outputs.
    """

    def __init__(
        self, gradients: list[Tensor | None], again: Callable[[Mapping[int, Tensor]], Gradients] | None = None
    ) -> None:
        self.loss_place = 0
        self._gradients: list[Tensor | None] | None = gradients
        self._again = again
        self._incoming: list[tuple[int, list[Tensor | None]]] = []

    def expects(self, place: int) -> list[Tensor | None]:
        """Where a gradient of the output at this place is to be put."""
        incoming: list[Tensor | None] = []
        self._incoming.append((place, incoming))
        return incoming

    def __call__(self) -> Gradients:
        """The gradients of the sources, for all gradients of outputs that have come."""
        if self._gradients is None:
            raise AutoparError(
                "the gradients of this step were already released by an earlier backward(): with microbatches or "
                "pipeline stages, call the model again before each backward(), or add the losses up and call it once"
            )
        gradients, self._gradients = self._gradients, None
        again, self._again = self._again, None
        given: dict[int, Tensor] = {}
        for place, incoming in self._incoming:
            for gradient in incoming:
                if gradient is not None:
                    given[place] = given[place] + gradient if place in given else gradient
        self._incoming.clear()
        if given.keys() != {self.loss_place}:
            assert again is not None  # else no other output has a gradient
            del gradients
            return again(given)
        for local in _locals(gradients):
            local.mul_(given[self.loss_place].to(local))
        return gradients


def _token(ended: _Ended, sources: Sequence[Tensor]) -> Tensor:
    anchor = torch.zeros((), requires_grad=True, device="cpu")  # there may be no source on this rank
    return backward_token(lambda: (None, *ended()), anchor, *sources)


def _with_gradient(ended: _Ended, token: Tensor, place: int, output: Tensor) -> Tensor:
    return call_untraced(_Outputs, (output,), ended.expects(place), token)[0]


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
        calls = executor.communicator.calls
        if self._has_run and step.has_kept_graph and calls is not None:  # the first backward is part of the call
            calls.enter("backward {} through a graph that was retained", lambda: (None, ()))
        self._has_run = True
        given = {name: g for name, g in zip(self._outputs, incoming, strict=True) if g is not None}
        incoming.clear()
        with nullcontext() if calls is None else calls.failing():
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
    anchor = torch.zeros((), requires_grad=True, device="cpu")  # there may be no source on this rank
    token = backward_token(lambda: (None, *backward(incoming)), anchor, *sources)
    return call_untraced(_Outputs, tuple(outputs), incoming, token)


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
        if all(gradient is None for gradient in gradients):  # autopar.lower.run.twice_differentiable
            return None, None, None
        if torch.is_grad_enabled():
            raise gradients_refused()
        ctx.incoming[:] = gradients
        return None, None, torch.zeros((), device="cpu")
