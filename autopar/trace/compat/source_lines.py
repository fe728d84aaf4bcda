"""The user's own lines in stacks of calls."""

from __future__ import annotations

import inspect
import re
import sysconfig
import traceback
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from autopar.trace.compat import torch_internals

__all__ = ["frame_of_text", "is_users", "user_frame", "user_line", "user_lines"]

Line = tuple[str, int]
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_TRACE_DIRECTORY = str(Path(__file__).parents[1])


def user_line() -> str:
    """``file:line`` of the user's innermost call under way, or "the model"."""
    return user_frame(traceback.extract_stack()) or "the model"


def user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours, or ""."""
    own = (frame for frame in reversed(frames) if is_users(frame.filename))
    return next((f"{frame.filename}:{frame.lineno}" for frame in own), "")


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a file of source code is neither torch's, nor Python's, nor ours."""
    standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not standard and not file.startswith((torch_internals.TORCH_DIRECTORY, _TRACE_DIRECTORY, "<"))


def user_lines() -> tuple[Line, Line]:
    """The user's innermost line under way, and the innermost in a forward, which torch notes for ops."""
    frame = inspect.currentframe()
    innermost: Line | None = None
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            line = code.co_filename, frame.f_lineno
            innermost = innermost or line
            if code.co_name == "forward":
                return innermost, line
        frame = frame.f_back
    return innermost or ("", 0), ("", 0)


@lru_cache(maxsize=4096)
def frame_of_text(stack_trace: str) -> str:
    """`user_frame` for the text that fx keeps with a node."""
    result = re.findall(r'^\s*File "(.+?)", line (\d+)', stack_trace, flags=re.MULTILINE)
    return user_frame([traceback.FrameSummary(name, int(line), "") for name, line in result])
