"""Tools that watch what torch runs, such as ``torch.utils.flop_counter``: they see a model's calls, and no traces."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch.nn.modules.module as modules
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = ["unwatched"]

_TABLES = ("_global_forward_pre_hooks", "_global_forward_hooks")


@contextmanager
def unwatched() -> Generator[None]:
    """Inside, dispatch modes of the caller's and hooks on all modules that torch's own tools have registered are off.

    A call that is planned first would be counted twice, and such hooks register others on gradients.
    """
    with ExitStack() as changes:
        for name in _TABLES:
            table = cast("dict[int, Any]", getattr(modules, name))
            own = {key: hook for key, hook in table.items() if not _is_of_a_tool(hook)}
            if len(own) < len(table):
                changes.enter_context(patch.dict(table, own, clear=True))
        if not all(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()):
            changes.enter_context(_disable_current_modes())
        yield


def _is_of_a_tool(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.")
