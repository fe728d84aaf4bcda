"""Trains a model by a plan, with every rank a thread of this process, and on one device; joins the ranks' tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, VerificationError
from autopar.lower import ParallelModule
from autopar.lower.autograd import run_backward
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.compat import dtensor_like, leaves_of, local_part_of, local_tensor, make_mesh
from autopar.lower.parameters.other_stages import is_elsewhere
from autopar.objects.made_buffers import MadeBuffers
from autopar.ops import experts
from autopar.placement import PARTIAL, REPLICATE, Layout, Placement
from autopar.plan import Plan
from autopar.planning.building import build, call_planner
from autopar.planning.call_plans import CallPlanner
from autopar.planning.call_traces import ExampleInputs, as_call
from autopar.program import Arg, Op, Option, Program, TensorType, Value
from autopar.trace import Traced, accurate_products, dense_flex_attention, own_copy
from autopar.verify.differences import are_equal, as_float64, largest_difference
from autopar.verify.eval_outputs import eval_outputs
from autopar.verify.kept_double import FOLLOWS, Follows, KeptDouble, widen_float

__all__ = [
    "MakeOptimizer",
    "Run",
    "SteadyAdamW",
    "followed_by",
    "gradient_layout",
    "join_layout",
    "join_runs",
    "keep_double_program",
    "loss_of",
    "planner_for",
    "run_parallel",
    "run_ranks",
    "run_single",
    "train",
]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

T = TypeVar("T")


class SteadyAdamW(torch.optim.AdamW):
    """AdamW on this rank's part of each parameter, which hardly moves parameters whose gradients are almost zero.

    AdamW divides by the size of the gradient and its `eps`: the usual 1e-8 would amplify the rounding noise of a
    gradient that cancels (of a key's bias) by 1e8, so that it looks like an error.

    AdamW works element by element, so a step on a part is the part of a step.  It runs on local tensors because its
    dozens of ops on DTensors would take longer than a small model's forward and backward pass.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [*parameters]
        super().__init__([nn.Parameter(local_part_of(p)) for p in self._parameters], lr=1e-3, eps=1e-5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step; parts of gradients have the layout of their parameters."""
        for part, parameter in zip(self.param_groups[0]["params"], self._parameters, strict=True):
            part.data = local_part_of(parameter)
            part.grad = None if parameter.grad is None else local_part_of(parameter.grad)
        untyped: Any = super()
        return untyped.step(closure)


@dataclass(frozen=True)
class Run:
    """The results of a training run: every step's loss, the first step's gradients, parameters and buffers at the end.

    `outputs` are those of `eval_outputs` after training, if requested; `refusal` says why eval mode has none.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    refusal: str = ""


def run_single(
    model: nn.Module,
    inputs: ExampleInputs,
    steps: int,
    make_optimizer: MakeOptimizer = SteadyAdamW,
    *,
    in_double: bool = False,
    follows: Follows = FOLLOWS,
    batches: Sequence[ExampleInputs] = (),
    others: Sequence[ExampleInputs] = (),
) -> Run:
    """Train a copy of `model` on one device, and evaluate it on `batches`; `others` as in `train`.

    With `in_double` the model is float64, and no intermediate result is cast to a narrower dtype; `follows` as in
    `followed_by`.
    """
    model, fresh = own_copy(model), own_copy(model)
    members = (x for each in (model, fresh) for x in (*each.parameters(), *each.buffers()))
    roots = (*members, *leaves_of((inputs, *batches, *others)))
    keep = KeptDouble(roots, follows) if in_double else nullcontext()
    with dense_flex_attention(), accurate_products(), keep:
        return _evaluated(train(model, inputs, steps, make_optimizer, others), model, batches, fresh)


def run_parallel(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    inputs: ExampleInputs,
    steps: int,
    make_optimizer: MakeOptimizer = SteadyAdamW,
    *,
    batches: Sequence[ExampleInputs] = (),
    planner: CallPlanner | None = None,
) -> Run:
    """Train `model` by `plan`, and evaluate it on `batches`; `planner` as in `run_ranks`.

    Raises:
        VerificationError: ranks have different losses, or replicas of a tensor differ.
    """

    def action(parallel: ParallelModule) -> Run:
        return _evaluated(train(parallel, inputs, steps, make_optimizer), parallel, batches)

    return join_runs(run_ranks(model, traced, plan, action, planner), plan.num_groups)


def _evaluated(run: Run, model: nn.Module, batches: Sequence[ExampleInputs], fresh: nn.Module | None = None) -> Run:
    try:
        return replace(run, outputs=eval_outputs(model, batches, fresh))
    except AutoparError as error:
        return replace(run, refusal=str(error))


def join_runs(runs: Sequence[Run], num_groups: int) -> Run:
    """Join the runs of all ranks, in rank order, to the run of the whole model.

    Raises:
        VerificationError: ranks have different losses, or replicas of a tensor differ.
    """
    for number, run in enumerate(runs):
        if not are_equal(run.losses, runs[0].losses):
            raise VerificationError(f"rank {number} has losses {run.losses}, rank 0 has {runs[0].losses}")
    return Run(
        losses=runs[0].losses,
        gradients=_join_groups([run.gradients for run in runs], num_groups),
        parameters=_join_groups([run.parameters for run in runs], num_groups),
        buffers=_join_groups([run.buffers for run in runs], num_groups),
        outputs=_join_groups([run.outputs for run in runs], num_groups),
        refusal=runs[0].refusal,
    )


def run_ranks(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    action: Callable[[ParallelModule], T],
    planner: CallPlanner | None = None,
) -> list[T]:
    """Call `action` with every rank's ParallelModule, and return its results in rank order.

    All ranks are on the device of the model's parameters.  `planner` must already have planned all calls other than the
    program's (`planner_for`).
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def rank(communicator: Communicator) -> T:
        numbers = range(communicator.world_size)
        mesh = make_mesh((communicator.world_size,), numbers, device.type, rank=communicator.rank)
        return action(build(model, traced, plan, communicator, mesh, planner=planner))

    return simulate(plan.world_size, rank, device=device)


def planner_for(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    batches: Sequence[ExampleInputs],
    finish: Callable[[Traced], Traced] = lambda traced: traced,
    *,
    training: bool = False,
) -> CallPlanner:
    """A `call_planner` that has planned calls with `batches` in eval mode, or in training mode with `training`.

    Simulated ranks can't trace: while torch.export runs, all threads are in compile mode, and round differently.
    """
    planner = call_planner(model, traced, plan, finish=finish)
    for batch in batches:
        planner(*as_call(batch), training)
    return planner


def train(
    model: nn.Module,
    inputs: ExampleInputs,
    steps: int,
    make_optimizer: MakeOptimizer = SteadyAdamW,
    others: Sequence[ExampleInputs] = (),
) -> Run:
    """Train `model` itself (or one rank's part of it) on `inputs` in every step, or on these and `others` in turn."""
    turns = (inputs, *others)
    made_buffers = MadeBuffers(model)  # on one device; ranks have them in their programs
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        args, kwargs = as_call(turns[step % len(turns)])
        loss = loss_of(model(*args, **kwargs))
        run_backward(loss)
        _make_dense(model.parameters())
        losses.append(loss.item())
        if step == 0:
            gradients = {n: _copy(p.grad) for n, p in _filled(model) if p.grad is not None}
        optimizer.step()
    made_buffers.forget()
    return Run(
        tuple(losses),
        gradients,
        {name: _copy(p) for name, p in _filled(model)},
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


def _make_dense(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters of embeddings with ``sparse=True`` dense gradients, as programs do."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def _copy(x: Tensor) -> Tensor:
    part = local_part_of(x).clone()
    return dtensor_like(part, x) if isinstance(x, DTensor) else part


def _filled(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that this rank has parts of."""
    return ((name, parameter) for name, parameter in model.named_parameters() if not is_elsewhere(parameter))


def loss_of(output: Any) -> Tensor:
    """The scalar loss in a model's output, or, without one, a scalar that depends on every differentiable output."""
    leaves = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.requires_grad]
    scalars = [x for x in leaves if x.dim() == 0]
    return scalars[0] if scalars else torch.stack([x.square().mean() for x in leaves]).sum()


def _join_groups(parts: Sequence[Mapping[str, Tensor]], num_groups: int) -> dict[str, Tensor]:
    """Join the tensors of each device group; a tensor that several groups hold must be equal on all of them."""
    size = len(parts) // num_groups
    results: dict[str, Tensor] = {}
    for group in range(num_groups):
        for name, tensor in _join_all(parts[group * size : (group + 1) * size]).items():
            _check_replicas([results.setdefault(name, tensor), tensor], name)
    return results


def _join_all(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    for number, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise VerificationError(f"only one of rank {number} and rank 0 has {sorted(part.keys() ^ parts[0].keys())}")
    return {name: _join([part[name] for part in parts], name) for name in parts[0]}


def _join(tensors: list[Tensor], name: str) -> Tensor:
    first = tensors[0]
    if not isinstance(first, DTensor):
        return join_layout(tensors, (REPLICATE,), (len(tensors),), name)
    if any(p.is_partial() for p in first.placements):
        raise VerificationError(f"{name} remains a sum of terms ({first.placements}): an all-reduce is missing")
    layout = tuple(Placement("S", p.dim) if p.is_shard() else REPLICATE for p in first.placements)  # pyright: ignore
    return join_layout(
        [local_tensor(t) for t in tensors if isinstance(t, DTensor)], layout, tuple(first.device_mesh.shape), name
    )


def join_layout(tensors: list[Tensor], layout: Layout, mesh: tuple[int, ...], name: str) -> Tensor:
    """Join the ranks' local tensors, in rank order, to the whole tensor.

    Raises:
        VerificationError: replicas differ.
    """
    parts = tensors
    for placement, size in reversed(list(zip(layout, mesh, strict=True))):
        # Inner axes are joined already, so the members of this axis are consecutive.
        groups = [parts[start : start + size] for start in range(0, len(parts), size)]
        if placement.is_shard:
            parts = [torch.cat(group, placement.dim) for group in groups]
        elif placement == PARTIAL:
            parts = [torch.stack(group).sum(0) for group in groups]
        else:
            for group in groups:
                _check_replicas(group, name)
            parts = [group[0] for group in groups]
    return parts[0]


def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor with this layout."""
    of_gradient = {"P": REPLICATE, "B": PARTIAL}
    return tuple(of_gradient.get(placement.kind, placement) for placement in layout)


def _check_replicas(tensors: list[Tensor], name: str) -> None:
    first = tensors[0]
    for number, replica in enumerate(tensors):
        pair = as_float64(replica), as_float64(first)
        if not torch.equal(replica, first) and not torch.allclose(*pair, rtol=1e-9, atol=1e-14, equal_nan=True):
            raise VerificationError(f"replicas of {name} differ: {number} from 0 by {largest_difference(*pair)}")


_OF_EQUAL_DTYPES = frozenset({
    "linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "einsum", "conv1d", "conv2d", "conv3d", "convolution",
    "scaled_dot_product_attention",
})  # fmt: skip
"""Ops that torch refuses for operands of several floating dtypes."""


def keep_double_program(traced: Traced) -> Traced:
    """Return `traced` computing in float64; it still accepts inputs of its own dtypes.

    Parameters, buffers, inputs and everything computed from them become float64, including casts between them, and so
    do constants and casts of integers that are only read together with them.  Other results of constants or integers
    keep their dtype, as they would in a model whose parameters are float64, unless a product needs them
    (`followed_by`).
    """
    program = traced.program
    wide = _wide_values(program, follows_integers=followed_by(traced).integers)
    adapted = _only_read_with(program, wide)
    wide |= adapted

    def widen_ops(ops: Sequence[Op]) -> tuple[Op, ...]:
        return tuple(_widen_op(op) if wide.intersection(op.results) else op for op in ops)

    values = {name: _widen_value(value) if name in wide else value for name, value in program.values.items()}
    layers = tuple(replace(layer, ops=widen_ops(layer.ops)) for layer in program.layers)

    def flatten_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        tensors = traced.flatten_inputs(args, kwargs)
        return [x.double() if x.is_floating_point() else x for x in tensors]

    constants = {name: widen_float(x) if name in adapted else x for name, x in traced.constants.items()}
    program = replace(program, values=values, layers=layers, hoisted=widen_ops(program.hoisted))
    return replace(traced, program=program, constants=constants, flatten_inputs=flatten_inputs)


def followed_by(traced: Traced) -> Follows:
    """What else must become float64 on one device, where it becomes float32.

    The model casts what it computes of integers, or creates, to the dtype of its parameters before a product.  In the
    trace that was no cast, and a product of float32 and float64 is none.
    """
    program = traced.program
    wide = _wide_values(program, follows_integers=False)
    wide |= _only_read_with(program, wide)
    products = (op for op in _all_ops(program) if op.target.split(".")[1] in _OF_EQUAL_DTYPES)
    has_mixed = any(
        program.values[name].type.is_floating and name not in wide
        for op in products
        if not wide.isdisjoint(op.results)
        for name in op.operands
    )
    floating = {value.type.dtype for value in program.values.values() if value.type.is_floating}
    return Follows(integers=has_mixed, is_of_float32=floating == {"float32"})


def _wide_values(program: Program, *, follows_integers: bool) -> set[str]:
    """What becomes float64; with `follows_integers` also what is cast of integers that are computed from inputs, and
    computed of them with constants.
    """
    wide = {v.name for v in program.values.values() if v.role in ("input", "parameter", "buffer") or v.requires_grad}
    followed = set(wide)
    for op in _all_ops(program):
        if followed.isdisjoint(op.operands):
            continue
        followed.update(op.results)
        is_wide = any(name in wide and program.values[name].type.is_floating for name in op.operands)
        if is_wide or (follows_integers and (_is_cast_of_integers(op, program) or _reads_constants(op, program))):
            wide.update(op.results)
    return wide


def _reads_constants(op: Op, program: Program) -> bool:
    """Whether the op has floating operands, and all of them are constants."""
    floating = [program.values[name] for name in op.operands if program.type_of(name).is_floating]
    return bool(floating) and all(value.role == "constant" for value in floating)


def _all_ops(program: Program) -> Iterator[Op]:
    return itertools.chain(program.hoisted, *(layer.ops for layer in program.layers))


def _only_read_with(program: Program, wide: Set[str]) -> set[str]:
    """The constants, casts of integers and tensors that an op creates, not in `wide`, that are only read together with
    `wide` values.

    Some ops need operands of equal dtypes (a loss with weights), or write to the first one.
    """
    made = {op.results[0] for op in _all_ops(program) if _is_cast_of_integers(op, program) or _is_creation(op, program)}
    names = {name for name, value in program.values.items() if value.role == "constant" or name in made} - wide
    for op in _all_ops(program):
        if wide.isdisjoint((*op.operands, *op.results)):
            names.difference_update(op.operands)
    return names


def _is_cast_of_integers(op: Op, program: Program) -> bool:
    return op.target == "aten._to_copy.default" and not program.type_of(op.operands[0]).is_floating


def _is_creation(op: Op, program: Program) -> bool:
    return len(op.results) == 1 and not op.operands and program.type_of(op.results[0]).is_floating


def _widen_value(value: Value) -> Value:
    if value.type.dtype not in ("float32", "bfloat16", "float16"):
        return value
    return replace(value, type=TensorType(value.type.shape, "float64"))


def _widen_op(op: Op) -> Op:
    if not op.operands and "dtype" not in dict(op.kwargs):  # else the default
        op = replace(op, kwargs=(*op.kwargs, ("dtype", "torch.float64")))
    return replace(op.map_args(_widen_arg), options=tuple(map(_widen_option, op.options)))


def _widen_option(option: Option) -> Option:
    """Make the option's kernel communicate in float64, the dtype of its operands."""
    if not option.collectives:
        return option
    return replace(option, collectives=tuple(replace(each, dtype="float64") for each in option.collectives))


def _widen_arg(arg: Arg) -> Arg:
    if arg in ("torch.float32", "torch.bfloat16", "torch.float16"):
        return "torch.float64"
    return experts.in_double(arg) if isinstance(arg, str) else arg
