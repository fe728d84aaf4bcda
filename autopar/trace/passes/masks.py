"""Attention masks that need not be computed: causal ones, and those that hide nothing.

A causal mask that a model builds from positions becomes attention's own ``is_causal``, and a mask that hides nothing
disappears, so that attention keeps its fast kernels.  A mask that hides what is far away becomes attention that knows
its window (`WINDOWS`).  A mask too big to hold is proven row block by row block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.ops.attention import WINDOWS
from autopar.ops.family import argument
from autopar.program import Op, Ref, TensorType
from autopar.trace.graph import Graph
from autopar.trace.passes.cleanup import drop_dead_ops
from autopar.trace.passes.constants import NEUTRAL, Evaluator, constant_cone

__all__ = ["ATTENTION", "decisive_operand", "restore_attention_masks", "visibility"]

ATTENTION = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True)
class _Window:
    """Each row sees what is less than `window` places away, 0: everything; with `is_causal` nothing behind it."""

    is_causal: bool
    window: int = 0


def restore_attention_masks(graph: Graph) -> Graph:
    """Let attention make its own causal mask where the given one is causal, and none where it hides nothing.

    Where tokens see those that are near to them, it becomes attention that knows its window.
    """
    cone = constant_cone(graph)
    evaluator = Evaluator(graph)
    forms: dict[str, _Window | None] = {}

    def step(op: Op) -> Iterable[Op] | None:
        mask = argument(op, 3, "attn_mask", None) if op.target == ATTENTION else None
        if not isinstance(mask, Ref) or argument(op, 5, "is_causal", False):
            return None
        if mask.name not in cone and mask.name not in graph.constants:
            return None
        if mask.name not in forms:
            forms[mask.name] = _mask_form(evaluator, mask.name, graph.types[mask.name])
        form = forms[mask.name]
        if form is None:
            return None
        return _with_window(op, form, graph) if form.window else [_with_attention_mask(op, is_causal=form.is_causal)]

    made = graph.rewrite(step)
    is_smaller = any(form is not None and form.window for form in forms.values())
    return drop_dead_ops(made) if is_smaller else made  # masks may be too big for what follows to look at


def _with_attention_mask(op: Op, *, is_causal: bool) -> Op:
    dropout = argument(op, 4, "dropout_p", 0.0)
    rest = tuple((k, v) for k, v in op.kwargs if k not in ("attn_mask", "dropout_p", "is_causal"))
    return replace(op, args=(*op.args[:3], None, dropout, is_causal), kwargs=rest)


def _with_window(op: Op, form: _Window, graph: Graph) -> list[Op] | None:
    shapes = [graph.types[name].shape for name in op.operands[:3]]
    if argument(op, 4, "dropout_p", 0.0) or any(len(shape) != 4 or shape[::2] != shapes[0][::2] for shape in shapes):
        return None
    args = (*op.args[:3], argument(op, 6, "scale", None), form.window, form.is_causal)
    return [replace(op, target=WINDOWS, args=args, kwargs=())]


def _mask_form(evaluator: Evaluator, name: str, kind: TensorType) -> _Window | None:
    if len(kind.shape) < 2 or kind.dtype.startswith(("int", "uint", "complex")):
        return None
    name = _without_repeats(evaluator, name)
    num_rows, num_columns = kind.shape[-2:]
    shape = evaluator.core_shape(name)
    if len(shape) < 2 or shape[-2] != num_rows:  # one row for all can't be causal
        is_full = all(bool(visibility(part)[0].all()) for *_, part in evaluator.blocks(name))
        return _Window(is_causal=False) if is_full else None
    form = _intervals_of_comparisons(evaluator, name, (num_rows, num_columns))
    if form is None:
        parts: list[tuple[Tensor, Tensor]] = []
        for *_, part in evaluator.blocks(name):
            each = _intervals(part)
            if each is None:
                return None
            parts.append(each)
        form = torch.cat([first for first, _ in parts]), torch.cat([stop for _, stop in parts])
    return _form_of(form[0], form[1], num_columns)


def _form_of(first: Tensor, stop: Tensor, columns: int) -> _Window | None:
    """The form of a mask whose rows see the columns from `first` to `stop` (exclusive)."""
    rows = len(first)
    places = torch.arange(rows)
    if bool((first == 0).all() & (stop == columns).all()):
        return _Window(is_causal=False)
    window = int((places - first).max()) + 1
    is_causal = bool((stop == (places + 1).clamp(max=columns)).all())
    if rows == 1 or bool((first != (places - window + 1).clamp(min=0)).any()):
        return None
    if is_causal and window >= rows:
        return _Window(is_causal=True)
    ahead = bool((stop == (places + window).clamp(max=columns)).all())
    return _Window(is_causal, window) if rows == columns and (is_causal or ahead) else None


def _intervals(mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """The columns that each row of ``[..., rows, columns]`` sees, from and to; None if that isn't one run for all."""
    visible, hidden = visibility(mask)
    if not bool((visible | hidden).all()):
        return None  # a bias, not a mask
    every = visible.reshape(-1, *visible.shape[-2:]) if visible.ndim > 1 else visible.view(1, 1, -1)
    one = every[0]
    first = one.int().argmax(-1)
    stop = first + one.sum(-1)
    columns = torch.arange(one.shape[-1])
    run = (columns >= first[:, None]) & (columns < stop[:, None])
    return (first, stop) if bool((every == run).all()) and bool(one.any(-1).all()) else None


_COMPARISONS = {  # of columns with rows -> (whether a row sees columns to the left, whether equal ones are there)
    "aten.le.Tensor": (True, True), "aten.lt.Tensor": (True, False),
    "aten.ge.Tensor": (False, False), "aten.gt.Tensor": (False, True),
}  # fmt: skip


def _intervals_of_comparisons(evaluator: Evaluator, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """`_intervals` of a mask that compares column numbers with row numbers, derived without computing it."""
    name = _without_repeats(evaluator, name)
    op = evaluator.producers.get(name)
    if op is None or len(op.operands) != 2:
        return None
    if NEUTRAL.get(op.target):  # an "and"
        parts = [_intervals_of_comparisons(evaluator, operand, shape) for operand in op.operands]
        if parts[0] is None or parts[1] is None:
            return None
        return torch.maximum(parts[0][0], parts[1][0]), torch.minimum(parts[0][1], parts[1][1])
    core_shapes = ((1, shape[1]), (shape[0], 1))
    cores = [evaluator.core_shape(operand) for operand in op.operands]
    if op.target not in _COMPARISONS or any(
        core[-2:] != want or math.prod(core) != math.prod(want) for core, want in zip(cores, core_shapes, strict=True)
    ):
        return None
    columns, rows = (next(evaluator.blocks(operand))[2].reshape(-1) for operand in op.operands)
    if not bool((columns[1:] >= columns[:-1]).all()):
        return None
    # Sorted, so a row sees a run from one end, and its length says all.
    is_left, counts_equal = _COMPARISONS[op.target]
    place = torch.searchsorted(columns, rows, right=counts_equal)
    whole = torch.zeros_like(place), torch.full_like(place, len(columns))
    return (whole[0], place) if is_left else (place, whole[1])


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
