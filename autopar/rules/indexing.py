"""Ops that read or write at places that a tensor names.  The indexed dims stay whole; indices and other
dims split.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import Op, Ref
from autopar.rules.rule import Line, Rule, Types, argument, lines
from autopar.rules.views import dim_names, without

__all__ = ["RULES"]


def _text(dims: list[str]) -> str:
    return " ".join(dims) or "()"


def _dim(op: Op, rank: int) -> int | None:
    """The op's `dim` argument (position 1) as 0 <= dim < rank; None for scalars and for calls without it."""
    dim = argument(op, 1, "dim")
    return dim % rank if isinstance(dim, int) and rank else None


def _gather(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """gather(x, dim, index): index may be smaller than x; dims of equal size split, and the entries along
    dim.
    """
    source, index = (kind.shape for kind in operand_types)
    dim = _dim(op, len(source))
    if dim is None:
        return None
    names = [f"d{i}" if a == b else "_" for i, (a, b) in enumerate(zip(source, index, strict=True))]
    names[dim] = "_"
    picked = [*names[:dim], "k", *names[dim + 1 :]]
    return Line(f"{_text(names)}, #, {_text(picked)} -> {_text(picked)}")


def _index_select(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    dim = _dim(op, len(operand_types[0].shape))
    if dim is None:
        return None
    names = dim_names(len(operand_types[0].shape), dim)
    return Line(f"{_text(names)}, #, k -> {_text([*names[:dim], 'k', *names[dim + 1 :]])}")


def _scatter(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """scatter(x, dim, index, src): dims other than dim in which x, index and src have equal sizes split."""
    shapes = [kind.shape for kind in operand_types if kind.shape]
    rank = len(shapes[0])
    dim = _dim(op, rank)
    if dim is None or any(len(shape) != rank for shape in shapes):
        return None
    names = [f"d{i}" if len({shape[i] for shape in shapes}) == 1 and i != dim else "_" for i in range(rank)]
    source = _text(names) if len(shapes) == 3 else "()"
    return Line(f"{_text(names)}, #, {_text(names)}, {source} -> {_text(names)}")


def _along_dim(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """index_add, index_copy, index_fill (x, dim, index, source): dims other than dim split."""
    dim = _dim(op, len(operand_types[0].shape))
    if dim is None:
        return None
    names = dim_names(len(operand_types[0].shape), dim)
    source = _text(names) if len(operand_types[-1].shape) == len(names) else "()"
    return Line(f"{_text(names)}, #, _, {source} -> {_text(names)}")


def _indexed_dims(op: Op) -> list[int] | None:
    """Which dims of x the list of indices (argument 1) names; None if it isn't a list of tensors and None."""
    indices = argument(op, 1, "indices")
    if not isinstance(indices, tuple):
        return None
    return [dim for dim, index in enumerate(indices) if isinstance(index, Ref)]


def _num_indices(op: Op) -> int:
    indices = argument(op, 1, "indices")
    return len(indices) if isinstance(indices, tuple) else 0


def _index_names(kinds: Types) -> tuple[list[list[str]], list[str]]:
    """Factor names of the dims of each index, and of the dims that they broadcast to."""
    rank = max(len(kind.shape) for kind in kinds)
    together = [f"i{dim}" for dim in range(rank)]
    return [together[rank - len(kind.shape) :] for kind in kinds], together


def _index(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """index(x, indices): dims without an index and the dims of the indices split; a mask of booleans does
    not.
    """
    indexed = _indexed_dims(op)
    indices = operand_types[1:]
    if not indexed or any(kind.dtype in {"bool", "uint8"} for kind in indices):
        return None
    names = dim_names(len(operand_types[0].shape), *indexed)
    each, together = _index_names(indices)
    # Indexed dims that are neighbours leave theirs in place; others come first in the result.
    at = indexed[0] if indexed[-1] - indexed[0] == len(indexed) - 1 else 0
    kept = without(names, *indexed)
    texts = iter(map(_text, each))
    arguments = ", ".join(next(texts) if dim in indexed else "#" for dim in range(_num_indices(op)))
    return Line(f"{_text(names)}, [{arguments}] -> {_text(kept[:at] + together + kept[at:])}")


def _index_put(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """index_put(x, indices, values): when the first dims are indexed, the dims after them split."""
    indexed = _indexed_dims(op)
    if not indexed or indexed != list(range(len(indexed))):
        return None
    indices = operand_types[1:-1]
    if any(kind.dtype in {"bool", "uint8"} for kind in indices):
        return None
    names = dim_names(len(operand_types[0].shape), *indexed)
    kept = names[len(indexed) :]
    rank = max(len(kind.shape) for kind in indices)
    values = (["_"] * rank + kept)[rank + len(kept) - len(operand_types[-1].shape) :]
    arguments = ", ".join(_text(["_"] * len(kind.shape)) for kind in indices)
    return Line(f"{_text(names)}, [{arguments}], {_text(values)} -> {_text(names)}")


def _aten(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name if '.' in name else name + '.default'}": rule for name in names.split()}


RULES: Mapping[str, Rule] = {
    **lines({"one_hot": "* -> * _", "masked_scatter": "..., ..., ... -> ..."}),
    **_aten("gather", _gather),
    **_aten("index_select", _index_select),
    **_aten("index.Tensor", _index),
    **_aten("index_put", _index_put),
    **_aten("scatter.src scatter.value scatter.reduce scatter_add scatter_reduce.two", _scatter),
    **_aten("index_add index_copy index_fill.int_Scalar index_fill.int_Tensor", _along_dim),
}
