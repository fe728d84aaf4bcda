"""Devices that a forward names, as in ``torch.arange(n, device="cuda")`` or ``x.cuda()``: a rank of a program has one.

A trace is on the host, whatever it is for, so what names an accelerator is there too; lowering makes tensors on the
rank's device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.objects.tensor_questions import QUESTIONS
from autopar.trace.compat import torch_internals

__all__ = ["NamedDevices"]

_tensor: Any = Tensor
_MOVES = frozenset(getattr(_tensor, name) for name in ("cuda", "xpu", "hpu", "mtia", "ipu") if hasattr(_tensor, name))
_OWN = ("cpu", "meta")


class NamedDevices(TorchFunctionMode):
    """In this context, tensors on an accelerator that the code names are where those of the trace are.

    `on_host` gives what a trace has in place of a tensor that was there before.
    """

    def __init__(self, on_host: Callable[[Tensor], Tensor]) -> None:
        """See the class."""
        super().__init__()
        self._on_host = on_host

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        if func in _MOVES:
            return args[0]
        if func in QUESTIONS:
            return func(*args, **(kwargs or {}))
        leaves, structure = torch_internals.flatten((tuple(args), dict(kwargs or {})))
        args, given = torch_internals.unflatten(
            [self._on_host(x) if isinstance(x, Tensor) else x for x in leaves], structure
        )
        if "device" in given:
            given["device"] = _here(given["device"])
        if func is _tensor.to and len(args) > 1 and isinstance(args[1], str | int | torch.device):
            args = (args[0], _here(args[1]), *args[2:])
        return func(*args, **given)


def _here(device: Any) -> Any:
    """A number counts accelerators."""
    if device is None or (isinstance(device, str | torch.device) and torch.device(device).type in _OWN):
        return device
    return torch.device("cpu")
