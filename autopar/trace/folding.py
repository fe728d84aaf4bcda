"""Folding: what depends on no input, no parameter and no updated buffer is computed once, here, on the CPU.

Masks are looked at before they are computed: a causal mask that a model builds from positions becomes
attention's own ``is_causal``, and a mask that hides nothing disappears, so that attention keeps its fast
kernels.  A mask too big to hold is proven row block by row block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from autopar.program import Op, Ref, TensorType
from autopar.trace.cleanup import argument, is_random
from autopar.trace.compat import overload
from autopar.trace.evaluation import run_op
from autopar.trace.graph import Graph, rename

__all__ = [
    "ATTENTION", "ELEMENTWISE", "Evaluator", "constant_cone", "fold_constants", "restore_attention_masks",
    "share_equal_constants",
]  # fmt: skip

ATTENTION = "aten.scaled_dot_product_attention.default"
_BLOCK_ELEMENTS = 1 << 24

# Ops that work element by element and broadcast their tensor operands.
ELEMENTWISE = frozenset({
    "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.le.Tensor", "aten.lt.Tensor",
    "aten.ge.Tensor", "aten.gt.Tensor", "aten.eq.Tensor", "aten.ne.Tensor", "aten.bitwise_and.Tensor",
    "aten.bitwise_or.Tensor", "aten.__and__.Tensor", "aten.__or__.Tensor", "aten.add.Scalar", "aten.mul.Scalar",
    "aten.rsub.Scalar", "aten.le.Scalar", "aten.lt.Scalar", "aten.ge.Scalar", "aten.gt.Scalar", "aten.eq.Scalar",
    "aten.ne.Scalar", "aten.logical_and.default", "aten.logical_or.default", "aten.logical_not.default",
    "aten.bitwise_not.default", "aten._to_copy.default", "aten.neg.default", "aten.abs.default", "aten.clone.default",
    "aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar",
    "aten.masked_fill.Scalar", "aten.masked_fill.Tensor",
})  # fmt: skip


def constant_cone(graph: Graph) -> frozenset[str]:
    """The values that are known without running the model."""
    known = {name for name, role in graph.roles.items() if role == "constant" and name in graph.constants}
    known |= {name for name in graph.buffers if name not in graph.updates}
    computed: set[str] = set()
    for op in graph.ops:
        if known.issuperset(op.operands) and not is_random(op) and overload(op.target) is not None:
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

    def _missing(self, name: str) -> list[str]:
        op = self.producers.get(name)
        return [] if op is None else [n for n in op.operands if n not in self._known]

    def _compute(self, name: str) -> None:
        op = self.producers.get(name)
        if op is None:
            source = self._graph.constants[name] if name in self._graph.constants else self._graph.buffers[name]
            self._known[name] = source.detach().cpu()
            return
        with torch.no_grad():
            results = run_op(op, self._known)
        self._known.update(zip(op.results, results, strict=True))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (of the last dim but one) of a value, computing no more than it takes.

        A value with a single row, or without rows, comes whole.
        """
        shape = self.types[name].shape
        if len(shape) < 2 or shape[-2] == 1:
            return self.value(name)
        op = self.producers.get(name)
        if op is None or name in self._known or not self._is_rowwise(op):
            return self.value(name)[..., start:stop, :]
        if op.target == "aten.expand.default":
            part = self.rows(op.operands[0], start, stop)
            return part.expand(*shape[:-2], stop - start, shape[-1])
        if op.target == "aten.unsqueeze.default":
            return self.rows(op.operands[0], start, stop).unsqueeze(int(str(op.args[1])))
        with torch.no_grad():
            return run_op(op, {n: self.rows(n, start, stop) for n in op.operands})[0]

    def _is_rowwise(self, op: Op) -> bool:
        if op.target == "aten.unsqueeze.default":
            source = len(self.types[op.operands[0]].shape)
            dim = op.args[1]
            assert isinstance(dim, int)
            return source >= 2 and dim % (source + 1) <= source - 2
        return op.target == "aten.expand.default" or op.target in ELEMENTWISE


def restore_attention_masks(graph: Graph) -> Graph:
    """Let attention make its own causal mask where the given one is causal, and none where it hides
    nothing."""
    cone = constant_cone(graph)
    evaluator = Evaluator(graph)
    forms: dict[str, str] = {}

    def step(op: Op) -> Iterable[Op] | None:
        mask = argument(op, 3, "attn_mask", None) if op.target == ATTENTION else None
        if not isinstance(mask, Ref) or argument(op, 5, "is_causal", False):
            return None
        if mask.name not in cone and mask.name not in graph.constants and mask.name not in graph.buffers:
            return None
        if mask.name not in forms:
            forms[mask.name] = _mask_form(evaluator, mask.name, graph.types[mask.name])
        if forms[mask.name] == "other":
            return None
        return [_with_attention_mask(op, is_causal=forms[mask.name] == "causal")]

    return graph.rewrite(step)


def _with_attention_mask(op: Op, *, is_causal: bool) -> Op:
    dropout = argument(op, 4, "dropout_p", 0.0)
    rest = tuple((k, v) for k, v in op.kwargs if k not in ("attn_mask", "dropout_p", "is_causal"))
    return replace(op, args=(*op.args[:3], None, dropout, is_causal), kwargs=rest)


def _mask_form(evaluator: Evaluator, name: str, kind: TensorType) -> str:
    """ "causal": each row sees the columns up to its own; "full": every row sees all; "other"."""
    if len(kind.shape) < 2 or kind.dtype.startswith(("int", "uint", "complex")):
        return "other"
    name, kind = _unexpanded(evaluator, name, kind)
    num_rows = kind.shape[-2]
    proven = _form_of_comparison(evaluator, name, kind)
    if proven:
        return proven
    block = max(1, _BLOCK_ELEMENTS // max(1, kind.num_elements // num_rows))
    forms = {"causal", "full"}
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        part = evaluator.rows(name, start, stop)
        visible, hidden = _visibility(part)
        if not bool((visible | hidden).all()):
            return "other"  # a bias, not a mask
        causal = torch.arange(kind.shape[-1]) <= torch.arange(start, stop)[:, None]
        forms &= {
            form
            for form, want in (("causal", causal), ("full", torch.ones_like(causal)))
            if bool((visible == want).all())
        }
        if not forms:
            return "other"
    if "full" in forms:
        return "full"
    return "causal" if num_rows > 1 else "other"  # one row stands for all rows


def _form_of_comparison(evaluator: Evaluator, name: str, kind: TensorType) -> str:
    """The form of a mask that compares column numbers with row numbers, found without computing it; else
    ""."""
    op = evaluator.producers.get(name)
    if op is None or op.target != "aten.le.Tensor" or kind.num_elements != kind.shape[-1] * kind.shape[-2]:
        return ""
    shapes = [evaluator.types[n].shape for n in op.operands]
    if len(shapes) != 2 or shapes[0][-2:] != (1, kind.shape[-1]) or shapes[1][-2:] != (kind.shape[-2], 1):
        return ""
    columns, rows = (evaluator.value(n).reshape(-1) for n in op.operands)
    if not bool((columns[1:] >= columns[:-1]).all()):
        return ""
    # Sorted, so a row sees a prefix of the columns, and its length says all.
    visible = torch.searchsorted(columns, rows, right=True)
    if bool((visible == len(columns)).all()):
        return "full"
    causal = torch.arange(1, len(rows) + 1).clamp(max=len(columns))
    return "causal" if len(rows) > 1 and bool((visible == causal).all()) else "other"


def _unexpanded(evaluator: Evaluator, name: str, kind: TensorType) -> tuple[str, TensorType]:
    """The value that `name` repeats along leading dims."""
    op = evaluator.producers.get(name)
    while op is not None and op.target == "aten.expand.default":
        source = evaluator.types[op.operands[0]]
        if source.shape[-2:] != kind.shape[-2:]:
            break
        name, kind = op.operands[0], source
        op = evaluator.producers.get(name)
    return name, kind


def _visibility(mask: Tensor) -> tuple[Tensor, Tensor]:
    if mask.dtype is torch.bool:
        return mask, ~mask
    # A half of the lowest number hides as well as minus infinity does: exp(score + mask) is 0 either way.
    return mask == 0, mask <= torch.finfo(mask.dtype).min / 2


def fold_constants(graph: Graph) -> Graph:
    """Replace what is known by constants."""
    cone = constant_cone(graph)
    roots: dict[str, None] = {}
    for op in graph.ops:
        if not cone.issuperset(op.results):
            roots.update((name, None) for name in op.operands if name in cone)
    roots.update((name, None) for name in (*graph.outputs, *graph.updates.values()) if name in cone)
    evaluator = Evaluator(graph)
    folded = {name: evaluator.value(name) for name in roots}
    notes = _folded_state(graph, cone)
    return replace(
        graph,
        ops=tuple(op for op in graph.ops if not cone.issuperset(op.results) or not op.results),
        roles={**graph.roles, **dict.fromkeys(folded, "constant")},
        constants={**graph.constants, **folded},
        notes=graph.notes + tuple(notes),
    )


def _folded_state(graph: Graph, cone: frozenset[str]) -> Iterator[str]:
    read = {n for op in graph.ops if cone.issuperset(op.results) for n in op.operands if n in graph.buffers}
    for name in sorted(read):
        if graph.buffers[name].is_floating_point():
            yield (
                f"buffer {graph.parameters[name]} was read while tracing: what is computed from it alone "
                f"keeps its "
                "present contents"
            )


def share_equal_constants(graph: Graph) -> Graph:
    """Keep one of several constants that are equal."""
    first: dict[object, str] = {}
    same: dict[str, str] = {}
    for name, tensor in graph.constants.items():
        owner = first.setdefault(_content_key(tensor), name)
        if owner != name:
            same[name] = owner
    return rename(graph, same)


def _content_key(tensor: Tensor) -> object:
    if tensor.device.type == "meta":
        return id(tensor)
    # Dims that only repeat (stride 0) are hashed once.
    core = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())]
    core = core.clone(memory_format=torch.contiguous_format).reshape(-1)
    digest = hashlib.sha256(bytes(core.view(torch.uint8).numpy()) if core.numel() else b"")
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), digest.hexdigest()
