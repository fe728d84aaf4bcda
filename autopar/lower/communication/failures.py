"""Errors of a step name the rank, the stage and the action in which they were raised.

Want of memory stays torch's own error on every rank, as loops that try again with a smaller batch catch that.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from autopar.errors import AutoparError, PipelineError, RankError
from autopar.objects.caught_errors import also_caught_as
from autopar.schedules.action_lists import Action

__all__ = ["StepMemoryError", "is_out_of_memory", "naming_failures"]

_HOST = "DefaultCPUAllocator: can't allocate memory"  # c10/core/CPUAllocator.cpp raises a plain RuntimeError


class StepMemoryError(AutoparError, torch.OutOfMemoryError):
    """A device, or a host, has no memory left for a step; on every rank."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a tensor found no memory, on a device or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _HOST in str(error))


@contextmanager
def naming_failures(who: str, action: Action | str) -> Generator[None]:
    """Inside, `who` does `action`: one of a stage, or a text such as ``"broadcasting the loss"``.

    Raises:
        StepMemoryError: memory ran out inside.
        PipelineError: something else was raised inside, which is its cause, a lost rank for instance, and as which it
            is caught, too; another `AutoparError` passes as it is, with a note.
    """
    where = f"stage {action.stage}, action {action}" if isinstance(action, Action) else action
    try:
        yield
    except RankError as error:
        raise PipelineError(f"{who} failed in {where}: {error}") from error
    except AutoparError as error:
        error.add_note(f"raised on {who} in {where}")
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise StepMemoryError(f"{who} failed in {where}: {error}") from error
        raise also_caught_as(PipelineError, error)(
            f"{who} failed in {where}: {type(error).__name__}: {error}\nThe step can't be finished. If every rank "
            "catches this, they may call the model again; else end all processes and start again from the last "
            "checkpoint."
        ) from error
