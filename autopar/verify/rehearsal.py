"""Train a model by a plan with every rank a thread of this process, and on one device; join what the ranks hold."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.api import ExampleInputs, build, call_planner
from autopar.errors import AutoparError, VerificationError
from autopar.lower import ParallelModule
from autopar.lower.autograd import run_backward
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.compat import dtensor_like, leaves_of, local_part_of, local_tensor, make_mesh, map_leaves
from autopar.ops import experts
from autopar.placement import PARTIAL, REPLICATE, Layout, Placement
from autopar.plan import Plan
from autopar.planning.call_plans import CallPlanner, as_call
from autopar.program import Arg, Op, Option, Program, TensorType, Value
from autopar.trace import Traced, accurate_products, dense_flex_attention
from autopar.verify.differences import as_float64, largest_difference
from autopar.verify.eval_outputs import eval_outputs

__all__ = [
    "MakeOptimizer",
    "Run",
    "SteadyAdamW",
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

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class SteadyAdamW(torch.optim.AdamW):
    """AdamW on this rank's part of each parameter, by which a gradient that is all but zero makes next to no step.

    AdamW divides by the size of the gradient and its `eps`: with the usual 1e-8 the rounding noise of a gradient that
    cancels (of a key's bias) would come out 1e8 times as large, and look like a mistake.

    It works element by element, so that steps on parts are parts of its steps; that each of its dozens of ops looks at
    DTensors would take longer than a small model's forward and backward pass.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._given = [*parameters]
        super().__init__([nn.Parameter(local_part_of(p)) for p in self._given], lr=1e-3, eps=1e-5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for parameter in self._given:
            parameter.grad = None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; parts of gradients lie where those of parameters do."""
        for part, parameter in zip(self.param_groups[0]["params"], self._given, strict=True):
            part.data = local_part_of(parameter)
            part.grad = None if parameter.grad is None else local_part_of(parameter.grad)
        untyped: Any = super()
        return untyped.step(closure)


@dataclass(frozen=True)
class Run:
    """What a training run leaves: every step's loss, the first step's gradients, parameters and buffers at the end.

    `outputs` is what `eval_outputs` then finds, if that is asked for; `refusal` says why eval mode gives none.
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
    batches: Sequence[ExampleInputs] = (),
    others: Sequence[ExampleInputs] = (),
) -> Run:
    """Train a copy of `model` on one device, and evaluate it on `batches`; `others` as in `train`.

    `in_double` it is float64, and nothing is rounded to less on the way.
    """
    model = copy.deepcopy(model)
    given = (*model.parameters(), *model.buffers(), *leaves_of((inputs, *batches, *others)))
    with dense_flex_attention(), accurate_products(), _KeepDouble(given) if in_double else nullcontext():
        return _evaluated(train(model, inputs, steps, make_optimizer, others), model, batches)


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


def _evaluated(run: Run, model: nn.Module, batches: Sequence[ExampleInputs]) -> Run:
    try:
        return replace(run, outputs=eval_outputs(model, batches))
    except AutoparError as error:
        return replace(run, refusal=str(error))


def join_runs(runs: Sequence[Run], num_groups: int) -> Run:
    """The run of the whole model from those of its ranks, in rank order.

    Raises:
        VerificationError: ranks have different losses, or replicas of a tensor differ.
    """
    for number, run in enumerate(runs):
        if run.losses != runs[0].losses:
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
    """`action` on every rank's ParallelModule, in rank order.

    `planner` must have planned before (`planner_for`) what is called beside the program.
    """

    def rank(communicator: Communicator) -> T:
        mesh = make_mesh((communicator.world_size,), range(communicator.world_size), "cpu", rank=communicator.rank)
        return action(build(model, traced, plan, communicator, mesh, planner=planner))

    return simulate(plan.world_size, rank)


def planner_for(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    batches: Sequence[ExampleInputs],
    finish: Callable[[Traced], Traced] = lambda traced: traced,
    *,
    training: bool = False,
) -> CallPlanner:
    """`call_planner`, which has planned calls with `batches` in eval mode, or with `training` in training mode.

    While torch.export runs, all threads are told that they compile, and round otherwise: simulated ranks can't trace.
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
    """Train `model` itself, whole or one rank's part of it, on the same batch in every step, or on it and `others` by
    turns.
    """
    turns = (inputs, *others)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        args, kwargs = as_call(turns[step % len(turns)])
        loss = loss_of(model(*args, **kwargs))
        run_backward(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = {n: _copy(p.grad) for n, p in _filled(model) if p.grad is not None}
        optimizer.step()
    return Run(
        tuple(losses),
        gradients,
        {name: _copy(p) for name, p in _filled(model)},
        {name: b.detach().clone() for name, b in model.named_buffers()},
    )


def _copy(x: Tensor) -> Tensor:
    part = local_part_of(x).clone()
    return dtensor_like(part, x) if isinstance(x, DTensor) else part


def _filled(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters with elements: a rank with nothing to train has one without, for the user's optimizer."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.numel())


def loss_of(output: Any) -> Tensor:
    """The scalar loss in a model's output; without one, a scalar that depends on every differentiable output."""
    leaves = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.requires_grad]
    scalars = [x for x in leaves if x.dim() == 0]
    return scalars[0] if scalars else torch.stack([x.square().mean() for x in leaves]).sum()


def _join_groups(parts: Sequence[Mapping[str, Tensor]], num_groups: int) -> dict[str, Tensor]:
    """What the device groups hold, joined within each; a tensor that several hold must be the same on all."""
    size = len(parts) // num_groups
    results: dict[str, Tensor] = {}
    for group in range(num_groups):
        for name, tensor in _join_all(parts[group * size : (group + 1) * size]).items():
            _check_replicas([results.setdefault(name, tensor), tensor], name)
    return results


def _join_all(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    for number, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise VerificationError(
                f"rank {number} and rank 0 differ in having {sorted(part.keys() ^ parts[0].keys())}"
            )
    return {name: _join([part[name] for part in parts], name) for name in parts[0]}


def _join(tensors: list[Tensor], name: str) -> Tensor:
    first = tensors[0]
    if not isinstance(first, DTensor):
        return join_layout(tensors, (REPLICATE,), (len(tensors),), name)
    if any(p.is_partial() for p in first.placements):
        raise VerificationError(f"{name} is left as a sum of terms ({first.placements}): an all-reduce is missing")
    layout = tuple(Placement("S", p.dim) if p.is_shard() else REPLICATE for p in first.placements)  # pyright: ignore
    return join_layout(
        [local_tensor(t) for t in tensors if isinstance(t, DTensor)], layout, tuple(first.device_mesh.shape), name
    )


def join_layout(tensors: list[Tensor], layout: Layout, mesh: tuple[int, ...], name: str) -> Tensor:
    """The whole tensor from every rank's local one, in rank order.

    Raises:
        VerificationError: replicas differ.
    """
    parts = tensors
    for placement, size in reversed(list(zip(layout, mesh, strict=True))):
        # Axes to the right are joined already, so members of this axis stand side by side.
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
    turned = {"P": REPLICATE, "B": PARTIAL}
    return tuple(turned.get(placement.kind, placement) for placement in layout)


def _check_replicas(tensors: list[Tensor], name: str) -> None:
    first = tensors[0]
    for number, other in enumerate(tensors):
        pair = as_float64(other), as_float64(first)
        if not torch.equal(other, first) and not torch.allclose(*pair, rtol=1e-9, atol=1e-14, equal_nan=True):
            raise VerificationError(f"replicas of {name} differ: {number} from 0 by {largest_difference(*pair)}")


class _KeepDouble(TorchFunctionMode):
    """Inside, what is computed from `roots` (float64) is never cast to a narrower dtype.

    Models that compute a norm or a loss in float32 whatever their parameters' dtype would hide errors in
    that rounding.
    """

    _CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

    def __init__(self, roots: Iterable[Any]) -> None:
        super().__init__()
        self._wide: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._note(roots)

    def _note(self, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if isinstance(x, Tensor) and x.dtype == torch.float64:
                self._wide[x] = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(x, Tensor) and x in self._wide for x in leaves_of((args, kwargs))):
            return func(*args, **kwargs)
        if func in self._CASTS:
            return args[0]
        args, kwargs = map_leaves(_widen_dtype, (args, kwargs))
        if not _writes(func):  # to what may be float32; some of the others take all of one dtype
            args, kwargs = map_leaves(_widen_float, (args, kwargs))
        result = func(*args, **kwargs)
        self._note(leaves_of(result))
        return result


def _writes(func: Any) -> bool:
    """Whether it writes to its first argument, as add_, __iadd__ and __setitem__ do."""
    name = str(getattr(func, "__name__", ""))
    is_dunder = name.startswith("__")
    return name[2:5] in ("set", "iad", "isu", "imu", "itr") if is_dunder else name.endswith("_")


def _widen_dtype(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in _NARROW else x


def _widen_float(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 and not x.requires_grad else x


def keep_double_program(traced: Traced) -> Traced:
    """`traced` computing in float64, and taking inputs of its own dtypes.

    Parameters, buffers, inputs and all that is computed from them become float64, casts between them included, and
    so do constants and casts of integers that only these meet; what is computed from constants or from integers stays
    as it is, as it would in a model whose parameters are float64.
    """
    program = traced.program
    wide = {v.name for v in program.values.values() if v.role in ("input", "parameter", "buffer") or v.requires_grad}
    for op in _all_ops(program):
        if any(name in wide and program.values[name].type.is_floating for name in op.operands):
            wide.update(op.results)
    met = _met_by_wide(program, wide)
    wide |= met

    def widen_ops(ops: Sequence[Op]) -> tuple[Op, ...]:
        return tuple(_widen_op(op) if wide.intersection(op.results) else op for op in ops)

    values = {name: _widen_value(value) if name in wide else value for name, value in program.values.items()}
    layers = tuple(replace(layer, ops=widen_ops(layer.ops)) for layer in program.layers)

    def flatten_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        tensors = traced.flatten_inputs(args, kwargs)
        return [x.double() if x.is_floating_point() else x for x in tensors]

    constants = {name: _widen_float(x) if name in met else x for name, x in traced.constants.items()}
    program = replace(program, values=values, layers=layers, hoisted=widen_ops(program.hoisted))
    return replace(traced, program=program, constants=constants, flatten_inputs=flatten_inputs)


def _all_ops(program: Program) -> Iterator[Op]:
    return itertools.chain(program.hoisted, *(layer.ops for layer in program.layers))


def _met_by_wide(program: Program, wide: Set[str]) -> set[str]:
    """What is not `wide` and only read with values that are; some ops take all of one dtype (a loss with weights)."""
    casts = {op.results[0] for op in _all_ops(program) if _is_cast_of_integers(op, program)}
    result = {name for name, value in program.values.items() if value.role == "constant" or name in casts} - wide
    for op in _all_ops(program):
        if wide.isdisjoint(op.operands):
            result.difference_update(op.operands)
    return result


def _is_cast_of_integers(op: Op, program: Program) -> bool:
    return op.target == "aten._to_copy.default" and not program.type_of(op.operands[0]).is_floating


def _widen_value(value: Value) -> Value:
    if value.type.dtype not in ("float32", "bfloat16", "float16"):
        return value
    return replace(value, type=TensorType(value.type.shape, "float64"))


def _widen_op(op: Op) -> Op:
    return replace(op.map_args(_widen_arg), options=tuple(map(_widen_option, op.options)))


def _widen_option(option: Option) -> Option:
    """Kernels that communicate do it in the dtype of what they are given."""
    if not option.collectives:
        return option
    return replace(option, collectives=tuple(replace(each, dtype="float64") for each in option.collectives))


def _widen_arg(arg: Arg) -> Arg:
    if arg in ("torch.float32", "torch.bfloat16", "torch.float16"):
        return "torch.float64"
    return experts.in_double(arg) if isinstance(arg, str) else arg
