"""The ways to run one op on a mesh: a combination of options, one per axis, with their prices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.placement import Axis, Layout, Placement, mesh_axes
from autopar.program import Op, Option, Program, TensorType, itemsize_bytes
from autopar.search.flows import TimeView, option_of, options_of

__all__ = ["Allowed", "KernelRun", "OpState", "assigned_state", "kernel_runs", "op_states"]

# Whether an op may use an option on the mesh axis of this index.
Allowed = Callable[[Op, int, Option], bool]


@dataclass(frozen=True)
class KernelRun:
    """One collective inside a special kernel, per microbatch."""

    kind: str
    phase: str
    axis: Axis
    num_bytes: float


@dataclass(frozen=True)
class OpState:
    """An op with a factor per axis: the layouts of its operands and results, and their types on one
    device.
    """

    options: tuple[Option, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]

    @property
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
    choices = [
        [o for o in every if allowed is None or allowed(op, axis, o)] if size > 1 else [whole]
        for axis, size in enumerate(mesh)
    ]
    types = _microbatch_types(program, op, index, view)
    time = {view.factors[index]: view.num_microbatches}
    states = (_make_state(options, mesh, types, time) for options in itertools.product(*choices))
    return tuple(state for state in states if state is not None)


def assigned_state(
    program: Program, op: Op, index: int, factors: tuple[str, ...], mesh: tuple[int, ...], view: TimeView
) -> OpState:
    """The state of these factors.

    Raises:
        ValueError: they don't divide on this mesh.
        KeyError: the op has no such factor.
    """
    options = tuple(option_of(op, factor) for factor in factors)
    time = {view.factors[index]: view.num_microbatches}
    state = _make_state(options, mesh, _microbatch_types(program, op, index, view), time)
    if state is None:
        raise ValueError(f"{op.name} ({op.target}) can't split {factors} on mesh {mesh}: sizes don't divide")
    return state


_Types = tuple[tuple[TensorType, ...], tuple[TensorType, ...]]


def _microbatch_types(program: Program, op: Op, index: int, view: TimeView) -> _Types:
    """Types of operands and results in one microbatch."""
    operands = tuple(
        view.cut(program.type_of(n), p) for n, p in zip(op.operands, view.operands[index], strict=True)
    )
    results = tuple(
        view.cut(program.type_of(n), p) for n, p in zip(op.results, view.results[index], strict=True)
    )
    return operands, results


def _make_state(
    options: tuple[Option, ...], mesh: tuple[int, ...], types: _Types, time: dict[str, int]
) -> OpState | None:
    """The state, or None where it is illegal; `time` is the factor that microbatches cut, and into how
    many.
    """
    if len({option.kernel for option in options if option.kernel}) > 1:
        return None
    operand_types, result_types = types
    degrees = dict(time)
    for option, size in zip(options, mesh, strict=True):
        if option.extent:
            degrees[option.factor] = degrees.get(option.factor, 1) * size
            if option.extent % degrees[option.factor]:
                return None
    local_operands = _local_types(operand_types, [option.operands for option in options], mesh)
    local_results = _local_types(result_types, [option.results for option in options], mesh)
    if local_operands is None or local_results is None:
        return None
    operands = tuple(tuple(o.operands[i] for o in options) for i in range(len(operand_types)))
    results = tuple(tuple(o.results[i] for o in options) for i in range(len(result_types)))
    return OpState(options, operands, results, local_operands, local_results)


def _local_types(
    types: tuple[TensorType, ...], placements: list[tuple[Placement, ...]], mesh: tuple[int, ...]
) -> tuple[TensorType, ...] | None:
    local: list[TensorType] = []
    for position, tensor in enumerate(types):
        sizes = list(tensor.shape)
        for axis, each in enumerate(placements):
            if each[position].is_shard:
                whole, rest = divmod(sizes[each[position].dim], mesh[axis])
                if rest:
                    return None
                sizes[each[position].dim] = whole
        local.append(TensorType(tuple(sizes), tensor.dtype))
    return tuple(local)


def kernel_runs(state: OpState, mesh: tuple[int, ...]) -> tuple[KernelRun, ...]:
    """The collectives that the state's special kernel runs per microbatch: on each axis of its factor in
    turn.
    """
    runs: list[KernelRun] = []
    types = state.operand_types + state.result_types
    for option, axis in zip(state.options, mesh_axes(mesh), strict=True):
        for collective in option.collectives:
            shape = types[collective.operand].shape
            elements = math.prod(size for dim, size in enumerate(shape) if dim not in collective.drop_dims)
            num_bytes = elements * itemsize_bytes(collective.dtype) * collective.count
            runs.append(KernelRun(collective.kind, collective.phase, axis, num_bytes))
    return tuple(runs)
