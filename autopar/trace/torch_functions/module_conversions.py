"""``self.to(x.device)``, ``self.head.float()`` and the like in a forward: nothing where modules are that way already.

torch replaces all parameters of a module that it converts, also by themselves, which a trace can't follow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.objects.module_conversions import first_conversion
from autopar.trace.compat import torch_internals
from autopar.trace.compat.source_lines import user_line

__all__ = ["kept_modules"]


@contextmanager
def kept_modules(model: nn.Module) -> Generator[None]:
    """In this context, modules of `model` stay as they are.

    Raises:
        TraceError: (inside) one is converted to another dtype, or moved to another device.
    """
    untyped: Any = nn.Module
    original = untyped._apply
    own = {id(module) for module in model.modules()}

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        if id(module) not in own:
            return original(module, fn, *args, **kwargs)
        with torch_internals.plain_tensors():
            conversion = first_conversion(module, fn)
        if conversion is not None:
            before, after = conversion
            raise TraceError(
                f"{user_line()}: forward converts {type(module).__name__} from {before} to {after}, but parameters "
                "stay as they are while a program runs: convert the model before it is parallelized, or the tensors "
                "that this module gets and gives"
            )
        return module

    with patch.object(nn.Module, "_apply", apply):
        yield
