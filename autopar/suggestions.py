"""What a message about something that is unknown says may be meant."""

import difflib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["suggest", "suggest_path"]


def suggest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown `name`: which of `names` may be meant, or ""."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def suggest_path(path: object) -> str:
    """The same for a file that there is not, of those in its folder, or of folders where that is missing."""
    wanted = Path(str(path))
    with suppress(OSError, ValueError):  # a folder that can't be listed, a null byte
        while not wanted.parent.is_dir():
            wanted = wanted.parent
        return "" if wanted.exists() else suggest(wanted.name, (each.name for each in wanted.parent.iterdir()))
    return ""
