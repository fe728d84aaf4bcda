"""A model of float32 computes in float64 on one device, and creates what it creates for float32."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.lower.compat import leaves_of, map_leaves
from autopar.trace import is_unlike

__all__ = ["FOLLOWS", "Follows", "KeptDouble", "widen_float"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Follows:
    """What becomes float64 besides what is computed of a model's floating-point numbers.

    Args:
        integers: what is computed of integers of the call, and of constants with them.
        is_of_float32: all floating-point numbers of the model's own program are float32.
    """

    integers: bool = False
    is_of_float32: bool = False


FOLLOWS = Follows()


class KeptDouble(TorchFunctionMode):
    """A mode in which results computed from `roots` are never cast to a floating dtype narrower than float64.

    Rounding would hide errors in models that compute a norm or a loss in float32 regardless of their parameters' dtype.
    With `follows.integers` what is computed of integers is float64, too: sines of times in diffusion models.

    A program has the constants of the model that was traced, rounded to its dtype: ``torch.ones(2, dtype=x.dtype)``,
    ``torch.finfo(x.dtype).eps``.  With `follows.is_of_float32` they are the same here, as a dtype that `roots` have
    reads as float32.
    """

    _CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
    _TO = (Tensor.to, Tensor.type, Tensor.type_as)
    _CREATIONS = (Tensor.new_full, Tensor.new_tensor)  # zeros and ones are the same in every dtype

    def __init__(self, roots: Iterable[Any], follows: Follows) -> None:
        super().__init__()
        self._followed: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._follows = follows
        self._note(roots)

    def _note(self, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if not isinstance(x, Tensor):
                continue
            if x.dtype == torch.float64 or (self._follows.integers and not x.is_floating_point()):
                self._followed[x] = True

    def _is_followed(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x in self._followed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        followed = [x for x in leaves_of((args, kwargs)) if self._is_followed(x)]
        if not followed:
            return func(*args, **kwargs)
        if self._follows.is_of_float32 and self._is_new(func, args):
            return self._created(func, args, kwargs)
        if func in self._CASTS:
            result = args[0] if args[0].is_floating_point() else args[0].double()
        elif func in self._TO or self._follows.integers or any(x.is_floating_point() for x in followed):
            result = self._widened(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._note(leaves_of(result))
        return torch.float32 if self._follows.is_of_float32 and result is torch.float64 else result

    def _widened(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_leaves(_widen_dtype, (args, kwargs))
        if not _writes(func):
            args, kwargs = map_leaves(widen_float, (args, kwargs))  # some ops need equal dtypes
            return func(*args, **kwargs)
        if isinstance(args[0], Tensor) and args[0].dtype == torch.float32:
            _widen_in_place(args[0])
            self._note(args[:1])
        rest, kwargs = map_leaves(widen_float, (args[1:], kwargs))
        return func(args[0], *rest, **kwargs)

    def _is_new(self, func: Any, args: Any) -> bool:
        """Whether the call gives a constant where it is traced: of x, no more than the dtype matters."""
        return func in self._CREATIONS or (func in self._TO and not self._is_followed(args[0]))

    def _created(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The constant, in the dtype that x has where it is traced."""
        made = func(*args, **kwargs)
        if made.dtype != torch.float64:
            return made
        if func is Tensor.new_full and not is_unlike(args[0].shape, made.shape):  # an op of x
            self._note((made,))
            return made
        return made.float() if func in self._CREATIONS else args[0].to(made.device, torch.float32)


def _writes(func: Any) -> bool:
    """Whether `func` writes to its first argument, as add_, __iadd__ and __setitem__ do."""
    name = str(getattr(func, "__name__", ""))
    is_dunder = name.startswith("__")
    return name[2:5] in ("set", "iad", "isu", "imu", "itr") if is_dunder else name.endswith("_")


def _widen_in_place(x: Tensor) -> None:
    """Make `x` float64, and what it is a view of: in a program its new value is computed of float64."""
    whole = x if x._base is None else x._base
    whole.data = whole.data.double()
    if whole is not x:
        x.data = whole.data.as_strided(x.shape, x.stride(), x.storage_offset())


def _widen_dtype(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in _NARROW else x


def widen_float(x: Any) -> Any:
    """`x`, in float64 if it is a tensor of float32 that wants no gradient."""
    return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 and not x.requires_grad else x
