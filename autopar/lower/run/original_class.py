"""The class of a parallel module: a subclass of the original's, so that its attributes and methods work."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from functools import cache, partial, partialmethod
from typing import Any, NoReturn

from torch import nn
from torch.fx import Proxy

from autopar.errors import ModelError
from autopar.lower.compat import not_compiled
from autopar.lower.run.generation import generation_methods

__all__ = ["make_instance", "original_class", "refuse_tracer"]

_LOGGER = logging.getLogger("autopar")
_OWN_SPECIAL = ("__deepcopy__", "__reduce_ex__")

_INSTEAD = {
    "compile": "pass compile=True to autopar.parallelize",
    "gradient_checkpointing_enable": "the plan decides what is computed again in backward: pass autopar.parallelize "
    "memory=, or a constraint such as 'recompute=full'",
    "share_memory": "each rank has memory of its own; to pass values to another process, share the tensors of "
    "full_state_dict()",
    "resize_token_embeddings": "resize those of the original model, and call autopar.parallelize after it",
}
"""Methods of modules that can't work on a parallel one, and what does."""


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user gave `module`; a twin with a loss function has one of its own."""
    return getattr(type(module), "own_class", type(module))


def make_instance(runtime: type[nn.Module], module: nn.Module) -> Any:
    """An instance of `runtime` and of the class of `module`, not initialized yet.

    Where the class overrides what modules do with their state (``load_state_dict``, ``extra_repr``), ``super()`` leads
    to `runtime`, which wins everywhere else.
    """
    original = original_class(module)
    hidden = sorted(_own_members(runtime).keys() & {*vars(module), *dir(original)} - set(dir(nn.Module)))
    if hidden:
        _LOGGER.warning(
            "%s has attributes that a parallelized model uses itself, which hide them: %s. Rename them to reach them",
            original.__name__, ", ".join(hidden),
        )  # fmt: skip
    return object.__new__(_make_class(runtime, original, _signature(module)))


def _own_members(runtime: type[nn.Module]) -> dict[str, Any]:
    """What `runtime` has that no other module has."""
    known = set(dir(nn.Module)) - set(_OWN_SPECIAL)
    kinds = runtime.__mro__[: runtime.__mro__.index(nn.Module)]
    members = {name: member for kind in reversed(kinds) for name, member in vars(kind).items() if name not in known}
    return {name: member for name, member in members.items() if name in _OWN_SPECIAL or not name.startswith("__")}


class _Signature(inspect.Signature):
    """A signature that equals another by its text, as a default may be a list or a dict, which has no hash."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, inspect.Signature) and str(self) == str(other)


@cache
def _make_class(runtime: type[nn.Module], original: type[nn.Module], signature: _Signature) -> type[nn.Module]:
    members = _own_members(runtime)
    members |= {name: _refusal(name, what) for name, what in _INSTEAD.items() if hasattr(original, name)}
    if hasattr(original, "save_pretrained"):
        members["save_pretrained"] = partialmethod(_save_pretrained, original)
    members |= generation_methods(original)
    members |= {
        "forward": _forward(runtime, original, signature),
        "__call__": nn.Module.__call__,
        "__new__": staticmethod(partial(_make_original, original)),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return types.new_class(original.__name__, (original, runtime), exec_body=lambda body: body.update(members))


def _signature(module: nn.Module) -> _Signature:
    """The signature of the original's forward, with ``self``: frameworks read the model's arguments from it."""
    own = inspect.signature(module.forward)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return _Signature([first, *own.parameters.values()], return_annotation=own.return_annotation)


def _forward(runtime: Any, original: Any, signature: inspect.Signature) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_proxies(args, kwargs)
        return runtime.forward(self, *args, **kwargs)

    untyped: Any = forward
    untyped.__wrapped__ = original.forward  # torch.fx takes arguments, and so what it passes, from the innermost one
    made: Any = not_compiled(forward)
    made.__signature__ = signature
    made.__doc__ = runtime.forward.__doc__
    return made


def _check_proxies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what ``torch.fx.symbolic_trace`` passes."""
    if any(isinstance(x, Proxy) for x in (*args, *kwargs.values())):
        refuse_tracer()


def refuse_tracer() -> NoReturn:
    """Raise ModelError: the model is traced, not run."""
    raise ModelError(
        "a parallelized model, which runs a plan on several devices, can't be traced or scripted by torch.jit, "
        "torch.fx, torch.export or torch.onnx: trace the original model, with the values of full_state_dict()"
    )


def _make_original(original: type[nn.Module], _: object, *args: Any, **kwargs: Any) -> nn.Module:
    """What ``type(model)(config)`` is."""
    return original(*args, **kwargs)


def _save_pretrained(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The original's method with whole weights: the first rank writes, and all ranks return when it has."""
    with self._saving_whole() as is_writer:
        return original.save_pretrained(self, *args, **kwargs) if is_writer else None


def _refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError(f"{name}() has no effect on a parallelized model, whose program is made: {instead}")

    return refuse
