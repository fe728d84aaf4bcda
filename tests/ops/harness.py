"""Run a rule's claim: split real tensors as an option says, run the op on each slice, join, compare with
the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.lower.communication.shards import Shards
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.kernels import KERNELS, resolve_target
from autopar.ops import RuleMatch, options_for
from autopar.placement import Axis, Placement
from autopar.program import Op, Option, Ref, TensorType

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Sample:
    """One real call of an op: its arguments with tensors in them.

    `shapes_only`: the content is random or not initialized, so that only shapes and dtypes are compared.
    `fixed`: operands through which torch passes no gradient.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    shapes_only: bool = False
    tolerance: float = TOLERANCE
    fixed: tuple[int, ...] = ()


def sample(
    target: str,
    *args: Any,
    shapes_only: bool = False,
    tolerance: float = TOLERANCE,
    fixed: tuple[int, ...] = (),
    **kwargs: Any,
) -> Sample:
    """A `Sample`; ``aten.`` and ``.default`` may be left out of the target."""
    if not target.startswith(
        ("aten.", "transformers.", "autopar.", "autopar_traced.", "flash_attn.", "torch_attn.", "testlib.")
    ):
        target = "aten." + (target if "." in target else target + ".default")
    return Sample(target, args, kwargs, shapes_only, tolerance, fixed)


class RuleViolationError(AssertionError):
    """An option of a rule does not compute what the whole op computes."""


def as_op(sample: Sample) -> tuple[Op, list[torch.Tensor]]:
    """The call as the `Op` that a trace would hold (results not named yet), and its tensor operands in
    order.
    """
    tensors: list[torch.Tensor] = []

    def convert(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
            return Ref(f"x{len(tensors) - 1}")
        if isinstance(arg, list | tuple):
            return tuple(convert(part) for part in arg)
        return str(arg) if isinstance(arg, torch.dtype | torch.device) else arg

    args = tuple(convert(arg) for arg in sample.args)
    kwargs = tuple((name, convert(arg)) for name, arg in sample.kwargs.items())
    return Op("op", sample.target, args, kwargs, ()), tensors


def tensor_type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def call(
    sample: Sample, tensors: Sequence[torch.Tensor], sizes: dict[int, tuple[int, ...]] | None = None
) -> list[torch.Tensor]:
    """The op's tensor results on `tensors`, with the arguments at the positions in `sizes` replaced."""
    args, kwargs = _fill(sample, tensors, sizes or {})
    return _flat(resolve_target(sample.target)(*args, **kwargs))


def _fill(
    sample: Sample, tensors: Sequence[torch.Tensor], sizes: dict[int, tuple[int, ...]]
) -> tuple[list[Any], dict[str, Any]]:
    feed = iter(tensors)

    def fill(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return next(feed)
        return [fill(part) for part in arg] if isinstance(arg, list | tuple) else arg

    args = [fill(arg) for arg in sample.args]
    for position, size in sizes.items():
        args[position] = list(size)
    return args, {name: fill(arg) for name, arg in sample.kwargs.items()}


def _flat(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def match(sample: Sample) -> RuleMatch | None:
    """What the registry says about the call."""
    op, tensors = as_op(sample)
    results = call(sample, tensors)
    return options_for(op, tuple(map(tensor_type, tensors)), tuple(map(tensor_type, results)))


def check_options(sample: Sample, found: RuleMatch | None = None) -> int:
    """Check every option of the sample's rule (or of `found`) on 2, 3 and 4 slices; returns how many
    splits were run.

    Raises:
        RuleViolationError: an option is wrong; the message says which result or gradient.
    """
    found = found or match(sample)
    if found is None:
        raise RuleViolationError(f"{sample.target}: no rule matches this call")
    names = [option.factor for option in found.options]
    if len(set(names)) != len(names) or not {"-", "~"} <= set(names) or any(" " in name for name in names):
        raise RuleViolationError(f"{sample.target}: bad factor names {names}")
    count = 0
    for option in found.options:
        for num_slices in (2, 3, 4) if option.extent else (2,):
            if option.extent % num_slices == 0:
                _check_option(sample, found, option, num_slices)
                count += 1
    return count


def split(whole: torch.Tensor, placement: Placement, num_slices: int) -> list[torch.Tensor]:
    """`whole` as the devices of one axis hold it."""
    if placement.kind == "S":
        if whole.shape[placement.dim] % (num_slices * placement.parts):
            raise RuleViolationError(f"dim {placement.dim} of {tuple(whole.shape)} has no {num_slices} equal slices")
        slices = [part.chunk(num_slices, placement.dim) for part in whole.chunk(placement.parts, placement.dim)]
        return [torch.cat(own, placement.dim).contiguous() for own in zip(*slices, strict=True)]
    if placement.kind == "P":
        terms = [_random_like(whole) for _ in range(num_slices - 1)]
        return [*terms, whole - sum(terms)]
    return [whole.clone() for _ in range(num_slices)]


def split_gradient(whole: torch.Tensor, placement: Placement, num_slices: int) -> list[torch.Tensor]:
    """The gradient `whole` in the form that a value with this placement has it: see `autopar.placement`."""
    return split(whole, _of_gradient(placement), num_slices)


def _of_gradient(placement: Placement) -> Placement:
    return placement._replace(kind={"B": "P", "P": "R"}.get(placement.kind, placement.kind))


def join(parts: list[torch.Tensor], placement: Placement, what: str, tolerance: float = TOLERANCE) -> torch.Tensor:
    """The whole value from what the devices hold."""
    if placement.kind == "S":
        slices = [part.chunk(placement.parts, placement.dim) for part in parts]
        return torch.cat([piece for own in zip(*slices, strict=True) for piece in own], placement.dim)
    if placement.kind == "P":
        return torch.stack(parts).sum(0) if parts[0].dtype != torch.bool else torch.stack(parts).any(0)
    for part in parts[1:]:
        _compare(part, parts[0], f"{what} on another device", tolerance)
    return parts[0]


def join_gradient(parts: list[torch.Tensor], placement: Placement, what: str, tolerance: float) -> torch.Tensor:
    """The whole gradient from those of the devices."""
    return join(parts, _of_gradient(placement), what, tolerance)


def has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _random_like(tensor: torch.Tensor) -> torch.Tensor:
    if has_gradient(tensor):
        return torch.randn_like(tensor)
    return torch.randint_like(tensor, 0, 5)


def _compare(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise RuleViolationError(f"{what}: {tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}")
    if not torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True):
        difference = (got.to(torch.complex128) - want.to(torch.complex128)).abs().max().item()
        raise RuleViolationError(f"{what}: differs by up to {difference:.3g}")


def _differentiable(sample: Sample, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        t.detach().clone().requires_grad_(has_gradient(t) and index not in sample.fixed)
        for index, t in enumerate(tensors)
    ]


def _gradients(
    results: list[torch.Tensor], seeds: list[torch.Tensor], operands: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Per operand, its gradient (zeros where none flows)."""
    pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if r.requires_grad]
    wanted = [x for x in operands if x.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(x) for x in operands]
    found = torch.autograd.grad([r for r, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
    by_id = {id(x): g for x, g in zip(wanted, found, strict=True) if g is not None}
    return [by_id.get(id(x), torch.zeros_like(x)) for x in operands]


def _check_option(sample: Sample, found: RuleMatch, option: Option, num_slices: int) -> None:
    torch.manual_seed(0)
    _, tensors = as_op(sample)
    operands = _differentiable(sample, tensors)
    whole = call(sample, operands)
    seeds = [_random_like(result.detach()) if has_gradient(result) else result for result in whole]
    want = _gradients(whole, seeds, operands)
    what = f"{sample.target} option {option.factor!r} on {num_slices} devices"

    pieces = [split(x.detach(), p, num_slices) for x, p in zip(operands, option.operands, strict=True)]
    local_seeds = [
        split_gradient(s, p, num_slices) if has_gradient(s) or p.is_shard else [s] * num_slices
        for s, p in zip(seeds, option.results, strict=True)
    ]
    sizes = _local_sizes(found, option, whole, num_slices)
    runs = _run(sample, option, pieces, local_seeds, sizes, num_slices)
    for index, placement in enumerate(option.results):
        got = join(
            [outs[index] for outs, _ in runs],
            placement if not sample.shapes_only else _shapes(placement),
            f"{what}, result {index}",
            sample.tolerance,
        )
        if sample.shapes_only:
            if got.shape != whole[index].shape:
                raise RuleViolationError(f"{what}, result {index}: shape {got.shape} instead of {whole[index].shape}")
        else:
            _compare(got, whole[index].detach(), f"{what}, result {index}", sample.tolerance)
    for index, placement in enumerate(option.operands):
        if not operands[index].requires_grad or sample.shapes_only:
            continue
        label = f"{what}, gradient of operand {index}"
        got = join_gradient([grads[index] for _, grads in runs], placement, label, sample.tolerance)
        _compare(got, want[index], label, sample.tolerance)


def _shapes(placement: Placement) -> Placement:
    return placement if placement.is_shard else Placement("P")


def _local_sizes(
    found: RuleMatch, option: Option, whole: list[torch.Tensor], num_slices: int
) -> dict[int, tuple[int, ...]]:
    if not found.size_args:
        return {}
    placement, shape = option.results[0], list(whole[0].shape)
    if placement.is_shard:
        shape[placement.dim] //= num_slices
    return dict.fromkeys(found.size_args, tuple(shape))


Run = tuple[list[torch.Tensor], list[torch.Tensor]]


def _run(
    sample: Sample,
    option: Option,
    pieces: list[list[torch.Tensor]],
    seeds: list[list[torch.Tensor]],
    sizes: dict[int, tuple[int, ...]],
    num_slices: int,
) -> list[Run]:
    """Per device, its results and the gradients of its operands."""

    def run_on(rank: int, communicator: Any = None) -> Run:
        operands = _differentiable(sample, [parts[rank] for parts in pieces])
        if communicator is None:
            results = call(sample, operands, sizes)
        else:
            args, kwargs = _fill(sample, operands, sizes)
            results = _flat(KERNELS[option.kernel](Shards(communicator, (Axis(num_slices, 1),)), *args, **kwargs))
        for index, (result, parts) in enumerate(zip(results, seeds, strict=True)):
            if result.shape != parts[rank].shape:
                raise RuleViolationError(
                    f"{sample.target} option {option.factor!r}, result {index}: local shape "
                    f"{tuple(result.shape)} instead of {tuple(parts[rank].shape)}"
                )
        gradients = _gradients(results, [parts[rank] for parts in seeds], operands)
        return [result.detach() for result in results], gradients

    try:
        if not option.kernel:
            return [run_on(rank) for rank in range(num_slices)]
        return simulate(num_slices, lambda communicator: run_on(communicator.rank, communicator))
    except (RuntimeError, IndexError) as error:
        raise RuleViolationError(
            f"{sample.target} option {option.factor!r} on {num_slices} devices: {error}"
        ) from error
