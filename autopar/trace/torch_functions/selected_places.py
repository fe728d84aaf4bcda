"""Where a mask is not zero (``torch.where(mask)``, ``mask.nonzero(as_tuple=True)``), as loops over experts ask.

How many places there are depends on values.  `Places` stand for the numbers along one dim of the mask: what is read
there is a `Selected`, with the whole tensor behind it, and what is added or written there is zero, or stays, where
nothing is selected.  So rows that few experts choose are computed by each for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.objects.tensor_versions import version_of
from autopar.trace.compat import torch_internals
from autopar.trace.compat.source_lines import user_line
from autopar.trace.python_values.asked_values import AskedValues
from autopar.trace.torch_functions.selections import Mask, Selected, refuse_size

__all__ = ["Places", "SelectedPlaces"]

_OF = "of where a mask is not zero"
_READS = (Tensor.index_select, torch.index_select)
_ADDITIONS: tuple[Any, ...] = (Tensor.index_add, torch.index_add, Tensor.index_add_)


class Places:
    """The numbers along dim `dim` of where a mask is not zero, in the order of `nonzero`."""

    def __init__(self, mask: Mask, dim: int) -> None:
        """The mask is boolean."""
        self.mask, self.dim = mask, dim

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise TraceError: what isn't read, added to or written at the places needs to know them."""
        places = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        refuse_size(getattr(func, "__name__", str(func)), _OF, [places.mask])

    def __getattr__(self, name: str) -> Any:
        """Raise TraceError for attributes of tensors."""
        if not hasattr(Tensor, name):
            raise AttributeError(name)
        refuse_size(name, _OF, [self.mask])


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Places, *_: Any) -> NoReturn:
        refuse_size(name, _OF, [self.mask])

    return refuse


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "truediv", "mod", "neg", "eq", "ne", "lt", "le",
              "gt", "ge", "len", "getitem", "bool", "iter", "int", "index"):  # fmt: skip
    setattr(Places, f"__{_name}__", _refused(_name))


class SelectedPlaces(TorchFunctionMode):
    """In this context, places of a mask of router's choices, and of what else the model computes, are `Places`."""

    def __init__(self, questions: AskedValues, notes: dict[str, None]) -> None:
        """Masks that `questions` can answer are left to them; `notes` get what the user should know."""
        super().__init__()
        self._questions, self._notes = questions, notes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        given = dict(kwargs or {})
        if _asks_for_places(func, args, given) and self._is_unknown(args[0]):
            return self._places(args[0])
        if func is Tensor.__getitem__ and _are_places(args[1]):
            return _read(*args)
        if func is Tensor.__setitem__ and isinstance(args[1], Places):
            return _write(*args)
        if func in _READS and isinstance(args[-1], Places) and args[1] == 0:
            return _read(args[0], args[-1])
        if func in _ADDITIONS and len(args) == 4 and isinstance(args[2], Places) and not given:
            total = _summed(args[0], args[1], args[2], args[3])
            return args[0].add_(total) if func is Tensor.index_add_ else args[0] + total
        return func(*args, **given)

    def _is_unknown(self, mask: Tensor) -> bool:
        asked = self._questions
        known = torch_internals.has_known_values(mask) or asked.computation_of(mask) is not None
        return not known and not asked.follows_from_buffers(mask)

    def _places(self, x: Tensor) -> tuple[Places, ...]:
        where = user_line()
        chosen = x.clone() if x.dtype == torch.bool else x != 0
        mask = Mask(chosen, x, version_of(x), where)
        self._notes[
            f"{where}: what is read where a mask is not zero is computed for all rows, as their number depends on "
            "values. Experts in a loop then cost as if every token chose all of them; rows sorted by expert with "
            "torch._grouped_mm, or stacks of experts, cost less"
        ] = None
        return tuple(Places(mask, dim) for dim in range(chosen.dim()))


def _asks_for_places(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if len(args) != 1 or not isinstance(args[0], Tensor) or not args[0].dim() or args[0].is_floating_point():
        return False
    if func in (torch.nonzero, Tensor.nonzero):
        return kwargs == {"as_tuple": True}
    return func is torch.where and not kwargs


def _are_places(index: Any) -> bool:
    indices: tuple[Any, ...] = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    return any(isinstance(each, Places) for each in indices)


def _read(x: Tensor, index: Any) -> Selected:
    """``x[places]``, ``x[places, places]`` and the same with ``None`` and ``:`` behind: [selected, *rest]."""
    indices: tuple[Any, ...] = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    places = [each for each in indices if isinstance(each, Places)]
    mask, behind, dims = places[0].mask, indices[len(places) :], [each.dim for each in places]
    is_plain = all(each is place for each, place in zip(indices, places, strict=False))
    if not is_plain or any(each.mask is not mask for each in places) or len(set(dims)) != len(dims):
        refuse_size("__getitem__", _OF, [mask])
    if any(each is not None and each is not ... and each != slice(None) for each in behind):
        refuse_size("__getitem__", _OF, [mask])
    shape = mask.copy.shape
    if any(x.shape[at] != shape[dim] for at, dim in enumerate(dims)):
        refuse_size("__getitem__", "of another size than the mask's", [mask])
    rest = list(range(len(dims), x.dim()))
    in_order = x.permute(*sorted(range(len(dims)), key=dims.__getitem__), *rest)
    tail = x.shape[len(dims) :]
    whole = in_order.reshape(*(shape[d] if d in dims else 1 for d in range(len(shape))), *tail)
    return Selected(whole[(*[slice(None)] * len(shape), *behind)], mask)


def _summed(x: Tensor, dim: int, places: Places, rows: Any) -> Tensor:
    """The sum of rows at each place, [places, *rest], of what dim 0 of `x` gets.

    Raises:
        TraceError: `rows` are no rows at these places.
    """
    mask = places.mask
    if not isinstance(rows, Selected) or rows.mask is not mask or dim != 0:
        refuse_size("index_add", _OF, [mask])
    num_dims = mask.copy.dim()
    others = tuple(d for d in range(num_dims) if d != places.dim)
    if rows.values.shape[num_dims:] != x.shape[1:] or mask.copy.shape[places.dim] != x.shape[0]:
        refuse_size("index_add", "of rows of another size", [mask])
    zeros = rows.replaced(0)
    return zeros.sum(others) if others else zeros


def _write(x: Tensor, places: Places, rows: Any) -> None:
    """``x[places] = rows``: as in torch, which one counts is undefined if a place is there twice."""
    total = _summed(x, 0, places, rows)
    mask = places.mask.copy
    others = tuple(d for d in range(mask.dim()) if d != places.dim)
    chosen = mask.any(others) if others else mask
    x.copy_(torch.where(chosen.reshape(-1, *[1] * (x.dim() - 1)), total.to(x.dtype), x))
