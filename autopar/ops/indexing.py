"""Ops that read or write at indices given by a tensor.  The indexed dims stay whole; indices and other dims split."""

from __future__ import annotations

from autopar.ops.family import Kernel, OpFamily, Types, argument, aten
from autopar.ops.views import dim_names, text_of, without
from autopar.ops.work import Work, dtype_of, sum_bytes
from autopar.program import Op, Ref, TensorType

__all__ = ["FAMILIES"]


def _dim(op: Op, rank: int) -> int | None:
    """The op's `dim` argument (position 1) as 0 <= dim < rank; None for scalars and for calls without it."""
    dim = argument(op, 1, "dim")
    return dim % rank if isinstance(dim, int) and rank else None


def _embedding(op: Op, operand_types: Types, result_types: Types) -> str:
    """embedding(weight, indices, padding_idx, scale_grad_by_freq): with `scale_grad_by_freq` the gradient of a row is
    divided by how often all indices name it, so indices don't split.
    """
    indices = " ".join("_" * len(operand_types[1].shape)) if argument(op, 3, "scale_grad_by_freq", False) else "*"
    return f"v h, {indices or '()'} -> {indices} h | sum v, by v vocab_parallel_embedding"


def _gather(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """gather(x, dim, index): dims of equal size split, and so do the entries of index along dim."""
    source, index = (kind.shape for kind in operand_types)
    dim = _dim(op, len(source))
    if dim is None:
        return None
    names = [f"d{i}" if a == b else "_" for i, (a, b) in enumerate(zip(source, index, strict=True))]
    names[dim] = "_"
    index_names = [*names[:dim], "k", *names[dim + 1 :]]
    return f"{text_of(names)}, #, {text_of(index_names)} -> {text_of(index_names)}"


def _index_select(op: Op, operand_types: Types, result_types: Types) -> str | None:
    dim = _dim(op, len(operand_types[0].shape))
    if dim is None:
        return None
    names = dim_names(len(operand_types[0].shape), dim)
    return f"{text_of(names)}, #, k -> {text_of([*names[:dim], 'k', *names[dim + 1 :]])}"


def _scatter(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """scatter(x, dim, index, src): dims other than dim split if x, index and src have equal sizes there."""
    shapes = [kind.shape for kind in operand_types if kind.shape]
    rank = len(shapes[0])
    dim = _dim(op, rank)
    if dim is None or any(len(shape) != rank for shape in shapes):
        return None
    names = [f"d{i}" if len({shape[i] for shape in shapes}) == 1 and i != dim else "_" for i in range(rank)]
    source = text_of(names) if len(shapes) == 3 else "()"
    return f"{text_of(names)}, #, {text_of(names)}, {source} -> {text_of(names)}"


def _scatter_add(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """scatter_add(x, dim, index, src): slices of index and src along dim add their terms to the result."""
    rank = len(operand_types[0].shape)
    dim = _dim(op, rank)
    shapes = [kind.shape for kind in operand_types]
    if dim is None or any(len(shape) != rank for shape in shapes) or shapes[1] != shapes[2]:
        return _scatter(op, operand_types, result_types)
    names = [f"d{i}" if len({shape[i] for shape in shapes}) == 1 and i != dim else "_" for i in range(rank)]
    added = text_of([*names[:dim], "k", *names[dim + 1 :]])
    return f"+{text_of(names)}, #, {added}, {added} -> {text_of(names)} | sum k"


def _index_add(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """index_add(x, dim, index, source): slices of index and source along dim add their terms to the result."""
    rank = len(operand_types[0].shape)
    dim = _dim(op, rank)
    if dim is None or len(operand_types[-1].shape) != rank or len(operand_types[1].shape) != 1:
        return _along_dim(op, operand_types, result_types)
    names = dim_names(rank, dim)
    return f"+{text_of(names)}, #, k, {text_of([*names[:dim], 'k', *names[dim + 1 :]])} -> {text_of(names)} | sum k"


def _along_dim(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """index_copy, index_fill (x, dim, index, source): dims other than dim split."""
    dim = _dim(op, len(operand_types[0].shape))
    if dim is None:
        return None
    names = dim_names(len(operand_types[0].shape), dim)
    source = text_of(names) if len(operand_types[-1].shape) == len(names) else "()"
    return f"{text_of(names)}, #, _, {source} -> {text_of(names)}"


def _indexed_dims(op: Op) -> list[int] | None:
    """The dims of x that the list of indices (argument 1) indexes; None if it isn't a list of tensors and None."""
    indices = argument(op, 1, "indices")
    if not isinstance(indices, tuple):
        return None
    return [dim for dim, index in enumerate(indices) if isinstance(index, Ref)]


def _num_indices(op: Op) -> int:
    indices = argument(op, 1, "indices")
    return len(indices) if isinstance(indices, tuple) else 0


def _index_names(kinds: Types) -> tuple[list[list[str]], list[str]]:
    """Factor names of the dims of each index, and of the dims to which all of them broadcast."""
    rank = max(len(kind.shape) for kind in kinds)
    broadcast = [f"i{dim}" for dim in range(rank)]
    return [broadcast[rank - len(kind.shape) :] for kind in kinds], broadcast


def _index(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """index(x, indices): dims without an index and the dims of the indices split, but no boolean masks."""
    indexed = _indexed_dims(op)
    indices = operand_types[1:]
    if not indexed or any(map(_is_mask, indices)):
        return None
    names = dim_names(len(operand_types[0].shape), *indexed)
    index_names, broadcast = _index_names(indices)
    at = _first_dim(indexed)
    kept = without(names, *indexed)
    texts = iter(map(text_of, index_names))
    arguments = ", ".join(next(texts) if dim in indexed else "#" for dim in range(_num_indices(op)))
    return f"{text_of(names)}, [{arguments}] -> {text_of(kept[:at] + broadcast + kept[at:])}"


def _index_put(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """index_put(x, indices, values): dims that no index or mask covers split."""
    indices = operand_types[1:-1]
    given = _indexed_dims(op)
    if not given or len(given) != len(indices):
        return None
    indexed: list[int] = []  # dims of x: a mask covers as many as it has
    texts: list[str] = []
    next_dim, each = 0, iter(indices)
    for place in range(_num_indices(op)):
        if place not in given:
            texts.append("#")
            next_dim += 1
            continue
        kind = next(each)
        covered = len(kind.shape) if _is_mask(kind) else 1
        texts.append(text_of(["_"] * len(kind.shape)))
        indexed += range(next_dim, next_dim + covered)
        next_dim += covered
    names = dim_names(len(operand_types[0].shape), *indexed)
    rank = max(1 if _is_mask(kind) else len(kind.shape) for kind in indices)
    values = _put_names(operand_types, names, indexed, rank)
    return f"{text_of(names)}, [{', '.join(texts)}], {values} -> {text_of(names)}"


def _put_names(operand_types: Types, names: list[str], indexed: list[int], rank: int) -> str:
    """The factors of values that are put where indices of `rank` dims say; they broadcast to what the indices read."""
    at = _first_dim(indexed)
    kept = [(dim, name) for dim, name in enumerate(names) if dim not in indexed]
    read = [*kept[:at], *[(-1, "_")] * rank, *kept[at:]]
    shape, values = operand_types[0].shape, operand_types[-1].shape
    behind = read[len(read) - len(values) :]
    return text_of([name if size == shape[dim] else "_" for size, (dim, name) in zip(values, behind, strict=True)])


def _first_dim(indexed: list[int]) -> int:
    """Where the dims of indices stand in what they read: in place of dims that are consecutive, otherwise first."""
    return indexed[0] if indexed[-1] - indexed[0] == len(indexed) - 1 else 0


def _is_mask(kind: TensorType) -> bool:
    return kind.dtype in {"bool", "uint8"}


def _work_of_lookup(op: Op, operands: Types, results: Types) -> Work:
    """Forward reads and writes the selected rows; backward fills a whole table with zeros and adds rows to it."""
    rows = sum_bytes(results)
    return Work(
        "bytes",
        dtype_of(operands, results),
        read_bytes=rows + sum_bytes(operands[1:]),
        write_bytes=rows,
        backward_read_bytes=2 * rows + sum_bytes(operands[1:]),
        backward_write_bytes=rows + sum_bytes(operands[:1]),
        num_backward_kernels=2,
    )


def _num_rows(op: Op, shape: tuple[int, ...]) -> int:
    return shape[_dim(op, len(shape)) or 0]


FAMILIES = (
    OpFamily(
        aten({"embedding": _embedding}),
        kernels={"vocab_parallel_embedding": Kernel(cuts_vocabulary=True)},
        count_work=_work_of_lookup,
        num_choices=lambda op, shape: shape[0],
    ),
    OpFamily(
        aten({"gather": _gather, "index_select": _index_select}), count_work=_work_of_lookup, num_choices=_num_rows
    ),
    OpFamily(aten({"index.Tensor": _index}), count_work=_work_of_lookup, num_choices=lambda op, shape: shape[0]),
    OpFamily(
        aten(
            {
                "one_hot": "* -> * _",
                "masked_scatter": "..., ..., ... -> ...",
                "index_put": _index_put,
                "scatter.src scatter.value": _scatter,
                "scatter_add": _scatter_add,
                "index_add": _index_add,
                "index_copy index_fill.int_Scalar index_fill.int_Tensor": _along_dim,
            }
        )
    ),
    OpFamily(aten({"scatter.reduce scatter_reduce.two": _scatter}), has_formula=True),
)
