"""Corrects the prices of ops by measured times of whole layers.

A layer's compute is the sum of its ops' seconds times a factor for each op on its local types.  The factors are chosen
so that the sums of all timed layers equal the measurements: starting with the kind's median ratio, every timed layer in
turn scales the factors of its ops by the ratio that is missing (iterative proportional fitting).  Ops of a timed kind
on other local types are scaled by the kind's median ratio; other kinds are not corrected.

Attention by documents has a factor for each length that it was timed on, so that the price of its layer is what was
measured at both.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cluster import OpTime
from autopar.ops.attention import DOCUMENTS, document_length, with_document_length
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
    """The measured compute of one microbatch of a layer under a strategy: its local ops and their seconds.

    `document_length` is that of the documents that it was timed on; 0: the one that prices assume.
    """

    kind: int
    ops: tuple[LocalOp, ...]
    forward_s: float
    backward_s: float
    document_length: int = 0

    def timed_op(self, op: Op) -> Op:
        """`op` of the layer as it was timed."""
        has_own = self.document_length and op.target == DOCUMENTS
        return with_document_length(op, self.document_length) if has_own else op


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


_State = tuple[int, int, tuple[TensorType, ...], tuple[TensorType, ...], int]
"""Kind, place in the layer, types of operands and results; the expected length of documents, 0 where it is that of a
row or there are none."""


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
        self._places = {
            _identity(op): (layer.kind, at, op) for layer in program.layers for at, op in enumerate(layer.ops)
        }
        self._program = program  # keeps the ops alive, whose ids are keys of `_places`
        self._ratios: dict[int, _Factors] = {}
        self._factors: dict[_State, list[float]] = {}
        firsts = {layer.kind: layer for layer in program.kinds}

        def plain(layer: TimedLayer, state: _State, op: Op) -> _Factors:
            is_differentiable = any(program.values[name].requires_grad for name in op.results)
            time = price(layer.timed_op(op), state[2], state[3], is_differentiable)
            return time.forward_s, time.backward_s

        for kind in {layer.kind for layer in timed}:
            rows = [
                (layer, [(state, plain(layer, state, op)) for state, op in
                         zip(_states(layer, firsts[kind]), firsts[kind].ops, strict=True)])
                for layer in timed if layer.kind == kind
            ]  # fmt: skip
            ratios = [
                tuple(_ratio(_seconds(layer)[way], sum(plain_s[way] for _, plain_s in own)) for way in (0, 1))
                for layer, own in rows
            ]
            self._ratios[kind] = statistics.median(r[0] for r in ratios), statistics.median(r[1] for r in ratios)
            for _, own in rows:
                for state, _ in own:
                    self._factors[state] = list(self._ratios[kind])
            for _ in range(_SWEEPS if len(rows) > 1 else 1):
                for layer, own in rows:
                    self._scale(layer, own)

    def _scale(self, layer: TimedLayer, own: Sequence[tuple[_State, _Factors]]) -> None:
        for way, measured_s in enumerate(_seconds(layer)):
            missing = _ratio(measured_s, sum(plain_s[way] * self._factors[state][way] for state, plain_s in own))
            for state in {state for state, _ in own}:
                self._factors[state][way] *= missing

    def correct(
        self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], time: OpTime
    ) -> OpTime:
        """Return `time` times the op's factors.

        Its source becomes ``"layers"``, or ``"scaled"`` if only other layers of the kind were timed.
        """
        kind, at, expected = self._places.get(_identity(op), (-1, -1, op))
        if kind not in self._ratios:
            return time
        known = (self._factors.get((kind, at, operands, results, _length(each))) for each in (op, expected))
        factors = next(filter(None, known), None)
        forward, backward = factors or self._ratios[kind]
        return OpTime(time.forward_s * forward, time.backward_s * backward, "layers" if factors else "scaled")


def _identity(op: Op) -> int:
    """The same for an op and for what `with_document_length` makes of it."""
    return id(op.results) if op.target == DOCUMENTS else id(op)


def _length(op: Op) -> int:
    return document_length(op, 0) if op.target == DOCUMENTS else 0


def _states(layer: TimedLayer, first: Layer) -> list[_State]:
    lengths = (_length(layer.timed_op(op)) for op in first.ops)
    pairs = enumerate(zip(layer.ops, lengths, strict=True))
    return [(layer.kind, at, local.operands, local.results, length) for at, (local, length) in pairs]


def _seconds(layer: TimedLayer) -> _Factors:
    return layer.forward_s, layer.backward_s


def _ratio(measured_s: float, summed_s: float) -> float:
    return measured_s / summed_s if measured_s > 0 and summed_s > 0 else 1.0
