"""Functions that ``torch.jit.script`` or ``torch.jit.trace`` has compiled."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["scripts_run_op_by_op"]


@contextmanager
def scripts_run_op_by_op() -> Generator[None]:
    """Inside, these functions run as they are written.

    From their second call on, torch runs what it has optimized: several ops become one with a backward of its own, in
    which they run without gradients, so that a trace would take them for ops that have none.
    """
    untyped: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    kinds = (untyped.ScriptFunction, untyped.ScriptMethod)
    callers = [kind.__call__ for kind in kinds]
    for kind, caller in zip(kinds, callers, strict=True):
        kind.__call__ = _op_by_op(caller)
    try:
        yield
    finally:
        for kind, caller in zip(kinds, callers, strict=True):
            kind.__call__ = caller


def _op_by_op(caller: Callable[..., Any]) -> Callable[..., Any]:
    untyped: Any = torch.jit

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        function._debug_flush_compilation_cache()  # what was optimized in a call before the trace would run
        with untyped.optimized_execution(False):
            return caller(function, *args, **kwargs)

    return call
