"""What the first call of each op in a layer takes beyond a later one, because its code is in a far cache by then.

An op whose family (`aten.add`, products of matrices, ...) has not run yet in its layer's forward takes
``first/<family>/forward`` more, over the bytes that the device has moved since the layer, or the one before of its
kind, ran last; the layer's first op also takes what entering its program costs.  In backward the same for ops that come
last in the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from autopar.cost.profile import Curve
from autopar.cost.work import Work, packet_name
from autopar.program import Layer, Op, Program

__all__ = ["FirstCalls"]


class FirstCalls:
    """Seconds of first calls in one program.

    Args:
        curves: of a profile; without ``first/...`` among them nothing is added.
        program: whose layers the ops are in.
        num_devices: among which each value is cut, to know what one of them moves.
    """

    def __init__(self, curves: Mapping[str, Curve], program: Program, num_devices: int) -> None:
        """Find which op is the first of its family in its layer, and which the last."""
        self._curves = {key.removeprefix("first/"): curve for key, curve in curves.items() if key.startswith("first/")}
        self._program = program  # keeps the ops alive, by whose identity places are known
        self._entering: dict[int, float] = {}
        self._ahead: dict[int, float] = {}
        self._back: dict[int, float] = {}
        if not self._curves:
            return
        counts = Counter(layer.kind for layer in program.layers)
        moved = sum(_moved_bytes(program, layer) for layer in program.layers) / num_devices
        for layer in program.layers:
            between = max(1.0, moved / counts[layer.kind])
            self._entering |= {id(op): between for op in layer.ops[:1]}
            self._ahead |= {id(op): between for op in _firsts(layer.ops)}
            self._back |= {id(op): between for op in _firsts(reversed(layer.ops))}

    def seconds(self, op: Op, work: Work) -> tuple[float, float]:
        """What a call of `op` takes beyond its usual seconds, forward and backward."""
        family = self._family(op, work)
        entering_s = self._seconds("program", "forward", self._entering.get(id(op)))
        ahead_s = self._seconds(family, "forward", self._ahead.get(id(op)))
        return entering_s + ahead_s, self._seconds(family, "backward", self._back.get(id(op)))

    def _seconds(self, family: str, direction: str, between: float | None) -> float:
        curve = self._curves.get(f"{family}/{direction}") if between is not None else None
        return curve.seconds(min(between, curve.points[-1].amount)) if curve and between else 0.0

    def _family(self, op: Op, work: Work) -> str:
        name = packet_name(op.target)
        if work.kind == "attention":
            return "attention"
        if work.kind == "matmul":
            return "convolution" if "conv" in name else "matmul" if work.extents else "batched"
        if f"{name}/forward" in self._curves:
            return name
        return "aten.transpose" if work.kind == "view" else "aten.mul"


def _firsts(ops: Iterable[Op]) -> Iterable[Op]:
    found: dict[str, Op] = {}
    for op in ops:
        found.setdefault(packet_name(op.target), op)
    return found.values()


def _moved_bytes(program: Program, layer: Layer) -> float:
    return float(sum(program.type_of(name).num_bytes for op in layer.ops for name in (*op.operands, *op.results)))
