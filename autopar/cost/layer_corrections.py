"""Corrects the prices of ops by measured times of whole layers.

A layer's compute is the sum of its ops' seconds times a factor for each op on its local types.  The factors are chosen
so that the sums of all timed layers equal the measurements: starting with the kind's median ratio, every timed layer in
turn scales the factors of its ops by the ratio that is missing (iterative proportional fitting).  Ops of a timed kind
on other local types are scaled by the kind's median ratio; other kinds are not corrected.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cluster import OpTime
from autopar.program import Arg, Layer, Op, Program, Ref, TensorType

__all__ = ["LayerCorrections", "LocalOp", "TimedLayer", "layer_key"]

# The version of the inputs that are made up for timed layers: times with another version are measured again.
# 2: documents have the lengths that prices assume; before, they had about two tokens each.
_INPUTS_VERSION = 2
_SWEEPS = 40  # of iterative proportional fitting: it converges geometrically, and a sweep costs almost nothing
_Factors = tuple[float, float]


@dataclass(frozen=True)
class LocalOp:
    """An op of a layer on one device: its local types, and the special kernels that run it."""

    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimedLayer:
    """The measured compute of one microbatch of a layer under a strategy: its local ops and their seconds."""

    kind: int
    ops: tuple[LocalOp, ...]
    forward_s: float
    backward_s: float


def layer_key(layer: Layer, ops: Sequence[LocalOp], *, compiled: bool) -> str:
    """A key for what a device computes for a layer: the layer's structure, local types, kernels, compiled or not."""
    numbers: dict[str, int] = {}

    def shape_of(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return ("ref", numbers.setdefault(arg.name, len(numbers)))
        return tuple(map(shape_of, arg)) if isinstance(arg, tuple) else arg

    lines: list[object] = [_INPUTS_VERSION, compiled, len(layer.inputs), len(layer.state)]
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
    """The factors on the prices of ops.

    Args:
        program: the program whose layers were timed.
        timed: the timed layers.
        price: returns the uncorrected seconds of an op on local types.
    """

    def __init__(
        self,
        program: Program,
        timed: Sequence[TimedLayer],
        price: Callable[[Op, tuple[TensorType, ...], tuple[TensorType, ...], bool], OpTime],
    ) -> None:
        """Fit the factors."""
        self._places = {id(op): (layer.kind, at) for layer in program.layers for at, op in enumerate(layer.ops)}
        self._program = program  # keeps the ops alive, whose ids are keys of `_places`
        self._ratios: dict[int, _Factors] = {}
        self._factors: dict[_State, list[float]] = {}
        plain: dict[_State, _Factors] = {}
        states = [_states(layer) for layer in timed]
        firsts = {layer.kind: layer for layer in program.kinds}
        for layer, layer_states in zip(timed, states, strict=True):
            for state, op in zip(layer_states, firsts[layer.kind].ops, strict=True):
                is_differentiable = any(program.values[name].requires_grad for name in op.results)
                time = price(op, state[2], state[3], is_differentiable)
                plain[state] = time.forward_s, time.backward_s
        for kind in {layer.kind for layer in timed}:
            rows = [(layer, of_layer) for layer, of_layer in zip(timed, states, strict=True) if layer.kind == kind]
            ratios = [
                tuple(_ratio(_seconds(layer)[way], sum(plain[state][way] for state in of_layer)) for way in (0, 1))
                for layer, of_layer in rows
            ]
            self._ratios[kind] = statistics.median(r[0] for r in ratios), statistics.median(r[1] for r in ratios)
            for _, layer_states in rows:
                for state in layer_states:
                    self._factors[state] = list(self._ratios[kind])
            for _ in range(_SWEEPS if len(rows) > 1 else 1):
                for layer, layer_states in rows:
                    self._scale(layer, layer_states, plain)

    def _scale(self, layer: TimedLayer, states: Sequence[_State], plain: dict[_State, _Factors]) -> None:
        for way, measured_s in enumerate(_seconds(layer)):
            missing = _ratio(measured_s, sum(plain[state][way] * self._factors[state][way] for state in states))
            for state in set(states):
                self._factors[state][way] *= missing

    def correct(
        self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], time: OpTime
    ) -> OpTime:
        """Return `time` times the op's factors.

        Its source becomes ``"layers"``, or ``"scaled"`` if only other layers of the kind were timed.
        """
        place = self._places.get(id(op))
        if place is None or place[0] not in self._ratios:
            return time
        factors = self._factors.get((*place, operands, results))
        forward, backward = factors or self._ratios[place[0]]
        return OpTime(time.forward_s * forward, time.backward_s * backward, "layers" if factors else "scaled")


def _states(layer: TimedLayer) -> list[_State]:
    return [(layer.kind, at, local.operands, local.results) for at, local in enumerate(layer.ops)]


def _seconds(layer: TimedLayer) -> _Factors:
    return layer.forward_s, layer.backward_s


def _ratio(measured_s: float, summed_s: float) -> float:
    return measured_s / summed_s if measured_s > 0 and summed_s > 0 else 1.0
