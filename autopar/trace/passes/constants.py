"""Constants: values that depend on no input, parameter or buffer.

A value can be looked at by its *core*: each dim along which it only repeats is cut to one entry.  What a model makes of
positions for every sample of a batch, [batch, 1, queries, keys], is then no bigger than for one sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from autopar.errors import ExampleInputsError
from autopar.ops import filled_with
from autopar.program import Op
from autopar.trace.compat.torch_internals import overload
from autopar.trace.evaluation import run_op
from autopar.trace.graph import Graph
from autopar.trace.passes.cleanup import is_elementwise, is_repeatable

__all__ = ["NEUTRAL", "Evaluator", "broadcast_shape", "constant_cone", "step_cone"]

_BLOCK_ELEMENTS = 1 << 24  # 128 MiB of int64: larger values are looked at in pieces of this size

# Ops on booleans -> the value that changes nothing.
NEUTRAL = {
    "aten.__and__.Tensor": True, "aten.bitwise_and.Tensor": True, "aten.logical_and.default": True,
    "aten.__or__.Tensor": False, "aten.bitwise_or.Tensor": False, "aten.logical_or.default": False,
}  # fmt: skip


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of what an op makes, element by element, of operands of these shapes."""
    aligned = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    # A size 1 gives way to any other, 0 included.
    return tuple(next((size for size in dim if size != 1), 1) for dim in aligned)[::-1]


def constant_cone(graph: Graph) -> frozenset[str]:
    """The values that are computed from constants alone: known without running the model."""
    return _cone(graph, {name for name, role in graph.roles.items() if role == "constant"})


def step_cone(graph: Graph) -> frozenset[str]:
    """The values that are computed from constants and buffers alone, and not from a buffer that forward updates.

    They are the same throughout a step, but not known: anybody may write to a buffer between steps.
    """
    fixed = {name for name, role in graph.roles.items() if role in ("constant", "buffer")}
    return _cone(graph, fixed - graph.updates.keys())


def _cone(graph: Graph, known: set[str]) -> frozenset[str]:
    computed: set[str] = set()
    for op in graph.ops:
        if known.issuperset(op.operands) and is_repeatable(op) and overload(op.target) is not None:
            known.update(op.results)
            computed.update(op.results)
    return frozenset(computed)


class Evaluator:
    """Computes values of the constant cone, each at most once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.types = graph.types
        self.producers = graph.producers
        self._known: dict[str, Tensor] = {}
        self._cores: dict[str, Tensor] = {}
        self._core_shapes: dict[str, tuple[int, ...]] = {}

    def value(self, name: str) -> Tensor:
        """The whole value."""
        pending = [name]
        while pending:
            current = pending[-1]
            missing = [] if current in self._known else self._missing(current)
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if current not in self._known:
                self._compute(current)
        return self._known[name]

    def folded(self, name: str) -> Tensor:
        """The whole value; a large one whose core tells is its expanded core."""
        if self._large(name) is None:
            return self.value(name)
        return self._core(name).expand(self.types[name].shape)

    def _missing(self, name: str) -> list[str]:
        op = self.producers.get(name)
        return [] if op is None else [n for n in op.operands if n not in self._known]

    def _compute(self, name: str) -> None:
        op = self.producers.get(name)
        if op is None:
            self._known[name] = self._graph.constants[name].detach().cpu()
            return
        results = _run(op, self._known)
        self._known.update(zip(op.results, results, strict=True))

    def core_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the value's core; a large value is not computed for it where its operands tell."""
        if name not in self._core_shapes:
            self._core_shapes[name] = self._find_core_shape(name)
        return self._core_shapes[name]

    def _find_core_shape(self, name: str) -> tuple[int, ...]:
        op = self._large(name)
        if op is None:
            return tuple(self._core(name).shape)
        if filled_with(op) is not None:
            return (1,) * len(self.types[name].shape)
        made = broadcast_shape([self.core_shape(operand) for operand in op.operands])
        if op.target == "aten.unsqueeze.default":
            dim = self._new_dim(op)
            return (*made[:dim], 1, *made[dim:])
        return (*(1,) * (len(self.types[name].shape) - len(made)), *made)

    def blocks(self, name: str) -> Iterator[tuple[int, int, Tensor]]:
        """The value's core by rows (of the last dim but one): from, to (exclusive), and these, not many at once.

        A core that has no rows, or a single one, comes whole, as row 0 to 1.
        """
        shape = self.core_shape(name)
        num_rows = shape[-2] if len(shape) > 1 else 1
        step = max(1, _BLOCK_ELEMENTS * num_rows // max(1, math.prod(shape)))
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            yield start, stop, self._rows(name, start, stop)

    def is_small(self, name: str) -> bool:
        """Whether the value's core is cheap to compute."""
        return math.prod(self.core_shape(name)) <= _BLOCK_ELEMENTS

    def is_everywhere(self, name: str, value: bool) -> bool:
        """Whether all entries equal `value`."""
        return all(bool((part == value).all()) for _, _, part in self.blocks(name))

    def single_number(self, name: str) -> bool | float | None:
        """The number that all entries of the value are; None: there is none."""
        if math.prod(self.core_shape(name)) != 1:
            return None
        return next(part for _, _, part in self.blocks(name)).item()

    def _core(self, name: str) -> Tensor:
        if name not in self._cores:
            large = self._large(name) is not None
            self._cores[name] = _cut_repeats(self._rows(name, 0, 1 << 62) if large else self.value(name))
        return self._cores[name]

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the value's core, or of more that repeats; a single row stands for all."""
        op = self._large(name)
        if op is None or name in self._cores:
            core = self._core(name)
            return core[..., start:stop, :] if core.ndim > 1 and core.shape[-2] > 1 else core
        rank = len(self.types[name].shape)
        if (number := filled_with(op)) is not None:
            return torch.full((1,) * rank, number, dtype=getattr(torch, self.types[name].dtype))
        parts = {operand: self._rows(operand, start, stop) for operand in op.operands}
        if op.target == "aten.expand.default":
            (part,) = parts.values()
            return part[(None,) * (rank - part.ndim)]
        return _run(op, parts)[0]

    def _large(self, name: str) -> Op | None:
        """The op of a value that is better not computed whole, and of which single rows can be computed."""
        op = self.producers.get(name)
        is_large = self.types[name].num_elements > _BLOCK_ELEMENTS
        return op if op is not None and is_large and name not in self._known and self._is_rowwise(op) else None

    def _is_rowwise(self, op: Op) -> bool:
        """Whether rows of the result come from the same rows of the operands, and its core from theirs."""
        if op.target == "aten.unsqueeze.default":
            return self._new_dim(op) <= len(self.types[op.operands[0]].shape) - 2
        return op.target == "aten.expand.default" or filled_with(op) is not None or is_elementwise(op)

    def _new_dim(self, op: Op) -> int:
        dim = op.args[1]
        assert isinstance(dim, int)
        return dim % len(self.types[op.results[0]].shape)


def _run(op: Op, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
    try:
        with torch.no_grad():
            return run_op(op, values)
    except (RuntimeError, IndexError) as error:
        raise ExampleInputsError(
            f"{op.source or 'the model'}: {op.target} fails on constants and on the shapes "
            f"of the example inputs alone: {error}"
        ) from error


def _cut_repeats(whole: Tensor) -> Tensor:
    """One entry of every dim along which all are the same."""
    for dim, size in enumerate(whole.shape):
        if size > 1 and whole.numel():
            first = whole.narrow(dim, 0, 1)
            if whole.stride(dim) == 0 or torch.equal(whole, first.expand_as(whole)):
                whole = first
    return whole
