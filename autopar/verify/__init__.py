"""Verifies a plan without its cluster: every rank is a thread of this process, and one device is the reference.

`verify` runs the program that `parallelize` would run, on the model in float64 (so that rounding can't hide errors),
and compares the loss, every gradient and the parameters after some optimizer steps with those of a single device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cluster import device_type_of
from autopar.errors import AutoparError, PlanMismatchError, VerificationError
from autopar.lower.compat import map_leaves
from autopar.lower.run.microbatch_updates import ops_per_microbatch
from autopar.plan import Plan
from autopar.planning.arguments import check_materialized
from autopar.planning.building import call_planner
from autopar.planning.call_plans import CallPlanner
from autopar.planning.call_traces import ExampleInputs, as_call, trace_model
from autopar.step.plan_check import check_fit
from autopar.trace import LossFunction, Traced, default_example_inputs, own_copy, put_loss_inside, without_target
from autopar.verify.buffers_seen import BuffersSeen, plan_calls_seen
from autopar.verify.diagnosis import first_difference
from autopar.verify.differences import largest_entry, number_error, relative_error
from autopar.verify.kept_double import Follows
from autopar.verify.rehearsal import (
    MakeOptimizer,
    Run,
    SteadyAdamW,
    followed_by,
    keep_double_program,
    run_parallel,
    run_single,
)
from autopar.verify.shrink_plan import fewest_normalized, most_pieces, shrink_inputs, shrink_plan

__all__ = ["VerificationReport", "compare", "verify"]

# A gradient that is zero in exact arithmetic (a bias before a norm, a key's bias) consists of rounding noise only, and
# so does a parameter that starts at zero and trains on it.  Their errors are relative to at least this fraction of the
# model's largest gradient or parameter.  Biases before batch norms over some hundred values had noise of up to 3e-15 of
# the largest gradient (24 random models), which 1e-6 would sometimes report.  With 1e-4, a gradient that is wrong as a
# whole is found unless it is smaller than 1e-13 of the largest one.
_NOISE = 1e-4

# The fewest values that a batch norm of a shrunken batch may normalize.  A small residual network on 2 images of
# 2 x 2 pixels differed from one device by 4e-10 (loss) and 3e-9 (gradients) by rounding alone, on whole images by 3e-16
# and 1e-13: of two values, batch norm leaves only which one is larger.
_MIN_NORMALIZED = 16

# Errors that ops raise on one device, for instance if an index is out of range.
_FAILURES = (RuntimeError, IndexError, ValueError)


@dataclass(frozen=True)
class VerificationReport:
    """The differences of a parallel run from that of a single device.

    Args:
        world_size: number of simulated devices.
        loss_error: largest relative difference of a step's loss.
        gradient_errors: for each parameter, the largest difference relative to the gradient's largest entry.
        parameter_errors: for each parameter, the largest difference after all steps, relative to its largest
            entry.
        buffer_errors: the same for buffers.
        output_errors: for each output in eval mode after training, and then in both modes with other values in the
            buffers, the largest difference relative to its largest entry.
        refusal: why the parallel model does not run in eval mode, or "".
    """

    world_size: int
    loss_error: float
    gradient_errors: Mapping[str, float]
    parameter_errors: Mapping[str, float]
    buffer_errors: Mapping[str, float]
    output_errors: Mapping[str, float] = field(default_factory=dict[str, float])
    refusal: str = ""

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """The parameter with the largest gradient error, and that error."""
        return max(self.gradient_errors.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def parameter_error(self) -> float:
        """The largest error of a parameter or buffer."""
        return max((*self.parameter_errors.values(), *self.buffer_errors.values()), default=0.0)

    @property
    def worst_output(self) -> tuple[str, float]:
        """The output after training with the largest error, and that error."""
        return max(self.output_errors.items(), key=lambda item: item[1], default=("", 0.0))

    def __str__(self) -> str:
        """The report in one line."""
        name, error = self.worst_gradient
        return (
            f"{self.world_size} ranks against one device: loss within {self.loss_error:.1e}, gradients within "
            f"{error:.1e}{f' ({name})' if name else ''}, parameters after training within {self.parameter_error:.1e}"
            f"{self._evaluation_text()}"
        )

    def _evaluation_text(self) -> str:
        if self.refusal:
            return f", eval mode refused ({self.refusal})"
        name, error = self.worst_output
        return f", outputs then within {error:.1e} ({name})" if name else ""


def verify(  # noqa: PLR0913  (all but three have good defaults)
    model: nn.Module,
    plan: Plan | str | Path,
    example_inputs: Tensor | ExampleInputs | None = None,
    *,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    steps: int = 3,
    shrink: bool = True,
    make_optimizer: MakeOptimizer = SteadyAdamW,
    planned: nn.Module | None = None,
    loss_tolerance: float = 1e-12,
    gradient_tolerance: float = 1e-9,
    parameter_tolerance: float = 1e-7,
) -> VerificationReport:
    """Run `plan` on all its ranks in this process and compare with a single device, in float64.

    It compares the loss of every step, the gradients of the first step, parameters and buffers after the last one, and
    the outputs of the model in eval mode after that, also with other values in its buffers.

    Shapes are shrunk first, consistently: the plan's axes to their smallest factors on at most 8 devices, and the batch
    as far as the model allows.  The model's own sizes stay, and every simulated rank holds its part of it here, so
    for a model that fills a device pass a model with fewer and narrower layers.  Random ops can't be compared; a model
    with them is refused.

    Args:
        model: the model that the plan is for, with real parameters; it is not changed.
        plan: the plan to verify, or the path of a saved one.
        example_inputs: as in `autopar.parallelize`.
        loss_fn: as in `autopar.parallelize`.
        example_target: as in `autopar.parallelize`.
        steps: the number of optimizer steps.
        shrink: if False, all devices are simulated, with the whole batch.
        make_optimizer: parameters -> optimizer; by default AdamW that doesn't amplify the rounding noise of gradients.
        planned: the model with which `plan` was made, if that is another object (on the meta device, for instance): it
            is traced instead of `model`.
        loss_tolerance: relative.
        gradient_tolerance: relative to each gradient's largest entry.
        parameter_tolerance: relative to each parameter's (or output's) largest entry, after all steps.

    Raises:
        VerificationError: a difference exceeds its tolerance; the message names the first op whose result (or
            gradient) differs, or the output.  Or the model can't be compared: it draws random numbers, doesn't run in
            float64, or its loss is NaN or infinite on one device.
        PlanFormatError: the file holds no plan.
        PlanMismatchError: the plan is for another model, or inputs of other shapes.
        MaterializationError: the model is on the meta device.

    Example:
        >>> print(autopar.verify(model, plan, {"input_ids": ids, "labels": ids}))
        2 ranks against one device: loss within ...
    """
    planned, _ = put_loss_inside(model if planned is None else planned, example_inputs, loss_fn, example_target)
    model, example_inputs = put_loss_inside(model, example_inputs, loss_fn, example_target)
    check_materialized(model)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    inputs = default_example_inputs(model) if example_inputs is None else example_inputs
    plan = shrink_plan(plan) if shrink else plan
    double = own_copy(model).double().train()
    smaller = shrink_inputs(inputs, plan.world_size * plan.num_microbatches * most_pieces(plan)) if shrink else ()
    inputs, traced, follows = _first_that_fits(planned, double, plan, [*smaller, inputs])
    if any(op.is_random for layer in traced.program.layers for op in layer.ops):
        raise VerificationError(
            "the model draws random numbers (dropout): ranks draw other numbers than one device, so the runs can't be "
            "compared; verify it with dropout probabilities of 0"
        )
    if approximate := ops_per_microbatch(traced.program, plan):
        op = approximate[0]
        where = f" ({op.module})" if op.module else ""
        raise VerificationError(
            f"the plan isn't exact: a constraint lets {op.target}{where} use statistics of each microbatch instead of "
            "the whole batch. Verify a plan without that constraint"
        )
    plan = plan.with_decisions(fingerprint=traced.program.fingerprint)
    batches = [batch for batch in (inputs, without_target(model, inputs)) if batch is not None]
    planner, refusal = _eval_mode(model, traced, plan, batches)
    batches = [] if refusal else batches
    seen = BuffersSeen()
    watching = double.register_forward_pre_hook(seen)  # and so do copies
    try:
        expected = run_single(
            double, _as_double(inputs), steps, make_optimizer, in_double=True, follows=follows,
            batches=list(map(_as_double, batches)),
        )  # fmt: skip
    except _FAILURES as error:
        raise VerificationError(
            f"the model doesn't run on one device in float64, in which plans are compared: {error}. If one of its "
            "kernels doesn't support float64, verify it with another implementation of that layer"
        ) from error
    finally:
        watching.remove()
    check_finite(expected)
    plan_calls_seen(seen, planner, traced, batches or [inputs])
    try:
        parallel = run_parallel(double, traced, plan, inputs, steps, make_optimizer, batches=batches, planner=planner)
        parallel = replace(parallel, refusal=refusal or parallel.refusal)
    except VerificationError as error:  # ranks differ from each other
        raise VerificationError(f"{error}. {first_difference(double, traced, plan, inputs)}") from error
    report = compare(expected, parallel, plan.world_size)
    if (
        report.loss_error > loss_tolerance
        or report.worst_gradient[1] > gradient_tolerance
        or report.parameter_error > parameter_tolerance
    ):
        raise VerificationError(f"{report}. {first_difference(double, traced, plan, inputs)}")
    if report.worst_output[1] > parameter_tolerance:
        raise VerificationError(f"{report}. Training agrees: eval mode or its use of buffers is wrong")
    return report


def _first_that_fits(
    model: nn.Module, double: nn.Module, plan: Plan, batches: Sequence[ExampleInputs]
) -> tuple[ExampleInputs, Traced, Follows]:
    """The first of `batches` that the model accepts and the plan fits, the model traced on it, and what is
    `followed_by` it.

    The last one is the whole batch.  The others are parts of it, so the model must run on them first: their entries may
    be indices into a dim that was shortened, and batch norms must have enough values.
    """
    problem: Exception | None = None
    for inputs in batches:
        try:
            made = trace_model(
                model, inputs, device_type=device_type_of(plan.device), num_layers=len(plan.decisions.layers)
            )
            follows = followed_by(made)
            traced = keep_double_program(made)
            traced = traced.decided_by(plan.decisions)
            check_fit(plan, traced.program, plan.world_size, same_shapes=False)
            if inputs is not batches[-1]:
                if fewest_normalized(traced.program) < _MIN_NORMALIZED:
                    continue
                check_finite(run_single(double, _as_double(inputs), 1, in_double=True, follows=follows))
        except (AutoparError, *_FAILURES) as error:
            problem = error
            continue
        return inputs, traced, follows
    raise problem or PlanMismatchError("there is no batch to verify the plan with")


def check_finite(run: Run) -> None:
    """Refuse to compare with the run of one device `run` if it has no numbers.

    Raises:
        VerificationError: the loss of a step is NaN or infinite.
    """
    for step, loss in enumerate(run.losses):
        if not math.isfinite(loss):
            raise VerificationError(
                f"on one device the loss of step {step} is {loss}, so there is nothing to compare ranks with. Pass "
                "example inputs (and targets) that the model's loss is finite for"
            )


def _eval_mode(
    model: nn.Module, traced: Traced, plan: Plan, batches: Sequence[ExampleInputs]
) -> tuple[CallPlanner, str]:
    """A planner that has planned the calls of `eval_outputs`, or the reason why they are refused."""
    planner = call_planner(model, traced, plan, finish=keep_double_program)
    try:
        for batch in batches:
            planner(*as_call(batch), False)
        with torch.no_grad():
            for batch in batches[1:]:  # of the first one, training is what `traced` is
                planner(*as_call(batch), True)
        return planner, ""
    except AutoparError as error:
        return planner, str(error)


def _as_double(inputs: ExampleInputs) -> ExampleInputs:
    return map_leaves(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


def compare(expected: Run, actual: Run, world_size: int) -> VerificationReport:
    """Return the errors of `actual` relative to `expected`.

    Raises:
        VerificationError: one run has a gradient, parameter, buffer or output that the other lacks.
    """
    return VerificationReport(
        world_size=world_size,
        loss_error=max(map(number_error, expected.losses, actual.losses), default=0.0),
        gradient_errors=_errors(expected.gradients, actual.gradients, "gradient"),
        parameter_errors=_errors(expected.parameters, actual.parameters, "parameter"),
        buffer_errors=_errors(*_mask_nonfinite(expected.buffers, actual.buffers), "buffer"),
        output_errors={} if actual.refusal else _errors(*_mask_nonfinite(expected.outputs, actual.outputs), "output"),
        refusal=actual.refusal,
    )


def _mask_nonfinite(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Both, with 0 in entries where they have the same non-finite value, as buffers of masks do, and outputs with other
    values in buffers may.
    """
    masks = {
        name: ~x.isfinite() & ((x == actual[name]) | (x.isnan() & actual[name].isnan()))
        for name, x in expected.items()
        if name in actual and x.shape == actual[name].shape
    }
    first, second = (
        {name: x.masked_fill(masks[name], 0.0) if name in masks else x for name, x in side.items()}
        for side in (expected, actual)
    )
    return first, second


def _errors(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], kind: str) -> dict[str, float]:
    # A parameter without entries has no gradient on ranks, where one device may give it an empty one.
    expected, actual = ({name: x for name, x in side.items() if x.numel()} for side in (expected, actual))
    if expected.keys() != actual.keys():
        raise VerificationError(f"{kind} missing or added: {sorted(expected.keys() ^ actual.keys())}")
    largest = max(map(largest_entry, expected.values()), default=0.0)
    return {name: relative_error(expected[name], actual[name], _NOISE * largest) for name in expected}
