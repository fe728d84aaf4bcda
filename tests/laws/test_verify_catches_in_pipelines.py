"""Break a pipeline on purpose: `verify` must notice, and say that it is the pipeline, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.errors import VerificationError
from autopar.lower.run import tied_gradients
from autopar.lower.run.boundary_exchange import BoundaryExchange
from autopar.lower.run.output_layouts import OutputLayouts
from autopar.lower.run.stage_map import StageMap
from autopar.lower.run.step_values import StepValues
from autopar.program import Program
from autopar.schedules.action_lists import Action
from autopar.trace import trace
from tests.models import make
from tests.random_plans import random_pipeline

# pyright: reportPrivateUsage=false


@cache
def traced(name: str) -> tuple[torch.nn.Module, Mapping[str, Tensor], Program]:
    """A model, its inputs and its program, made before anything is broken."""
    model, inputs = make(name, torch.float32)
    return model, inputs, trace(model, (), inputs).program


class Rehearsal:
    """A random pipeline for a model of the zoo."""

    def __init__(self, name: str, schedule: str, groups: int = 2) -> None:
        self.model, self.inputs, self.program = traced(name)
        self.plan = random_pipeline(self.program, groups, 0, groups, schedule, 2)

    def verify(self) -> autopar.VerificationReport:
        return autopar.verify(self.model, self.plan, self.inputs, shrink=False, steps=1)

    def relayed(self) -> str:
        """A value with a gradient that crosses a stage which does not read it."""
        stages = StageMap(self.program, self.plan, 0)
        for stage, names in enumerate(stages.crossing[:-1]):
            read = {x for layer in stages.ranges[stage] for x in self.program.layers[layer].inputs}
            for name in names:
                if name not in read and self.program.values[name].requires_grad:
                    return name
        raise AssertionError("no value skips a stage")


def wrap(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, change: Callable[..., Any]) -> None:
    """Give what `method` returns to ``change(self, result, *args)``, and return that.

    There is one run path: what is to break pipelines only must look whether there is one.
    """
    right = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, *args: change(self, right(self, *args), *args))


@pytest.mark.slow
def test_a_good_pipeline_passes() -> None:
    report = Rehearsal("crossing", "1f1b").verify()
    assert "2 ranks against one device" in str(report)
    assert len(report.gradient_errors) == len(list(make("crossing")[0].parameters()))


@pytest.mark.slow
def test_a_tied_gradient_that_is_not_summed_over_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = Rehearsal("gpt2", "1f1b")
    monkeypatch.setattr(tied_gradients, "exchanged_sum", lambda talk, stages, x, groups: x.clone())
    with pytest.raises(VerificationError, match=r"replicas of transformer\.wte\.weight differ") as caught:
        rehearsal.verify()
    assert "All ops agree, also with pipeline stages, but replicas of transformer.wte.weight" in str(caught.value)


@pytest.mark.slow
def test_a_tied_gradient_that_is_halved_on_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal on its groups, and wrong: as a mean over groups would be."""
    rehearsal = Rehearsal("gpt2", "gpipe")
    right = tied_gradients.exchanged_sum
    monkeypatch.setattr(tied_gradients, "exchanged_sum", lambda *args: right(*args) / 2)
    with pytest.raises(VerificationError, match=r"gradients within .* \(transformer\.wte\.weight\)") as caught:
        rehearsal.verify()
    where = "the gradient of transformer.wte.weight (tied across the device groups 0, 1) differs"
    assert where in str(caught.value)


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "zbv"])
def test_a_gradient_of_a_skip_connection_that_is_lost_on_its_way(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """The stage between hands a value on, but not its gradient back."""
    rehearsal = Rehearsal("crossing", schedule, groups=2 if schedule == "zbv" else 4)
    skipped = rehearsal.relayed()
    op = next(op for layer in rehearsal.program.layers for op in layer.ops if skipped in op.results)

    def lose(step: StepValues, _: None, action: Action) -> None:
        gradients = step[action].gradients
        if skipped in gradients and any(
            skipped in names for names in step._executor.boundary_values[action.stage + 1 :]
        ):
            gradients[skipped] = torch.zeros_like(gradients[skipped])

    wrap(monkeypatch, StepValues, "end_backward", lose)
    with pytest.raises(VerificationError, match="Without pipeline stages all ops agree; with them") as caught:
        rehearsal.verify()
    assert f"the first gradient that differs is that of {op.name} = " in str(caught.value)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "interleaved_zero_bubble"])
def test_a_gradient_of_a_microbatch_that_is_counted_twice(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    rehearsal = Rehearsal("crossing", schedule)

    def twice(step: StepValues, _: None, action: Action) -> None:
        if step._executor.stages.is_pipeline and (action.microbatch, action.stage) == (1, 0):
            values = step[action]
            values.gradients = {name: 2 * gradient for name, gradient in values.gradients.items()}

    wrap(monkeypatch, StepValues, "begin_backward", twice)
    with pytest.raises(VerificationError, match=f"in one microbatch; with 2 microbatches and schedule {schedule}"):
        rehearsal.verify()


@pytest.mark.slow
def test_gradients_of_a_loss_that_is_a_mean_over_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a runtime does that takes the model's own loss of each microbatch: here terms of one mean."""
    rehearsal = Rehearsal("crossing", "gpipe")

    def scale(step: StepValues, gradient: Tensor, *_: object) -> Tensor:
        return gradient / step._executor.num_microbatches if step._executor.stages.is_pipeline else gradient

    wrap(monkeypatch, StepValues, "_gradient_of_returned", scale)
    with pytest.raises(VerificationError, match="with 2 microbatches and schedule gpipe, the gradient of"):
        rehearsal.verify()


@pytest.mark.slow
def test_a_loss_that_is_a_mean_over_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = Rehearsal("crossing", "gpipe")

    def mean(outputs: OutputLayouts, joined: Tensor, name: str, parts: Sequence[Tensor]) -> Tensor:
        is_loss = bool(outputs.executable.plan.stages) and name == outputs.executable.program.loss
        return joined / len(parts) if is_loss else joined

    wrap(monkeypatch, OutputLayouts, "join_microbatches", mean)
    with pytest.raises(VerificationError, match="with 2 microbatches and schedule gpipe, the loss is"):
        rehearsal.verify()


@pytest.mark.slow
def test_microbatches_whose_gradients_take_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second microbatch's backward gets the gradients of the first."""
    rehearsal = Rehearsal("crossing", "gpipe")

    def swap(step: StepValues, _: None, action: Action) -> None:
        values = step[action]
        came: dict[tuple[int, int], dict[str, Tensor]] = step.__dict__.setdefault("came", {})
        came[action.stage, action.microbatch] = dict(values.gradients)
        values.gradients = dict(came.get((action.stage, 1 - action.microbatch), values.gradients))

    wrap(monkeypatch, StepValues, "begin_backward", swap)
    with pytest.raises(VerificationError, match="with 2 microbatches and schedule gpipe, the gradient of"):
        rehearsal.verify()


@pytest.mark.slow
def test_values_that_arrive_as_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values of one shape and dtype sent in the wrong order: nothing hangs, all is wrong."""
    rehearsal = Rehearsal("crossing", "gpipe")
    # one cut behind the first layer, where a skip begins
    stages = tuple(
        replace(stage, start=start, stop=stop)
        for stage, (start, stop) in zip(rehearsal.plan.stages, ((0, 2), (2, len(rehearsal.plan.layers))), strict=True)
    )
    rehearsal.plan = rehearsal.plan.with_decisions(stages=stages)
    twins = [
        name
        for name in StageMap(rehearsal.program, rehearsal.plan, 0).crossing[1]
        if rehearsal.program.values[name].requires_grad
    ]
    assert len(twins) == 2, "the block's output, and the embedding that skips the blocks"

    def exchange(_: BoundaryExchange, tensors: Mapping[str, Tensor], action: Action) -> Mapping[str, Tensor]:
        is_here = action.kind == "RECV_F" and bool(tensors)
        return (
            {**tensors, **dict(zip(twins, [tensors[n] for n in reversed(twins)], strict=True))} if is_here else tensors
        )

    wrap(monkeypatch, BoundaryExchange, "received", exchange)
    with pytest.raises(VerificationError, match=r"Without pipeline stages all ops agree; with them, .* first op whose"):
        rehearsal.verify()
