"""Whole layers that were timed, as corrections of the prices of their ops.

A layer's compute is the sum of its ops' seconds times a factor for each op on its local types.  Factors are such that
the sums of all timed layers are what was measured: starting with the kind's median ratio, every timed layer in turn
scales those of its ops by what is missing (iterative proportional fitting).  Ops of a timed kind on other local types
are scaled by the kind's median ratio; other kinds stay as they are.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cluster import OpTime
from autopar.program import Arg, Layer, Op, Program, Ref, TensorType

__all__ = ["LayerCorrections", "LocalOp", "TimedLayer", "layer_key"]

# How the inputs of a timed layer are made up; what was measured with others is measured again.  2: documents have the
# lengths that prices assume; before, they were of about two tokens each.
_INPUTS = 2
_SWEEPS = 40  # of iterative proportional fitting: it converges geometrically, and a sweep takes no time
_Factors = tuple[float, float]


@dataclass(frozen=True)
class LocalOp:
    """An op of a layer as one device runs it: local types, and the special kernels that run it."""

    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimedLayer:
    """The compute of one microbatch of a layer under a strategy: what its ops run on, and the seconds measured."""

    kind: int
    ops: tuple[LocalOp, ...]
    forward_s: float
    backward_s: float


def layer_key(layer: Layer, ops: Sequence[LocalOp], *, compiled: bool) -> str:
    """Identifies what a device computes for a layer: the layer's structure, local types, kernels, compiled or not."""
    numbers: dict[str, int] = {}

    def shape_of(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return ("ref", numbers.setdefault(arg.name, len(numbers)))
        return tuple(map(shape_of, arg)) if isinstance(arg, tuple) else arg

    lines: list[object] = [_INPUTS, compiled, len(layer.inputs), len(layer.state)]
    for op, local in zip(layer.ops, ops, strict=True):
        kwargs = tuple((name, shape_of(arg)) for name, arg in op.kwargs)
        lines.append((op.target, tuple(map(shape_of, op.args)), kwargs, _types(local.operands), _types(local.results)))
        lines.append(local.kernels)
        for name in op.results:
            numbers.setdefault(name, len(numbers))
    lines.append(tuple(numbers.get(name, -1) for name in layer.outputs))
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:24]


def _types(types: Sequence[TensorType]) -> tuple[object, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in types)


_State = tuple[int, int, tuple[TensorType, ...], tuple[TensorType, ...]]


class LayerCorrections:
    """Factors on the prices of ops.

    Args:
        program: whose layers were timed.
        timed: each of them.
        price: seconds of an op on local types, uncorrected.
    """

    def __init__(
        self,
        program: Program,
        timed: Sequence[TimedLayer],
        price: Callable[[Op, tuple[TensorType, ...], tuple[TensorType, ...], bool], OpTime],
    ) -> None:
        """Fit the factors."""
        self._places = {id(op): (layer.kind, at) for layer in program.layers for at, op in enumerate(layer.ops)}
        self._program = program  # keeps the ops alive, by whose identity places are known
        self._ratios: dict[int, _Factors] = {}
        self._factors: dict[_State, list[float]] = {}
        plain: dict[_State, _Factors] = {}
        states = [_states(layer) for layer in timed]
        firsts = {layer.kind: layer for layer in program.kinds}
        for layer, own in zip(timed, states, strict=True):
            for state, op in zip(own, firsts[layer.kind].ops, strict=True):
                is_differentiable = any(program.values[name].requires_grad for name in op.results)
                result = price(op, state[2], state[3], is_differentiable)
                plain[state] = result.forward_s, result.backward_s
        for kind in {layer.kind for layer in timed}:
            rows = [(layer, own) for layer, own in zip(timed, states, strict=True) if layer.kind == kind]
            ratios = [
                tuple(_ratio(_seconds(layer)[way], sum(plain[state][way] for state in own)) for way in (0, 1))
                for layer, own in rows
            ]
            self._ratios[kind] = statistics.median(r[0] for r in ratios), statistics.median(r[1] for r in ratios)
            for _, own in rows:
                for state in own:
                    self._factors[state] = list(self._ratios[kind])
            for _ in range(_SWEEPS if len(rows) > 1 else 1):
                for layer, own in rows:
                    self._scale(layer, own, plain)

    def _scale(self, layer: TimedLayer, own: Sequence[_State], plain: dict[_State, _Factors]) -> None:
        for way, measured_s in enumerate(_seconds(layer)):
            missing = _ratio(measured_s, sum(plain[state][way] * self._factors[state][way] for state in own))
            for state in set(own):
                self._factors[state][way] *= missing

    def correct(
        self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], time: OpTime
    ) -> OpTime:
        """`time` with the op's factors; its source is then ``"layers"``, or ``"scaled"`` by others of the kind."""
        place = self._places.get(id(op))
        if place is None or place[0] not in self._ratios:
            return time
        own = self._factors.get((*place, operands, results))
        ahead, back = own or self._ratios[place[0]]
        return OpTime(time.forward_s * ahead, time.backward_s * back, "layers" if own else "scaled")


def _states(layer: TimedLayer) -> list[_State]:
    return [(layer.kind, at, local.operands, local.results) for at, local in enumerate(layer.ops)]


def _seconds(layer: TimedLayer) -> _Factors:
    return layer.forward_s, layer.backward_s


def _ratio(measured_s: float, summed_s: float) -> float:
    return measured_s / summed_s if measured_s > 0 and summed_s > 0 else 1.0
