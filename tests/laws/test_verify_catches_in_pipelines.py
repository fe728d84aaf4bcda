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
from autopar.lower.run import pipeline
from autopar.lower.run.stage_map import StageMap
from autopar.program import Program
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
    """Give what `method` returns to ``change(self, result, *args)``, and return that."""
    right = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, *args: change(self, right(self, *args), *args))


def test_a_good_pipeline_passes() -> None:
    report = Rehearsal("crossing", "1f1b").verify()
    assert "2 ranks against one device" in str(report)
    assert len(report.gradient_errors) == len(list(make("crossing")[0].parameters()))


@pytest.mark.slow
def test_a_tied_gradient_that_is_not_summed_over_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = Rehearsal("gpt2", "1f1b")
    monkeypatch.setattr(pipeline._PipelineStep, "_sum_over_groups", lambda self, x, groups: x.clone())
    with pytest.raises(VerificationError, match=r"replicas of transformer\.wte\.weight differ") as caught:
        rehearsal.verify()
    assert "All ops agree, with pipeline stages, too, but replicas of transformer.wte.weight" in str(caught.value)


@pytest.mark.slow
def test_a_tied_gradient_that_is_halved_on_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal on its groups, and wrong: as a mean over groups would be."""
    rehearsal = Rehearsal("gpt2", "gpipe")
    wrap(monkeypatch, pipeline._PipelineStep, "_sum_over_groups", lambda step, total, *args: total / 2)
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

    def lose(work: pipeline._StageWork, _: None, passing: pipeline._Passing, *args: object) -> None:
        if skipped in passing.gradients and skipped in work._leaving:
            passing.gradients[skipped] = torch.zeros_like(passing.gradients[skipped])

    wrap(monkeypatch, pipeline._StageWork, "_keep_gradients", lose)
    with pytest.raises(VerificationError, match="Without pipeline stages all ops agree; with them") as caught:
        rehearsal.verify()
    assert f"the first gradient that differs is that of {op.name} = " in str(caught.value)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "interleaved_zero_bubble"])
def test_a_gradient_of_a_microbatch_that_is_counted_twice(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    rehearsal = Rehearsal("crossing", schedule)

    def twice(work: pipeline._StageWork, begun: tuple[Any, Any, list[Tensor]], microbatch: int) -> object:
        passing, roots, gradients = begun
        return (passing, roots, [2 * g for g in gradients]) if (microbatch, work._stage) == (1, 0) else begun

    wrap(monkeypatch, pipeline._StageWork, "_begin_backward", twice)
    with pytest.raises(VerificationError, match=f"in one microbatch, all agrees; with 2 microbatches by {schedule}"):
        rehearsal.verify()


@pytest.mark.slow
def test_gradients_of_a_loss_that_is_a_mean_over_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a runtime does that takes the model's own loss of each microbatch: here terms of one mean."""
    rehearsal = Rehearsal("crossing", "gpipe")

    def scale(work: pipeline._StageWork, found: Mapping[str, Tensor], _: int) -> dict[str, Tensor]:
        return {name: g / work._executor.num_microbatches for name, g in found.items()}

    wrap(monkeypatch, pipeline._StageWork, "_gradients_from_caller", scale)
    with pytest.raises(VerificationError, match="with 2 microbatches by gpipe, the gradient of"):
        rehearsal.verify()


@pytest.mark.slow
def test_a_loss_that_is_a_mean_over_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = Rehearsal("crossing", "gpipe")
    right = pipeline.join_microbatches

    def mean(executor: Any, name: str, parts: list[Tensor], **kwargs: bool) -> Tensor:
        joined = right(executor, name, parts, **kwargs)
        return joined / len(parts) if name == executor.executable.program.loss else joined

    monkeypatch.setattr(pipeline, "join_microbatches", mean)
    with pytest.raises(VerificationError, match="with 2 microbatches by gpipe, the loss is"):
        rehearsal.verify()


@pytest.mark.slow
def test_microbatches_whose_gradients_take_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second microbatch's backward gets the gradients of the first."""
    rehearsal = Rehearsal("crossing", "gpipe")
    right = pipeline._StageWork._begin_backward

    def swap(work: pipeline._StageWork, microbatch: int) -> object:
        passing, roots, came = right(work, microbatch)
        kept: dict[int, Sequence[Tensor]] = work.__dict__.setdefault("kept", {})
        kept[microbatch] = came
        return passing, roots, kept.get(1 - microbatch, came)

    monkeypatch.setattr(pipeline._StageWork, "_begin_backward", swap)
    with pytest.raises(VerificationError, match="with 2 microbatches by gpipe, the gradient of"):
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

    def exchange(work: pipeline._StageWork, handles: Any, wanted: Mapping[str, object], stage: int) -> Any:
        is_forward = stage < work._stage
        return handles | dict(zip(twins, [handles[n] for n in reversed(twins)], strict=True)) if is_forward else handles

    wrap(monkeypatch, pipeline._StageWork, "_start_receiving", exchange)
    with pytest.raises(VerificationError, match=r"Without pipeline stages all ops agree; with them, .* first op whose"):
        rehearsal.verify()
