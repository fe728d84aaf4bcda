"""Steps of a parallel module as its caller gets them: run, with their outputs, and run again where they have to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.lower.communication.call_consensus import PLANNING
from autopar.lower.kernels.random import agree_base_seed
from autopar.lower.run.caller_outputs import caller_outputs, cut_outputs, differentiable_outputs, do_outputs_fit
from autopar.lower.run.execution import Executor
from autopar.lower.run.gradient_calls import GradientCall, gradients_refused
from autopar.lower.run.late_outputs import LateReader, with_late_outputs
from autopar.lower.run.lowering import Cuts
from autopar.lower.run.output_hooks import with_checked_hooks
from autopar.lower.run.run_step import StepResults, run_step
from autopar.lower.run.second_run import SecondRun, StepCall, runs_again, same_tensors
from autopar.lower.run.step_runner import trained_parameters
from autopar.lower.run.submodule_calls import SubmoduleCalls
from autopar.lower.run.twice_differentiable import twice_differentiable

__all__ = ["StepCalls"]


class StepCalls(SubmoduleCalls):
    """The base of `ParallelModule` that runs one step of an executor."""

    whole_outputs: bool | None

    def _compute(
        self, executor: Executor, tensors: Sequence[Tensor], call: StepCall, seed: int | None = None
    ) -> list[Tensor | None]:
        """The outputs in order; `seed` of what is random: by default the next one."""
        calls, autocast = self._communicator.calls, torch.autocast(self._communicator.device.type, enabled=False)
        with nullcontext() if calls is None else calls.failing(), autocast if call.autocast else nullcontext():
            if seed is None:
                seed = agree_base_seed(self._communicator) if executor.is_random else 0
            again = None
            if self._executors.can_plan and self.whole_outputs is not False and runs_again(executor):
                again = SecondRun(executor, tensors, partial(self._run_again, executor, call, seed))
            # Known before a step joins what its microbatches give: what the caller wants of it.
            is_later = self.whole_outputs is None and (self.training or not do_outputs_fit(executor.executable))
            cuts = executor.executable.cuts(call.args, call.kwargs)
            executor.outputs.whole = not is_later if self.whole_outputs is None else self.whole_outputs
            executor.outputs.cut = frozenset(cuts)
            executor.begin_step()
            gradients = self._gradient_call(executor, tensors, call)
            step = run_step(executor, executor.take_parts(tensors), seed, again)
            executor.update_buffers(step.values)
            outputs = self._outputs(executor, step, call, cuts, is_later=is_later)
            if gradients is not None:
                parameters = list(trained_parameters(executor).values())
                outputs = twice_differentiable(outputs, tensors, parameters, gradients, gradients_refused)
            return with_checked_hooks(executor, outputs) if torch.is_grad_enabled() else outputs

    def _gradient_call(self, executor: Executor, tensors: Sequence[Tensor], call: StepCall) -> GradientCall | None:
        """What gives gradients of these inputs that have gradients themselves; None if none wants a gradient."""
        is_local = self.call_inputs is not None and self.call_inputs.is_local
        if is_local or self.whole_outputs is False or not (self._executors.can_plan and torch.is_grad_enabled()):
            return None
        if not any(x.requires_grad for x in tensors):
            return None
        before = self._mode_and_numbers()

        def run(kwargs: Mapping[str, Any]) -> Any:
            if self._mode_and_numbers() != before:
                raise AutoparError(
                    "since the call, the model was switched to another mode (train(), eval()), or a number that its "
                    "forward reads was changed: take the gradients before"
                )
            return self._run(call.args, kwargs, call.part)

        return GradientCall(executor, tensors, call, run)

    def _mode_and_numbers(self) -> tuple[Any, ...]:
        """What decides which program a call runs, and what a script may change between calls."""
        plain = (entry for entry in self._attributes.changed() if isinstance(entry[2], bool | int | float | str))
        return (self.training, *plain)

    def _run_again(
        self, executor: Executor, call: StepCall, seed: int, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The outputs of a call that `executor` ran on these tensors, by a plan with gradients of all of them."""
        self._first_steps.interrupt()
        plan = partial(self._executors.from_any_output, executor, call.args, call.kwargs, call.part, call.autocast)
        made = self._enter(f"{PLANNING}the backward of {call.kind}", lambda: (plan(), ()))
        own = made.executable.read_inputs(call.args, call.kwargs)
        names = executor.executable.program.inputs
        return self._compute(made, same_tensors(names, tensors, own), call, seed)

    def _outputs(
        self, executor: Executor, step: StepResults, call: StepCall, cuts: Cuts, *, is_later: bool
    ) -> list[Tensor | None]:
        executable = executor.executable
        one = f"{'a' if self.training else 'an'} {call.kind.replace(' {}', '', 1)}"
        read = partial(self._read_output, one)
        outputs = caller_outputs(executor, step.values, read, is_later=is_later)
        outputs = cut_outputs(executable.program.outputs, outputs, cuts)
        outputs = differentiable_outputs(executor, outputs, step.with_gradient)
        is_local = self.call_inputs is not None and self.call_inputs.is_local
        if self.call_inputs is not None and is_local:
            rows = executor.outputs.rows
            named = zip(executable.program.outputs, outputs, strict=True)
            outputs = [self.call_inputs.own_rows(x, rows[name]) if name in rows else x for name, x in named]
        if executable.program.late:
            reader = LateReader(
                lambda name, check, compute: read(name, compute, check),
                lambda name: self._whole(name, self._own_part(name)),
                None if is_local else step.with_gradient,
            )
            outputs = with_late_outputs(executor, outputs, self._store, reader)
        return outputs

    def _read_output(
        self, kind: str, name: str, gather: Callable[[], Tensor], check: Callable[[], None] = lambda: None
    ) -> Tensor:
        self._enter(f"reading output {name!r} of {kind} ({{}})", lambda: (check(), ()))
        calls = self._communicator.calls
        with nullcontext() if calls is None else calls.failing():
            return gather()
