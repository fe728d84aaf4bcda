"""Parts of messages: suggestions for unknown names, and kinds of values."""

import difflib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["kind_of", "suggest", "suggest_path"]


def kind_of(value: object) -> str:
    """``"an int"``, ``"a Tensor"``: the class of `value` with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def suggest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown `name`, with the most similar of `names`; "" if none is similar."""
    matches = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def suggest_path(path: object) -> str:
    """As `suggest`, for a file that doesn't exist: a similar file in its folder, or a similar folder."""
    missing = Path(str(path))
    with suppress(OSError, ValueError):  # a folder that can't be listed, a null byte
        while not missing.parent.is_dir():
            missing = missing.parent
        return "" if missing.exists() else suggest(missing.name, (entry.name for entry in missing.parent.iterdir()))
    return ""
