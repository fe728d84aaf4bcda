"""Functions of torch that a program can't hold, each refused with what can be written instead.

An export leaves out hooks on gradients, and seeds, and a program without them computes something else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.trace.compat.source_lines import user_line

__all__ = ["RefusedFunctions", "UnknownShiftError", "refuse_backward_hooks", "refused_seeds"]

_tensor: Any = Tensor
_HOOKS = (_tensor.register_hook, _tensor.register_post_accumulate_grad_hook)
_ROLLS: tuple[Any, ...] = (torch.roll, Tensor.roll)
_TABLES = ("_backward_hooks", "_backward_pre_hooks")
_SEEDS = ("manual_seed", "seed", "set_rng_state")
_NO_HOOK = (
    "which a parallel program has no place to call. To change a gradient, pass its tensor through a "
    "torch.autograd.Function that does so in its backward; to look at one, return the tensor and compute the loss "
    "from it outside"
)


class UnknownShiftError(TraceError):
    """A tensor is rolled by a number that a program doesn't know."""


class RefusedFunctions(TorchFunctionMode):
    """In this context, hooks on gradients (in `training`), generators other than torch's own and rolls by numbers of
    data raise TraceError.
    """

    def __init__(self, *, training: bool) -> None:
        """Outside of `training`, hooks are left out."""
        super().__init__()
        self._training = training

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        given = kwargs or {}
        if self._training and func in _HOOKS:
            raise TraceError(f"{_where()}: the forward registers a hook on a gradient, {_NO_HOOK}")
        if given.get("generator") is not None:
            raise TraceError(
                f"{_where()}: the forward draws from a torch.Generator of its own, of which every rank would have the "
                "same numbers for other rows. Draw without generator=, or outside of the model and pass the tensor"
            )
        if func in _ROLLS and _are_unknown((*args[1:2], given.get("shifts"))):
            raise UnknownShiftError(
                f"{_where()}: torch.roll by a number that depends on data, which a program doesn't know. Gather with a "
                "tensor of places: x.gather(dim, ((torch.arange(n) + shift) % n) expanded to the shape of x) is "
                "torch.roll(x, -shift, dim)"
            )
        return func(*args, **given)


def _are_unknown(shifts: Sequence[Any]) -> bool:
    """Whether one of these numbers, or sequences of numbers, follows from the values of a tensor."""
    return any(
        isinstance(x, torch.SymInt | Tensor) or (isinstance(x, tuple | list) and _are_unknown(cast("list[Any]", x)))
        for x in shifts
    )


@contextmanager
def refused_seeds() -> Generator[None]:
    """Inside, setting the seed or the state of torch's generator raises TraceError."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TraceError(
            f"{_where()}: the forward sets the seed or the state of torch's random generator, and a program would draw "
            "other numbers in each step. Make numbers that stay the same in __init__, as a buffer, or pass them as an "
            "input; seed in the training loop"
        )

    with ExitStack() as patches:
        for place in (torch, torch.random):
            for name in _SEEDS:
                patches.enter_context(patch.object(place, name, refuse))
        yield


def refuse_backward_hooks(model: nn.Module) -> None:
    """Check that no module of a model that trains has hooks on its backward.

    Raises:
        TraceError: one has.
    """
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    for name, module in modules:
        if any(vars(module).get(table) for table in _TABLES):
            what = f"the module {name!r}" if name else "the model"
            raise TraceError(f"{what} has a hook on its backward (register_full_backward_hook), {_NO_HOOK}")


def _where() -> str:
    return user_line() or "the model"
