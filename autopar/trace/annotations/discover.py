"""Factor options for an op without a rule: derived by running it on slices and checking what recombines.

A candidate gives every operand a placement: a slice along one of its dims (all sliced dims have one size),
the whole tensor, or a term of a sum.  The op runs on 2 and 3 devices' worth of that.  If each result is
then the whole result when joined along a dim, when summed, or as it is, and each operand's gradients join
to the whole gradient as its placement says, on two draws of random numbers, the candidate is an option.

What runs whole: ops on complex numbers, that draw random numbers, that can't run here, or whose arguments
can't be made up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product

import torch
from torch import Tensor

from autopar.ops import LAUNCHING_NAMESPACE
from autopar.ops.derivation import whole_options
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Placement, shard
from autopar.program import Arg, Op, Option, TensorType
from autopar.trace.evaluation import run_op

__all__ = ["MAX_CANDIDATES", "MAX_ELEMENTS", "discover_options", "has_linear_backward"]

MAX_ELEMENTS = 1 << 18
"""Operands and results together larger than this are shrunk before the op is run."""
MAX_CANDIDATES = 256
"""At most so many ways to place the operands are tried."""

_TELLING = (
    0.25  # of a result are numbers, at least; roots of normal numbers are in a half, masks of short windows seldom
)
_SMALL = 64  # only sizes above this are shrunk: a number as small as a head count may mean anything
_SHRUNK = (24, 36, 48, 60, 72, 84)

Types = tuple[TensorType, ...]


def discover_options(op: Op, operand_types: Types, result_types: Types) -> tuple[Option, ...]:
    """The options of `op` (with ``"-"`` and ``"~"``), or () if it can't be split or can't be run.

    Args:
        op: the op; only its target and arguments are used.
        operand_types: in the order of `Op.operands`.
        result_types: in the order of `Op.results`.
    """
    candidates = _aligned_candidates if _launches(op) else _candidates
    with _memory_apart(op):
        for trials in _make_trials(op, operand_types, result_types):
            results: dict[tuple[Placement, ...], Option] = {}
            for placements in islice(candidates(trials[0]), MAX_CANDIDATES):
                slices = tuple(placement if placement.is_shard else REPLICATE for placement in placements)
                key = slices if any(placement.is_shard for placement in placements) else placements
                if key not in results and (option := _try(trials, placements, operand_types, result_types)):
                    results[key] = option
            if results:
                return (*whole_options(len(operand_types), len(result_types)), *results.values())
    return ()


def has_linear_backward(op: Op, operand_types: Types, result_types: Types) -> bool:
    """Whether the gradients of a sum of gradients are seen to be the sum of their gradients."""
    with _memory_apart(op):
        return any(_is_linear(trials) for trials in _make_trials(op, operand_types, result_types))


def _is_linear(trials: Sequence[_WholeRun]) -> bool:
    for trial in trials:
        for scale in (1e-6, 1.0, 1e6):
            parts = [tuple(scale * factor * seed for seed in trial.seeds) for factor in (1.0, -0.75, 0.25)]
            runs = [_backward(trial.run, trial.operands, seeds) for seeds in parts]
            if any(run is None for run in runs):
                continue
            one, other, both = (run or () for run in runs)
            if not all(_is_close(a + b, c, 10 * trial.tolerance) for a, b, c in zip(one, other, both, strict=True)):
                return False
    return True


# ---------------------------------------------------------------- whole runs


@dataclass(frozen=True)
class _WholeRun:
    """One whole run on random numbers: what slices have to reproduce."""

    run: Callable[[Sequence[Tensor]], list[Tensor]]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    has_backward: bool
    tolerance: float


def _make_trials(op: Op, operand_types: Types, result_types: Types) -> Iterator[list[_WholeRun]]:
    """Two trials, in float64 if the op supports it; or nothing.

    What launches kernels by itself runs on this process's GPU, if there is one.  Such a kernel may take float64 and
    compute in less, so two trials in float32 follow.
    """
    op = op.with_numbered_operands()  # a value that is read twice is drawn twice: its readers may be placed differently
    size = sum(kind.num_elements for kind in operand_types + result_types)
    if size > MAX_ELEMENTS:
        op, operand_types, result_types = _shrink(op, operand_types, result_types)
        size = sum(kind.num_elements for kind in operand_types + result_types)
    is_complex = any(kind.dtype.startswith("complex") for kind in operand_types + result_types)
    if size > MAX_ELEMENTS or not operand_types or is_complex:
        return
    make = partial(_make_pair, op, operand_types, result_types)
    if not _launches(op):
        pairs = (pair for dtype in (torch.float64, None) if (pair := make(dtype, torch.device("cpu"))))
        yield from islice(pairs, 1)
    elif torch.cuda.is_available():
        gpu = torch.device("cuda", torch.cuda.current_device())
        yield from filter(None, (make(torch.float64, gpu), make(torch.float32, gpu)))


def _launches(op: Op) -> bool:
    return op.target.startswith(f"{LAUNCHING_NAMESPACE}.")


@contextmanager
def _memory_apart(op: Op) -> Generator[None]:
    """Inside, what `op` makes on a GPU is next to nothing else: a kernel checks no bounds."""
    if not _launches(op) or not torch.cuda.is_available():
        yield
        return
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()), torch.autograd.set_multithreading_enabled(False):
        yield


def _make_pair(
    op: Op, operand_types: Types, result_types: Types, dtype: torch.dtype | None, device: torch.device
) -> list[_WholeRun]:
    """Two trials with floats of this dtype, or of their own, or none."""
    for positive in (False, True):  # roots and logarithms want positive numbers
        make = partial(_make_trial, op, operand_types, result_types)
        one = make(_Draws(0, dtype, positive, device))
        other = make(_Draws(1, dtype, positive, device)) if one else None
        if one and other:
            return [one, other]
    return []


@dataclass(frozen=True)
class _Draws:
    """How operands are made up: with floats of a `dtype`, or of their own; the second of two has large gradients."""

    seed: int
    dtype: torch.dtype | None
    positive: bool
    device: torch.device


def _shrink(op: Op, operand_types: Types, result_types: Types) -> tuple[Op, Types, Types]:
    """Replace each large size by a small one, the same wherever it occurs, among the arguments too.

    Whether that still is a sound call shows when it runs: the results must have the shrunken shapes.
    """
    sizes = {size for kind in operand_types + result_types for size in kind.shape if size > _SMALL}
    small = dict(zip(sorted(sizes), _SHRUNK, strict=False))

    def swap(arg: Arg) -> Arg:
        return small.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg

    def shrunk(kinds: Types) -> Types:
        return tuple(replace(kind, shape=tuple(small.get(size, size) for size in kind.shape)) for kind in kinds)

    return op.map_args(swap), shrunk(operand_types), shrunk(result_types)


def _make_trial(op: Op, operand_types: Types, result_types: Types, draws: _Draws) -> _WholeRun | None:
    generator = torch.Generator().manual_seed(draws.seed)
    names = op.operands

    def call(operands: Sequence[Tensor]) -> list[Tensor]:
        returned = run_op(op, dict(zip(names, operands, strict=True)))
        return [part for part in returned if isinstance(part, Tensor)]

    try:
        operands = tuple(_draw(kind, generator, draws) for kind in operand_types)
        results = call(_leaves(operands, requires_grad=False))
        again = call(_leaves(operands, requires_grad=False))
    except Exception:  # noqa: BLE001  (a foreign op may raise anything; it then runs whole)
        return None
    if [tuple(result.shape) for result in results] != [kind.shape for kind in result_types]:
        return None
    if not all(map(_is_telling, results)):
        return None
    tolerance = max((_tolerance(part) for part in (*operands, *results)), default=0.0)
    if not all(_is_close(a, b, tolerance) for a, b in zip(results, again, strict=True)):
        return None  # it draws random numbers
    # Backward may do other things with large gradients, such as clip them.
    seeds = tuple(
        _draw_seed(part, generator, scale=1e6 if draws.seed and draws.dtype == torch.float64 else 1.0)
        for part in results
    )
    gradients = _backward(call, operands, seeds)
    if not all(map(_is_telling, gradients or ())):
        return None
    zeros = tuple(torch.zeros_like(part) for part in operands)
    return _WholeRun(call, operands, tuple(results), seeds, gradients or zeros, gradients is not None, tolerance)


def _draw(kind: TensorType, generator: torch.Generator, draws: _Draws) -> Tensor:
    """Normal numbers, or their absolute values; integers are 0 or 1: most ops take them for an index, class or flag."""
    dtype: torch.dtype = getattr(torch, kind.dtype)
    if kind.is_floating:
        drawn = torch.randn(kind.shape, generator=generator, dtype=torch.float64)
        return (drawn.abs() if draws.positive else drawn).to(draws.device, draws.dtype or dtype)
    return torch.randint(0, 2, kind.shape, generator=generator).to(draws.device, dtype)


def _draw_seed(result: Tensor, generator: torch.Generator, scale: float) -> Tensor:
    """A gradient for `result`; integers have none and stand for themselves."""
    if not result.is_floating_point():
        return result
    return (scale * torch.randn(result.shape, generator=generator, dtype=torch.float64)).to(result)


def _tolerance(part: Tensor) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(part.dtype, 3e-2) if part.is_floating_point() else 0.0


def _leaves(tensors: Sequence[Tensor], *, requires_grad: bool) -> list[Tensor]:
    return [part.detach().clone().requires_grad_(requires_grad and part.is_floating_point()) for part in tensors]


def _backward(
    call: Callable[[Sequence[Tensor]], list[Tensor]], operands: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """The operands' gradients (zeros where none flows), or None if the op has no backward."""
    leaves = _leaves(operands, requires_grad=True)
    try:
        with torch.enable_grad():
            pairs = [(out, seed) for out, seed in zip(call(leaves), seeds, strict=True) if out.requires_grad]
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            if not pairs:
                return None
            results: Sequence[Tensor | None] = torch.autograd.grad(
                [o for o, _ in pairs], trained, [s for _, s in pairs], allow_unused=True
            )
    except Exception:  # noqa: BLE001  (as above)
        return None
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(trained, results, strict=True)}
    gradients = [by_leaf.get(id(leaf)) for leaf in leaves]
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))


# ---------------------------------------------------------------- candidates


def _candidates(trial: _WholeRun) -> Iterator[tuple[Placement, ...]]:
    """Ways to place the operands, those that slice most first; without slices, those with terms."""
    sizes = sorted({size for part in trial.operands for size in part.shape if size > 1}, reverse=True)
    for size in sizes:
        choices = [_choices(part, size) for part in trial.operands]
        ways = [way for way in islice(product(*choices), 4 * MAX_CANDIDATES) if any(p.is_shard for p in way)]
        yield from sorted(ways, key=lambda way: (-sum(p.is_shard for p in way), sum(p == PARTIAL for p in way)))
    terms = [(PARTIAL, BROADCAST) if part.is_floating_point() else (BROADCAST,) for part in trial.operands]
    yield from (way for way in product(*terms) if PARTIAL in way)


def _aligned_candidates(trial: _WholeRun) -> Iterator[tuple[Placement, ...]]:
    """Slices that fit together whatever an op computes, as a kernel may read beyond others: of the first dims, which
    count rows and tokens, in all operands that have these and are no vectors of weights; of any dim of operands that
    all have one shape.
    """
    first = trial.operands[0].shape
    for dim in range(min(2, len(first))):
        yield tuple(
            shard(dim)
            if part.shape[: dim + 1] == first[: dim + 1] and (part.dim() > 1 or not part.is_floating_point())
            else BROADCAST
            for part in trial.operands
        )
    if all(part.shape == first for part in trial.operands):
        yield from ((shard(dim),) * len(trial.operands) for dim in range(len(first)))


def _choices(part: Tensor, size: int) -> list[Placement]:
    slices = [shard(dim) for dim, own in enumerate(part.shape) if own == size]
    return [*slices, BROADCAST, *((PARTIAL,) if part.is_floating_point() else ())]


def _try(
    trials: Sequence[_WholeRun], placements: tuple[Placement, ...], operand_types: Types, result_types: Types
) -> Option | None:
    """The option with these operand placements if both trials agree with it on every number of slices."""
    sliced = [part.shape[p.dim] for part, p in zip(trials[0].operands, placements, strict=True) if p.is_shard]
    counts = [num for num in (2, 3) if all(size % num == 0 for size in sliced)]
    results: set[tuple[Placement, ...] | None] = set()
    for trial in trials:
        results |= {_outcome(trial, placements, num) for num in counts}
    if len(results) != 1 or (outcome := results.pop()) is None:
        return None
    if all(p == REPLICATE for p in outcome) or (PARTIAL in placements and PARTIAL not in outcome):
        return None
    pairs = [*zip(operand_types, placements, strict=True), *zip(result_types, outcome, strict=True)]
    extent = math.gcd(*(kind.shape[p.dim] for kind, p in pairs if p.is_shard)) if sliced else 0
    return None if extent == 1 else Option(_name(placements), placements, outcome, extent)


def _name(placements: tuple[Placement, ...]) -> str:
    """``"x0d1_x2d0"``: dim 1 of operand 0 with dim 0 of operand 2; ``"+0"``: operand 0 is terms."""
    slices = "_".join(f"x{index}d{p.dim}" for index, p in enumerate(placements) if p.is_shard)
    terms = [str(index) for index, p in enumerate(placements) if p == PARTIAL]
    return slices or ("+" if len(terms) == len(placements) else "+" + "".join(terms))


# ---------------------------------------------------------------- one candidate on slices


def _outcome(trial: _WholeRun, placements: tuple[Placement, ...], num_slices: int) -> tuple[Placement, ...] | None:
    """The placements of the results if `num_slices` devices reproduce the trial, else None."""
    local = [_split(part, p, num_slices) for part, p in zip(trial.operands, placements, strict=True)]
    try:
        with torch.no_grad():
            runs = [
                trial.run(_leaves([parts[rank] for parts in local], requires_grad=False)) for rank in range(num_slices)
            ]
    except Exception:  # noqa: BLE001  (the op does not take such slices)
        return None
    outcome: list[Placement] = []
    for index, whole in enumerate(trial.results):
        joined = _recombine([run[index] for run in runs], whole, trial.tolerance)
        if joined is None:
            return None
        outcome.append(joined)
    if trial.has_backward and not _gradients_agree(trial, placements, tuple(outcome), local, num_slices):
        return None
    return tuple(outcome)


def _recombine(parts: list[Tensor], whole: Tensor, tolerance: float) -> Placement | None:
    """How `parts` make `whole`: by joining along a dim, by adding, or each alone."""
    shape, local = tuple(whole.shape), tuple(parts[0].shape)
    if any(tuple(part.shape) != local for part in parts) or len(shape) != len(local):
        return None
    if shape == local:
        if all(_is_close(part, whole, tolerance) for part in parts):
            return REPLICATE
        total = torch.stack(parts).sum(0)
        return PARTIAL if whole.is_floating_point() and _is_close(total, whole, tolerance) else None
    dims = [dim for dim, (a, b) in enumerate(zip(shape, local, strict=True)) if a != b]
    if len(dims) == 1 and _is_close(torch.cat(parts, dims[0]), whole, tolerance):
        return shard(dims[0])
    return None


def _gradients_agree(
    trial: _WholeRun,
    placements: tuple[Placement, ...],
    outcome: tuple[Placement, ...],
    local: list[list[Tensor]],
    num_slices: int,
) -> bool:
    """Feed each device the results' gradients in the form that `outcome` demands, and join the operands'
    gradients.
    """
    seeds = [_split(seed, _of_gradient(p), num_slices) for seed, p in zip(trial.seeds, outcome, strict=True)]
    results: list[tuple[Tensor, ...]] = []
    for rank in range(num_slices):
        gradients = _backward(trial.run, [parts[rank] for parts in local], [parts[rank] for parts in seeds])
        if gradients is None:
            return False
        results.append(gradients)
    for index, (whole, placement) in enumerate(zip(trial.gradients, placements, strict=True)):
        parts = [gradients[index] for gradients in results]
        form = _of_gradient(placement)
        joined = torch.cat(parts, form.dim) if form.is_shard else sum(parts) if form == PARTIAL else parts[0]
        is_same = form != REPLICATE or all(_is_close(part, whole, trial.tolerance) for part in parts)
        if not is_same or not _is_close(torch.as_tensor(joined), whole, trial.tolerance):
            return False
    return True


def _of_gradient(placement: Placement) -> Placement:
    """The placement, as a plain value, that the gradient of a value with `placement` has."""
    return {BROADCAST: PARTIAL, PARTIAL: REPLICATE}.get(placement, placement)


def _split(whole: Tensor, placement: Placement, num_slices: int) -> list[Tensor]:
    if placement.is_shard:
        return [part.contiguous() for part in whole.chunk(num_slices, placement.dim)]
    if placement == PARTIAL and whole.is_floating_point():
        generator = torch.Generator().manual_seed(num_slices)
        terms = [torch.randn(whole.shape, generator=generator).to(whole) for _ in range(num_slices - 1)]
        return [*terms, whole - sum(terms)]
    return [whole] * num_slices


def _is_telling(result: Tensor) -> bool:
    """Whether enough of it are numbers: what is NaN or infinite however an op is split says nothing about the split."""
    finite = torch.isfinite(result.detach())
    return bool(finite.double().mean() >= _TELLING) if result.numel() else True


def _is_close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Equal up to `tolerance` times the largest finite entry, with NaN and infinities in the same places."""
    if got.shape != want.shape:
        return False
    if not want.is_floating_point():
        return torch.equal(got, want)
    largest = want.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max() if want.numel() else 0.0
    scale = max(float(largest), 1.0)
    return torch.allclose(got, want, rtol=0.0, atol=tolerance * scale, equal_nan=True)
