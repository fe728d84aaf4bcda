"""The file of a profile, which several processes may read and add to at the same time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

from filelock import FileLock

from autopar.cost.profile import Profile
from autopar.errors import MissingPriceError, ProfileError
from autopar.suggestions import suggest_path

__all__ = ["keep", "load_profile", "read", "update"]

_LOCK_S = 60.0  # others hold the lock for one read and one write: who waits longer waits for a process that hangs


def load_profile(given: Profile | str | Path) -> Profile:
    """The profile in the file that ``python -m autopar.profile`` wrote, or the one that is given.

    Raises:
        ProfileError: there is no such file.
        MissingPriceError: there is no profile in it.
    """
    if isinstance(given, Profile):
        return given
    try:
        return Profile.load(given)
    except (OSError, ValueError, TypeError) as error:
        raise ProfileError(
            f"profile={str(given)!r} can't be read: {error}. Measure one on the device: "
            f"python -m autopar.profile --output {given}{suggest_path(given)}"
        ) from error


def read(path: str | Path) -> Profile | None:
    """The profile in the file `path`; None if there is no such file, or it is none.

    A file that is no profile (of this version) is renamed, with a warning that says to what, so that a new one can take
    its place.
    """
    path = Path(path)
    try:
        return Profile.load(path)
    except FileNotFoundError:
        return None
    except (MissingPriceError, UnicodeDecodeError) as error:
        aside = path.with_name(path.name + ".damaged")
        path.replace(aside)
        warnings.warn(f"{path} can't be used: {error}. It is kept as {aside}", stacklevel=2)
        return None


def update(path: str | Path, change: Callable[[Profile | None], Profile]) -> Profile:
    """Replace the profile in the file `path` by ``change(profile)``, and return that.

    Nothing that others add between reading and writing is lost: they wait for this, for up to a minute.

    Args:
        path: the file; its folder is made if need be.
        change: gets what is in the file (None: no file, or a damaged one), gives what is to be in it.

    Raises:
        filelock.Timeout: somebody has been changing the file for a minute.

    Example:
        >>> update(path, lambda found: (found or empty).with_layers({key: layer}))    # doctest: +SKIP
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock", timeout=_LOCK_S):
        changed = change(read(path))
        changed.save(path)
    return changed


def keep(path: str | Path, change: Callable[[Profile | None], Profile]) -> bool:
    """As `update`, for what nobody waits for: where the file can't be written, a warning.

    Returns:
        Whether it was written.
    """
    try:
        update(path, change)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        _warn_once(f"what is measured is not kept, {path} can't be written: {type(error).__name__}: {error}")
        return False
    return True


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
