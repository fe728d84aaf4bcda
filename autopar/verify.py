"""Rehearse a plan without its cluster: every rank is a thread of this process, and one device is the judge.

`verify` runs the program that `parallelize` would run, on the model in float64 (so that a mistake can't hide in rounding), and
compares the loss, every gradient and the parameters after some optimizer steps with the single device's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.api import ExampleInputs, build, trace_model
from autopar.errors import VerificationError
from autopar.fit import check_fit
from autopar.lower import ParallelModule
from autopar.lower.communicator import Communicator, simulate
from autopar.lower.compat import local_tensor, make_mesh
from autopar.plan import Plan
from autopar.trace import Traced, default_example_inputs

__all__ = ["VerificationReport", "Run", "compare", "run_parallel", "run_single", "verify"]

# A gradient that is zero in exact arithmetic (a bias before a norm, a key's bias) holds rounding noise only, and so does a
# parameter that starts at zero and trains on it: they are compared on this fraction of the model's largest one.
_NOISE = 1e-6

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Run:
    """What a training run leaves: the loss of every step, gradients of the first step, parameters and buffers at the end."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class VerificationReport:
    """How far a parallel run is from the single device's.

    Args:
        world_size: number of simulated devices.
        loss_error: largest relative difference of a step's loss.
        gradient_errors: per parameter, the largest difference relative to the gradient's largest entry.
        parameter_errors: per parameter, the largest difference after all steps, relative to its largest entry.
        buffer_errors: the same for buffers.
    """

    world_size: int
    loss_error: float
    gradient_errors: Mapping[str, float]
    parameter_errors: Mapping[str, float]
    buffer_errors: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The worst gradient's parameter and its error."""
        return max(self.gradient_errors.items(), key=lambda item: item[1], default=("", 0.0))

    def __str__(self) -> str:
        """One line for people."""
        name, error = self.worst
        parameters = max(self.parameter_errors.values(), default=0.0)
        return (
            f"{self.world_size} ranks against one device: loss within {self.loss_error:.1e}, gradients within "
            f"{error:.1e}{f' ({name})' if name else ''}, parameters after training within {parameters:.1e}"
        )


def verify(
    model: nn.Module,
    plan: Plan,
    example_inputs: ExampleInputs | None = None,
    *,
    steps: int = 3,
    make_optimizer: MakeOptimizer = _adamw,
    loss_tolerance: float = 1e-12,
    gradient_tolerance: float = 1e-9,
    parameter_tolerance: float = 1e-7,
) -> VerificationReport:
    """Run `plan` on all its ranks in this process and compare with the single device, in float64.

    Args:
        model: the model that the plan is for, with real parameters; it is not changed.
        plan: what to rehearse.
        example_inputs: as in `autopar.parallelize`.
        steps: optimizer steps.
        make_optimizer: parameters -> optimizer.
        loss_tolerance: relative.
        gradient_tolerance: relative to each gradient's largest entry.
        parameter_tolerance: relative to each parameter's largest entry, after all steps.

    Raises:
        VerificationError: something differs by more; the message names the first op whose result (or gradient) differs.
        PlanMismatchError: the plan is for another model, or inputs of other shapes.

    Example:
        >>> print(autopar.verify(model, plan, {"input_ids": ids, "labels": ids}))
    """
    inputs = default_example_inputs(model) if example_inputs is None else example_inputs
    double = copy.deepcopy(model).double()
    inputs = _as_double(inputs)
    traced = trace_model(double, inputs)
    check_fit(plan, traced.program, plan.world_size, same_shapes=False)
    fitted = plan
    expected = run_single(double, inputs, steps, make_optimizer)
    found = run_parallel(double, traced, fitted, inputs, steps, make_optimizer)
    report = compare(expected, found, fitted.world_size)
    if (
        report.loss_error > loss_tolerance
        or report.worst[1] > gradient_tolerance
        or max(report.parameter_errors.values(), default=0.0) > parameter_tolerance
    ):
        raise VerificationError(f"{report}. {first_difference(double, traced, fitted, inputs)}")
    return report


def _as_double(inputs: ExampleInputs) -> ExampleInputs:
    def cast(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    if isinstance(inputs, Mapping):
        return {name: cast(x) for name, x in inputs.items()}
    return tuple(map(cast, inputs))


def run_single(
    model: nn.Module, inputs: ExampleInputs, steps: int, make_optimizer: MakeOptimizer = _adamw
) -> Run:
    """Train a copy of `model` on one device."""
    replica = copy.deepcopy(model)
    return _train(replica, inputs, steps, make_optimizer, lambda x: x.detach().clone())


def run_parallel(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    inputs: ExampleInputs,
    steps: int,
    make_optimizer: MakeOptimizer = _adamw,
) -> Run:
    """Train `model` by `plan`, every rank a thread of this process; raises VerificationError where ranks disagree."""

    def rank(communicator: Communicator) -> Run:
        mesh = make_mesh((communicator.world_size,), range(communicator.world_size), "cpu", rank=communicator.rank)
        parallel = build(model, traced, plan, communicator, mesh, example_inputs=inputs)
        return _train(parallel, inputs, steps, make_optimizer, lambda x: x.detach().clone())

    runs = simulate(plan.world_size, rank)
    for number, run in enumerate(runs):
        if run.losses != runs[0].losses:
            raise VerificationError(f"rank {number} has losses {run.losses}, rank 0 has {runs[0].losses}")
    return Run(
        losses=runs[0].losses,
        gradients=_join_all([run.gradients for run in runs]),
        parameters=_join_all([run.parameters for run in runs]),
        buffers=_join_all([run.buffers for run in runs]),
    )


def _train(
    model: nn.Module, inputs: ExampleInputs, steps: int, make_optimizer: MakeOptimizer, keep: Callable[[Tensor], Tensor]
) -> Run:
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(**inputs) if isinstance(inputs, Mapping) else model(*inputs))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {name: keep(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Run(
        tuple(losses),
        gradients,
        {name: keep(p) for name, p in model.named_parameters()},
        {name: keep(b) for name, b in model.named_buffers()},
    )


def loss_of(output: Any) -> Tensor:
    """The scalar loss in a model's output; without one, a scalar that depends on every floating output."""
    leaves = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    scalars = [x for x in leaves if x.dim() == 0]
    if scalars:
        return scalars[0]
    return torch.stack([x.square().mean() for x in leaves]).sum()


def _join_all(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    for number, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise VerificationError(f"rank {number} has a tensor of {sorted(part.keys() ^ parts[0].keys())}, rank 0 not")
    return {name: join([part[name] for part in parts], name) for name in parts[0]}


def join(tensors: list[Tensor], name: str) -> Tensor:
    """The whole tensor from every rank's DTensor (or plain replica), in rank order.

    Raises:
        VerificationError: replicas differ.
    """
    first = tensors[0]
    if not isinstance(first, DTensor):
        _check_replicas(tensors, name)
        return first
    locals_ = [local_tensor(t) for t in tensors]
    sizes = first.device_mesh.shape
    for axis in reversed(range(len(sizes))):
        # After the axes to the right are joined, entries `size` apart in this list are the slices of this axis.
        groups = [locals_[i : i + sizes[axis]] for i in range(0, len(locals_), sizes[axis])]
        placement = first.placements[axis]
        if placement.is_partial():
            raise VerificationError(f"{name} is left as a sum of terms ({first.placements}): an all-reduce is missing")
        if placement.is_replicate():
            for group in groups:
                _check_replicas(group, name)
            locals_ = [group[0] for group in groups]
        else:
            locals_ = [torch.cat(group, placement.dim) for group in groups]  # pyright: ignore[reportAttributeAccessIssue]
    return locals_[0]


def _check_replicas(tensors: list[Tensor], name: str) -> None:
    for number, other in enumerate(tensors):
        if not torch.equal(other, tensors[0]) and not torch.allclose(other, tensors[0], rtol=1e-12, atol=1e-14):
            raise VerificationError(f"replicas of {name} differ: {number} from 0 by {(other - tensors[0]).abs().max()}")


def compare(expected: Run, found: Run, world_size: int) -> VerificationReport:
    """Errors of `found` against `expected`.

    Raises:
        VerificationError: one run has a gradient, parameter or buffer that the other lacks.
    """
    return VerificationReport(
        world_size=world_size,
        loss_error=max(
            (abs(a - b) / max(abs(a), 1e-300) for a, b in zip(expected.losses, found.losses, strict=True)), default=0.0
        ),
        gradient_errors=_errors(expected.gradients, found.gradients, "gradient", _NOISE),
        parameter_errors=_errors(expected.parameters, found.parameters, "parameter", _NOISE),
        buffer_errors=_errors(expected.buffers, found.buffers, "buffer"),
    )


def _errors(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str, noise: float = 0.0
) -> dict[str, float]:
    if expected.keys() != found.keys():
        raise VerificationError(f"{what} missing or added: {sorted(expected.keys() ^ found.keys())}")
    largest = max((x.abs().max().item() for x in expected.values() if x.numel()), default=0.0)
    return {name: relative_error(expected[name], found[name], noise * largest) for name in expected}


def relative_error(expected: Tensor, found: Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest entry of `expected` (or to `floor`, if that is larger).

    It is inf where shapes differ or one is not finite.
    """
    if expected.shape != found.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = (expected.double() - found.double()).abs().max().item()
    scale = max(expected.double().abs().max().item(), floor)
    error = difference / scale if scale > 0 else difference
    return error if error == error else float("inf")  # noqa: PLR0124  (NaN)
