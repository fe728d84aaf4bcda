"""Ops that rearrange, join or cut tensors without arithmetic.  All are linear; shapes determine which dims split."""

from __future__ import annotations

from collections.abc import Callable

from autopar.ops.derivation import named_dims
from autopar.ops.family import OpFamily, Rule, Types, argument, aten, nothing_between
from autopar.ops.memory_order import expanded, permuted, regrouped
from autopar.program import Arg, Op

__all__ = ["FAMILIES", "dim_names", "match_shapes", "text_of", "without"]

Shape = tuple[int, ...]


def match_shapes(source: Shape, target: Shape) -> tuple[list[str], list[str]]:
    """The dims of a reshape from `source` to `target` as factors.

    Both shapes are cut into the shortest runs of dims with equal products.  In memory order, equal slices of a run
    are equal slices of its first dim (other than dims of size 1) in both shapes, so these two dims have the run's
    factor.

    >>> match_shapes((2, 12), (2, 3, 4))
    (['d0', 'd1'], ['d0', 'd1', '_'])
    """
    dims: tuple[list[str], list[str]] = (["_"] * len(source), ["_"] * len(target))
    if 0 in source:
        return dims
    left = [index for index, size in enumerate(source) if size > 1]
    right = [index for index, size in enumerate(target) if size > 1]
    while left and right:
        name, heads = f"d{left[0]}", (left[0], right[0])
        a, b = source[left.pop(0)], target[right.pop(0)]
        while a != b:
            if a < b:
                a *= source[left.pop(0)]
            else:
                b *= target[right.pop(0)]
        dims[0][heads[0]] = dims[1][heads[1]] = name
    return dims


def dim_names(rank: int, *whole: int) -> list[str]:
    """``["d0", "d1" ...]`` with ``"_"`` at the dims in `whole`, which may be negative."""
    whole_dims = {dim % rank for dim in whole} if rank else set[int]()
    return [f"d{index}" if index not in whole_dims else "_" for index in range(rank)]


def without(dims: list[str], *removed: int) -> list[str]:
    """`dims` without the entries at the positions `removed`, which may be negative."""
    positions = {dim % len(dims) for dim in removed}
    return [name for index, name in enumerate(dims) if index not in positions]


def text_of(dims: list[str]) -> str:
    """The dims of one tensor in the language of declarations."""
    return " ".join(dims) or "()"


def _view(source: list[str], target: list[str], *, num_results: int = 1) -> str:
    results = ", ".join([text_of(target)] * num_results)
    return f"{text_of(source)} -> {results} | plus 0"


def _reshape(op: Op, operand_types: Types, result_types: Types) -> str:
    return _view(*match_shapes(operand_types[0].shape, result_types[0].shape))


def _squeeze(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """squeeze(x, dims): the dims that it may remove stay whole, as a slice could have size 1."""
    rank = len(operand_types[0].shape)
    dims = named_dims(argument(op, 1, "dim"), rank)
    source, target = match_shapes(operand_types[0].shape, result_types[0].shape)
    whole = {source[dim] for dim in dims}
    return _view(*(["_" if name in whole else name for name in names] for names in (source, target)))


def _reshape_like(op: Op, operand_types: Types, result_types: Types) -> str | None:
    source, target = match_shapes(operand_types[0].shape, result_types[0].shape)
    return f"{text_of(source)}, {text_of(target)} -> {text_of(target)} | plus 0"


def _unflatten(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """unflatten(x, dim, sizes): the first of the new dims splits only if its size is -1, which means the rest."""
    dim, sizes = argument(op, 1, "dim"), argument(op, 2, "sizes")
    if not isinstance(dim, int) or not isinstance(sizes, tuple):
        return None
    source, target = match_shapes(operand_types[0].shape, result_types[0].shape)
    at = dim % len(source)
    first = next((index for index, size in enumerate(sizes) if size != 1), 0)
    if sizes[first] != -1:
        source[at] = target[at + first] = "_"
    return _view(source, target)


def _permutation(names: str, order: Callable[[Op, list[int]], list[int] | None]) -> OpFamily:
    """A family of permutations; `order` returns the dims of the result, given the op and its operand's dims 0, 1 ..."""

    def rule(op: Op, operand_types: Types, result_types: Types) -> str | None:
        dims = dim_names(len(operand_types[0].shape))
        result = order(op, list(range(len(dims))))
        return None if result is None else _view(dims, [dims[index] for index in result])

    return OpFamily(aten({names: rule}), is_view=True, place=permuted(order))


def _as_dims(arg: Arg, rank: int) -> list[int]:
    parts = arg if isinstance(arg, tuple) else (arg,)
    return [part % rank for part in parts if isinstance(part, int) and rank]


def _permute(op: Op, dims: list[int]) -> list[int]:
    return _as_dims(argument(op, 1, "dims"), len(dims))


def _swap(op: Op, dims: list[int]) -> list[int] | None:
    first, second = argument(op, 1, "dim0"), argument(op, 2, "dim1")
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    if dims:
        dims[first], dims[second] = dims[second], dims[first]
    return dims


def _swap_last(op: Op, dims: list[int]) -> list[int]:
    return dims[:-2] + dims[-2:][::-1]


def _reverse(op: Op, dims: list[int]) -> list[int]:
    return dims[::-1]


def _move(op: Op, dims: list[int]) -> list[int]:
    source, target = (_as_dims(argument(op, at, ""), len(dims)) for at in (1, 2))
    rest = iter([dim for dim in dims if dim not in source])
    moved = dict(zip(target, source, strict=True))
    return [moved[index] if index in moved else next(rest) for index in dims]


def _cut(dim_at: int, default: int | None, *, keeps_dim: bool) -> Rule:
    """The rule of ops that select one or several parts along one dim; the other dims split."""

    def rule(op: Op, operand_types: Types, result_types: Types) -> str | None:
        dim = argument(op, dim_at, "dim", default)
        if not isinstance(dim, int):
            return None
        names = dim_names(len(operand_types[0].shape), dim)
        return _view(names, names if keeps_dim else without(names, dim), num_results=len(result_types))

    return rule


def _slice(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """slice(x, dim, start, end, step): the dim splits if the slice has all of it, or every `step`-th of its rows; the
    others do.

    The last dim does not split by steps: in rotary embeddings, nothing that follows could use that.
    """
    shape = operand_types[0].shape
    dim, start, end, step = (argument(op, at, "", default) for at, default in ((1, 0), (2, 0), (3, None), (4, 1)))
    if not isinstance(dim, int):
        return None
    to_end = end is None or (isinstance(end, int) and end >= shape[dim])
    is_all = start in (0, None) and step == 1 and to_end
    if isinstance(start, int) and isinstance(step, int) and to_end and dim % len(shape) < len(shape) - 1:
        is_all |= 0 <= start < step and shape[dim] % step == 0
    names = dim_names(len(shape)) if is_all else dim_names(len(shape), dim)
    return _view(names, names)


def _join(op: Op, operand_types: Types, result_types: Types, *, is_new: bool) -> str | None:
    dim = argument(op, 1, "dim", 0)
    if not isinstance(dim, int):
        return None
    result = dim_names(len(result_types[0].shape), dim)
    operand = without(result, dim) if is_new else result
    return f"[{text_of(operand)}] -> {text_of(result)} | plus 0"


def _cat(op: Op, operand_types: Types, result_types: Types) -> str | None:
    return _join(op, operand_types, result_types, is_new=False)


def _stack(op: Op, operand_types: Types, result_types: Types) -> str | None:
    return _join(op, operand_types, result_types, is_new=True)


def _repeat(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """repeat, tile: dims that are not repeated split."""
    source, target = operand_types[0].shape, result_types[0].shape
    shift = len(target) - len(source)
    is_kept = [dim >= shift and source[dim - shift] == size for dim, size in enumerate(target)]
    names = [f"d{dim}" if kept else "_" for dim, kept in enumerate(is_kept)]
    return f"{text_of(names[shift:])} -> {text_of(names)} | plus 0"


def _repeat_interleave(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """repeat_interleave(x, repeats, dim): the dim splits too (without one the first dim, as x is flattened), unless the
    call has `output_size`.
    """
    dim, rank = argument(op, 2, "dim"), len(operand_types[0].shape)
    is_given = dict(op.kwargs).get("output_size") is not None
    if not isinstance(dim, int):
        return "... -> _ | plus 0" if is_given or not rank else f"{text_of(['n', *['_'] * (rank - 1)])} -> n | plus 0"
    names = dim_names(rank, dim) if is_given else dim_names(rank)
    return f"{text_of(names)} -> {text_of(names)} | plus 0"


def _unfold(op: Op, operand_types: Types, result_types: Types) -> str | None:
    dim = argument(op, 1, "dimension")
    if not isinstance(dim, int):
        return None
    names = dim_names(len(operand_types[0].shape), dim)
    return _view(names, [*names, "_"])


def _diagonal(op: Op, operand_types: Types, result_types: Types) -> str | None:
    first, second = argument(op, 2, "dim1", 0), argument(op, 3, "dim2", 1)
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    names = dim_names(len(operand_types[0].shape), first, second)
    return _view(names, [*without(names, first, second), "_"])


def _update(dim_at: int, *, keeps_dim: bool) -> Rule:
    """The rule of select_scatter and slice_scatter: x with a part along one dim replaced by src."""

    def rule(op: Op, operand_types: Types, result_types: Types) -> str | None:
        dim = argument(op, dim_at, "dim", 0)
        if not isinstance(dim, int):
            return None
        names = dim_names(len(operand_types[0].shape), dim)
        source = names if keeps_dim else without(names, dim)
        return f"{text_of(names)}, {text_of(source)} -> {text_of(names)} | plus 0 1"

    return rule


def _as_strided(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """as_strided(x, size, stride, offset): the first dim of x splits, if one dim of the result goes over it and the
    others, together, stay within one of its entries.
    """
    strides, offset = op.args[2:4]
    source, target = operand_types[0], result_types[0].shape
    if not isinstance(strides, tuple) or not isinstance(offset, int) or not source.shape:
        return None
    steps = [step for step in strides if isinstance(step, int)]
    entry = source.num_elements // max(1, source.shape[0])
    over = [dim for dim, step in enumerate(steps) if step == entry and target[dim] == source.shape[0]]
    reach = offset + sum((target[dim] - 1) * step for dim, step in enumerate(steps) if dim not in over[:1])
    names, results = ["_"] * len(source.shape), ["_"] * len(target)
    if over and reach < entry:
        names[0] = results[over[0]] = "n"
    return f"{text_of(names)} -> {text_of(results)} | plus 0"


FAMILIES = (
    OpFamily({"autopar.as_strided": _as_strided}, function="as_strided", size_args=(1,)),
    OpFamily(aten({"view _unsafe_view": _reshape}), size_args=(1,), is_view=True, place=regrouped),
    OpFamily(
        aten({"reshape": _reshape}),
        size_args=(1,),
        is_view=True,
        place=regrouped,
        may_copy=True,
        buffers=nothing_between,
    ),
    OpFamily(
        aten(
            {
                "unsqueeze ravel atleast_1d atleast_2d atleast_3d": _reshape,
                "squeeze squeeze.dim squeeze.dims": _squeeze,
                "unflatten.int": _unflatten,
            }
        ),
        is_view=True,
        place=regrouped,
    ),
    OpFamily(
        aten({"flatten.using_ints": _reshape}), is_view=True, place=regrouped, may_copy=True, buffers=nothing_between
    ),
    OpFamily(
        aten(
            {
                "view_as reshape_as": _reshape_like,
                "view_as_complex": "* _ -> *",
                "view_as_real": "* -> * _",
                "select.int": _cut(1, None, keeps_dim=False),
                "unbind.int": _cut(1, 0, keeps_dim=False),
                "split.Tensor split.sizes split_with_sizes unsafe_split.Tensor": _cut(2, 0, keeps_dim=True),
                "chunk unsafe_chunk tensor_split.sections tensor_split.indices": _cut(2, 0, keeps_dim=True),
                "narrow": _cut(1, None, keeps_dim=True),
                "slice.Tensor": _slice,
                "unfold": _unfold,
                "diagonal": _diagonal,
            }
        ),
        is_view=True,
    ),
    OpFamily(aten({"expand broadcast_to": "*, # -> * | plus 0"}), size_args=(1,), is_view=True, place=expanded),
    OpFamily(aten({"expand_as": "*, * -> * | plus 0"}), is_view=True, place=expanded),
    _permutation("permute", _permute),
    _permutation("transpose.int swapaxes swapdims", _swap),
    _permutation("mT adjoint", _swap_last),
    _permutation("t numpy_T", _reverse),
    _permutation("movedim.int movedim.intlist moveaxis.int moveaxis.intlist", _move),
    OpFamily(aten({"cat concat concatenate": _cat, "stack": _stack}), gradient="parts", fuses=True),
    OpFamily(
        aten(
            {
                "repeat tile": _repeat,
                "repeat_interleave.self_int": _repeat_interleave,
                "select_scatter": _update(2, keeps_dim=False),
                "slice_scatter": _update(2, keeps_dim=True),
            }
        )
    ),
)
