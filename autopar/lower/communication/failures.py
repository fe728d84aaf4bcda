"""Errors of a step name the rank, the stage and the action in which they were raised."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from autopar.errors import AutoparError, PipelineError, RankError
from autopar.schedules.action_lists import Action

__all__ = ["naming_failures"]


@contextmanager
def naming_failures(who: str, action: Action | str) -> Generator[None]:
    """Inside, `who` does `action`: one of a stage, or a text such as ``"broadcasting the loss"``.

    Raises:
        PipelineError: something was raised inside, which is its cause, a lost rank for instance; another `AutoparError`
            passes as it is, with a note.
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
        raise PipelineError(
            f"{who} failed in {where}: {type(error).__name__}: {error}\nThe step can't be finished: end all processes "
            "and start again from the last checkpoint."
        ) from error
