"""Standard output of commands: a full disk, a reader that went away, and terminals that lack letters."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["CommandOutput", "checked_output"]


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


@dataclass
class CommandOutput:
    """What a command ends with: its exit status."""

    status: int = 0


@contextmanager
def checked_output(program: str) -> Generator[CommandOutput]:
    """Inside, `program` writes to standard output; what can't be written is one line on standard error, and status 1.

    Letters that the output's encoding lacks are written as "?".  A reader that has read enough (``head``) is no error.
    """
    stream: Any = sys.stdout  # None where who started this has closed it, and anything in tests
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    output = CommandOutput()
    try:
        yield output
        if stream is not None:
            stream.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:  # of another file
            raise
        _drop_output()
        sys.stderr.write(f"{program}: the output can't be written: {error.strerror}\n")
        output.status = 1


def _drop_output() -> None:
    """Python writes what it still holds when it ends, and would fail again."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
