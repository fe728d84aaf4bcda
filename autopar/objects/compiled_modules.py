"""Modules that ``torch.compile(module)`` returned: wrappers whose attributes are those of the module inside."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

__all__ = ["CompiledPart", "is_compiled", "uncompiled"]


class CompiledPart(nn.Module):
    """In the tree of a parallel module, what stands for such a wrapper, whose own class compiles when it is made."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module inside, under `_orig_mod` as in the wrapper."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inside = self.__dict__["_modules"].get("_orig_mod")
            if inside is None:
                raise
            return getattr(inside, name)


def is_compiled(module: object) -> bool:
    """Whether it is such a wrapper."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # else nothing has been compiled
    return frames is not None and isinstance(module, frames.OptimizedModule)


def uncompiled(module: Any) -> Any:
    """The module inside; anything else as it is."""
    return module._orig_mod if is_compiled(module) else module
