"""Attention masks that need not be computed: causal ones, and those that hide nothing.

A causal mask that a model builds from positions becomes attention's own ``is_causal``, and a mask that hides nothing
disappears, so that attention keeps its fast kernels.  A mask too big to hold is proven row block by row block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from autopar.ops.family import argument
from autopar.program import Op, Ref, TensorType
from autopar.trace.constants import NEUTRAL, Evaluator, constant_cone
from autopar.trace.graph import Graph

__all__ = ["ATTENTION", "decisive_operand", "restore_attention_masks", "visibility"]

ATTENTION = "aten.scaled_dot_product_attention.default"


def restore_attention_masks(graph: Graph) -> Graph:
    """Let attention make its own causal mask where the given one is causal, and none where it hides nothing."""
    cone = constant_cone(graph)
    evaluator = Evaluator(graph)
    forms: dict[str, str] = {}

    def step(op: Op) -> Iterable[Op] | None:
        mask = argument(op, 3, "attn_mask", None) if op.target == ATTENTION else None
        if not isinstance(mask, Ref) or argument(op, 5, "is_causal", False):
            return None
        if mask.name not in cone and mask.name not in graph.constants:
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
    name = _without_repeats(evaluator, name)
    num_rows, num_columns = kind.shape[-2:]
    proven = _form_of_comparison(evaluator, name, kind)
    if proven:
        return proven
    # One row for all can't be causal.
    forms = {"causal", "full"} if len(shape := evaluator.core_shape(name)) > 1 and shape[-2] == num_rows else {"full"}
    for start, stop, part in evaluator.blocks(name):
        visible, hidden = visibility(part)
        if not bool((visible | hidden).all()):
            return "other"  # a bias, not a mask
        causal = torch.arange(num_columns) <= torch.arange(start, stop)[:, None]
        if not bool((visible == causal).all()):
            forms.discard("causal")
        if not bool(visible.all()):
            forms.discard("full")
        if not forms:
            return "other"
    if "full" in forms:
        return "full"
    return "causal" if num_rows > 1 else "other"  # one row stands for all rows


def _form_of_comparison(evaluator: Evaluator, name: str, kind: TensorType) -> str:
    """The form of a mask that compares column numbers with row numbers, found without computing it; else ""."""
    op = evaluator.producers.get(name)
    if op is None or op.target != "aten.le.Tensor" or len(op.operands) != 2:
        return ""
    wanted = ((1, kind.shape[-1]), (kind.shape[-2], 1))
    cores = [evaluator.core_shape(operand) for operand in op.operands]
    if any(core[-2:] != want or math.prod(core) != math.prod(want) for core, want in zip(cores, wanted, strict=True)):
        return ""
    columns, rows = (next(evaluator.blocks(operand))[2].reshape(-1) for operand in op.operands)
    if not bool((columns[1:] >= columns[:-1]).all()):
        return ""
    # Sorted, so a row sees a prefix of the columns, and its length says all.
    visible = torch.searchsorted(columns, rows, right=True)
    if bool((visible == len(columns)).all()):
        return "full"
    causal = torch.arange(1, len(rows) + 1).clamp(max=len(columns))
    return "causal" if len(rows) > 1 and bool((visible == causal).all()) else "other"


def _without_repeats(evaluator: Evaluator, name: str) -> str:
    """The mask that `name` repeats along leading dims, or combines with another one that changes nothing."""
    while (op := evaluator.producers.get(name)) is not None:
        is_expand = op.target == "aten.expand.default"
        source = op.operands[0] if is_expand else decisive_operand(evaluator, op, evaluator.is_small)
        if source is None or evaluator.types[source].shape[-2:] != evaluator.types[name].shape[-2:]:
            break
        name = source
    return name


def decisive_operand(evaluator: Evaluator, op: Op, is_known: Callable[[str], bool]) -> str | None:
    """The operand that an "and" or "or" gives back, if its other one, which `is_known`, changes nothing."""
    if op.target not in NEUTRAL or len(op.operands) != 2:
        return None
    if any(evaluator.types[operand].dtype != "bool" for operand in op.operands):
        return None
    for neutral, other in (op.operands, op.operands[::-1]):
        if is_known(neutral) and evaluator.is_everywhere(neutral, NEUTRAL[op.target]):
            return other
    return None


def visibility(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries let through, and which hide; a bias has others."""
    if mask.dtype is torch.bool:
        return mask, ~mask
    # A half of the lowest number hides as well as minus infinity does: exp(score + mask) is 0 either way.
    return mask == 0, mask <= torch.finfo(mask.dtype).min / 2
