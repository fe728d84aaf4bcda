"""The ways to run one op on a mesh: a combination of options, one per axis, with their prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from autopar.errors import PlanMismatchError
from autopar.placement import Axis, Layout, Placement, mesh_axes
from autopar.program import Op, Option, Program, TensorType, itemsize_bytes
from autopar.step.layer.value_flows import TimeView, option_of, options_of
from autopar.step.prices import CollectiveCall, Prices

__all__ = ["Allowed", "OpState", "assigned_state", "kernel_calls", "kernel_hidden_s", "kernel_runs", "op_states"]

# Whether an op may use an option on the mesh axis of this index.
Allowed = Callable[[Op, int, Option], bool]


@dataclass(frozen=True)
class OpState:
    """An op with a factor per axis: the layouts of its operands and results, and their types on one device.

    `work_types` are those of the operands that a device computes with: slices that travel are all of them.
    """

    options: tuple[Option, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    work_types: tuple[TensorType, ...]

    @cached_property
    def has_kernel(self) -> bool:
        """Whether a special kernel runs the op."""
        return any(option.kernel for option in self.options)

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """The factor that each axis splits."""
        return tuple(option.factor for option in self.options)


def op_states(
    program: Program,
    op: Op,
    index: int,
    mesh: tuple[int, ...],
    view: TimeView,
    allowed: Allowed | None = None,
) -> tuple[OpState, ...]:
    """Every legal combination of options: factors and local shapes divide evenly, and one kernel runs the op
    at most.

    An axis of one device takes the option ``"-"``.
    """
    every = options_of(op)
    whole = option_of(op, "-")
    choices = tuple(
        (every if allowed is None else tuple(o for o in every if allowed(op, axis, o))) if size > 1 else (whole,)
        for axis, size in enumerate(mesh)
    )
    types = _microbatch_types(program, op, index, view)
    time = (view.factors[index], view.num_microbatches)
    return _make_states(choices, mesh, types, time)


def assigned_state(
    program: Program, op: Op, index: int, factors: tuple[str, ...], mesh: tuple[int, ...], view: TimeView
) -> OpState:
    """The state of these factors.

    Raises:
        PlanMismatchError: the op has no such factor, or they don't divide on this mesh.
    """
    options = tuple(option_of(op, factor) for factor in factors)
    time = (view.factors[index], view.num_microbatches)
    types = _microbatch_types(program, op, index, view)
    states = _make_states(tuple((option,) for option in options), mesh, types, time)
    if not states:
        raise PlanMismatchError(
            f"op {op.name} ({op.target}) can't split {' '.join(factors)} on mesh {mesh}: sizes don't divide, or two "
            "special kernels would run it at once, or one ring on two axes"
        )
    return states[0]


_Types = tuple[tuple[TensorType, ...], tuple[TensorType, ...]]


def _microbatch_types(program: Program, op: Op, index: int, view: TimeView) -> _Types:
    """Types of operands and results in one microbatch."""
    operands = tuple(view.cut(program.type_of(n), p) for n, p in zip(op.operands, view.operands[index], strict=True))
    results = tuple(view.cut(program.type_of(n), p) for n, p in zip(op.results, view.results[index], strict=True))
    return operands, results


class _Partial(NamedTuple):
    """Options for the outermost axes, and what they leave: local types, slices per factor, the kernel used."""

    options: tuple[Option, ...]
    local: _Types
    degrees: dict[str, int]
    kernel: str


@lru_cache(maxsize=1024)  # many ops of a layer have the same types and options
def _make_states(
    choices: tuple[tuple[Option, ...], ...], mesh: tuple[int, ...], types: _Types, time: tuple[str, int]
) -> tuple[OpState, ...]:
    """The legal states in the order of the choices, the last axis running fastest; `time` is the factor that
    microbatches cut, and into how many.

    States with equal local types share them as objects, so that these can be told apart by identity.
    """
    partials = [_Partial((), types, dict([time]), "")]
    known: dict[_Types, _Types] = {}
    for options, size in zip(choices, mesh, strict=True):
        cuts: dict[tuple[int, int], _Types | None] = {}
        partials = [
            longer
            for partial in partials
            for option in options
            if (longer := _extend(partial, option, size, cuts, known)) is not None
        ]
    return tuple(_finish(partial, mesh) for partial in partials)


def _extend(
    partial: _Partial,
    option: Option,
    size: int,
    cuts: dict[tuple[int, int], _Types | None],
    known: dict[_Types, _Types],
) -> _Partial | None:
    """`partial` with this option on the next axis, or None where that is illegal."""
    if option.kernel and partial.kernel and (option.kernel != partial.kernel or option.is_on_one_axis):
        return None
    degrees = partial.degrees
    if option.extent:
        degree = degrees.get(option.factor, 1) * size
        if option.extent % degree:
            return None
        degrees = {**degrees, option.factor: degree}
    key = id(partial.local), id(option)
    if key not in cuts:
        operands = _cut_types(partial.local[0], option.operands, size)
        results = _cut_types(partial.local[1], option.results, size)
        cuts[key] = None
        if operands is not None and results is not None:
            cuts[key] = known.setdefault((operands, results), (operands, results))
    local = cuts[key]
    if local is None:
        return None
    return _Partial((*partial.options, option), local, degrees, option.kernel or partial.kernel)


def _cut_types(
    types: tuple[TensorType, ...], placements: tuple[Placement, ...], size: int
) -> tuple[TensorType, ...] | None:
    local: list[TensorType] = []
    for tensor, placement in zip(types, placements, strict=True):
        if not placement.is_shard or size == 1:
            local.append(tensor)
            continue
        dim, shape = placement.dim, tensor.shape
        whole, rest = divmod(shape[dim], size)
        if rest:
            return None
        local.append(TensorType((*shape[:dim], whole, *shape[dim + 1 :]), tensor.dtype))
    return tuple(local)


def _finish(partial: _Partial, mesh: tuple[int, ...]) -> OpState:
    options, (operand_types, result_types) = partial.options, partial.local
    operands = tuple(zip(*(option.operands for option in options), strict=True))
    results = tuple(zip(*(option.results for option in options), strict=True))
    work_types = operand_types
    for option, size in zip(options, mesh, strict=True):
        for place in option.traveling:
            work_types = (
                *work_types[:place],
                _joined(work_types[place], option.operands[place], size),
                *work_types[place + 1 :],
            )
    return OpState(options, operands, results, operand_types, result_types, work_types)


def _joined(tensor: TensorType, cut: Placement, size: int) -> TensorType:
    """So many slices together."""
    shape = (*tensor.shape[: cut.dim], tensor.shape[cut.dim] * size, *tensor.shape[cut.dim + 1 :])
    return TensorType(shape, tensor.dtype)


def kernel_runs(state: OpState, mesh: tuple[int, ...]) -> tuple[CollectiveCall, ...]:
    """The collectives that the state's special kernel runs per microbatch: on each axis of its factor in turn."""
    return tuple(call for call, times in kernel_calls(state, mesh) for _ in range(times))


def kernel_calls(state: OpState, mesh: tuple[int, ...]) -> Iterator[tuple[CollectiveCall, int]]:
    """These, and how often each runs in a row.

    A ring on an axis runs once for each step of those further out (`autopar.lower.communication.rings`).
    """
    if not any(option.collectives for option in state.options):
        return
    types = state.operand_types + state.result_types
    together = math.prod(size for option, size in zip(state.options, mesh, strict=True) if option.kernel)
    outermost = next((axis for option, axis in zip(state.options, mesh_axes(mesh), strict=True)
                      if option.kernel and axis.size > 1), None)  # fmt: skip
    rounds = reached = 1
    for option, axis in zip(state.options, mesh_axes(mesh), strict=True):
        reached *= axis.size if option.kernel else 1
        for collective in option.collectives if axis.size > 1 else ():
            shape = types[collective.operand].shape
            elements = math.prod(size for dim, size in enumerate(shape) if dim not in collective.drop_dims)
            growth = dict(collective.growth).get(together, 1.0) * dict(collective.reached).get(reached, 1.0)
            element_bytes = itemsize_bytes(collective.dtype) * collective.count * growth
            full, rest = divmod(elements, collective.piece) if collective.piece else (0, elements)
            overlap_parts = rounds * axis.size if collective.is_ring and option.traveling else 0
            times = rounds * (axis.size - 1) if collective.is_ring else 1
            for size, pieces in ((collective.piece, full), (rest, 1)):
                if size and pieces:
                    pause = collective.pause if axis == outermost else 0
                    call = CollectiveCall(
                        collective.kind, collective.phase, axis, size * element_bytes, overlap_parts, pause
                    )
                    yield call, pieces * times
                    if collective.returns:
                        yield call._replace(overlap_parts=0), pieces * rounds
        rounds *= axis.size if option.traveling else 1


def kernel_hidden_s(
    calls: Sequence[tuple[CollectiveCall, int]], phase_s: Mapping[str, float], prices: Prices
) -> list[float]:
    """Seconds of each of `kernel_calls`, one time, that overlap with the kernel's compute, `phase_s` by phase.

    Of a ring of n devices, each step sends during one n-th of the compute; a device is then busy for the longer one
    of what it sends, and of what it computes and loses by sending (`Prices.interference`).  Rings on several axes send
    at the same time, on links of their own.
    """
    step_bytes: dict[tuple[str, Axis], float] = {}
    for call, _ in calls:
        if call.overlap_parts:
            step_bytes[call.phase, call.axis] = step_bytes.get((call.phase, call.axis), 0.0) + call.num_bytes
    hidden: list[float] = []
    for call, _ in calls:
        if not call.overlap_parts:
            hidden.append(0.0)
            continue
        computing_s = phase_s[call.phase] / call.overlap_parts * call.num_bytes / step_bytes[call.phase, call.axis]
        free = 1.0 - prices.interference(call.kind, call.axis)
        hidden.append(min(computing_s, free * prices.collective_s(call.kind, call.axis, call.num_bytes)))
    return hidden
