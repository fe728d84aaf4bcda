"""Forward hooks on submodules that keep what they see: they run once, in the trace, whose tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any, cast

from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.objects.references import cell_content
from autopar.trace.compat import torch_internals

__all__ = ["notes_on_kept_tensors", "refuse_kept_tensors"]

_DEPTH = 3  # of containers in containers: an object's dict of lists


_WAY_OUT = (
    "hooks on submodules run once, when the model is traced. Let the hook set an attribute of the module that it is "
    "called with (module.features = output), and read that after each call"
)


def refuse_kept_tensors(model: nn.Module) -> None:
    """Raise TraceError if a hook on a submodule of `model`, which was traced, has put a tensor of the trace away.

    Attributes of modules are outputs of the program (`assigned_attributes`); a list or a dict of the script's can't be.
    """
    for path in _keeping(model):
        raise TraceError(
            f"a forward hook on {path!r} keeps a tensor outside of the model, which would have no values: {_WAY_OUT}"
        )


def notes_on_kept_tensors(copied: nn.Module) -> tuple[str, ...]:
    """Notes on hooks of the copy of a model that was traced which keep tensors: forward itself may need them."""
    return tuple(f"a forward hook on {path!r} keeps tensors for forward alone: {_WAY_OUT}" for path in _keeping(copied))


def _keeping(model: nn.Module) -> Iterator[str]:
    """The submodules with hooks that have put tensors of a trace away."""
    own = frozenset(map(id, model.modules()))
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    for path, module in modules:
        kept: dict[str, dict[int, Any]] = vars(module)
        hooks = [*kept["_forward_pre_hooks"].values(), *kept["_forward_hooks"].values()] if path else []
        if any(_has_fake(each, own, _DEPTH) for hook in hooks for each in _reached_by(hook)):
            yield path


def _reached_by(hook: Callable[..., Any]) -> Iterator[Any]:
    """What a hook can have put tensors in: what it is bound to, encloses, or names of the script's globals."""
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _reached_by(hook.func)
        return
    untyped: Any = hook
    yield getattr(untyped, "__self__", None)
    function = getattr(untyped, "__func__", untyped)
    code = getattr(function, "__code__", None)
    if code is None:
        yield vars(hook) if hasattr(hook, "__dict__") else None
        return
    yield from map(cell_content, function.__closure__ or ())
    yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _has_fake(x: Any, own: frozenset[int], depth: int) -> bool:
    """Whether `x` is a tensor of a trace, or has one in it; `own` modules and classes are not looked into."""
    if isinstance(x, Tensor):
        return torch_internals.is_fake(x)
    if depth == 0 or id(x) in own or isinstance(x, type | ModuleType):
        return False
    if isinstance(x, Mapping):
        parts = list(cast("Mapping[Any, Any]", x).values())
    elif isinstance(x, list | tuple | set):
        parts = list(cast("list[Any]", x))
    else:
        parts = list(getattr(x, "__dict__", {}).values())
    return any(_has_fake(part, own, depth - 1) for part in parts)
