"""Files of profiles, which several processes may read and add to at the same time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

from filelock import FileLock

from autopar.cost.profile import Profile
from autopar.errors import MissingPriceError, ProfileError
from autopar.user_text.suggestions import suggest_path

__all__ = ["keep", "load_profile", "read", "update"]

_LOCK_S = 60.0  # processes hold the lock for one read and one write: after a minute the holder probably hangs


def load_profile(profile: Profile | str | Path) -> Profile:
    """Return `profile`, or the one in the file of that path, which ``python -m autopar.profile`` wrote.

    Raises:
        ProfileError: the file can't be read.
        MissingPriceError: it holds no profile.
    """
    if isinstance(profile, Profile):
        return profile
    try:
        return Profile.load(profile)
    except (OSError, ValueError, TypeError) as error:
        raise ProfileError(
            f"profile={str(profile)!r} can't be read: {error}. Measure one on the device: "
            f"python -m autopar.profile --output {profile}{suggest_path(profile)}"
        ) from error


def read(path: str | Path) -> Profile | None:
    """Return the profile in the file `path`; None if there is no such file, or it holds no profile.

    A file that holds no profile (of this version) is renamed, with a warning that names the new path, so that a new
    profile can replace it.
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
    """Replace the profile in the file `path` by ``change(profile)``, and return it.

    A lock keeps other processes from changing the file between reading and writing, so that no update is lost.

    Args:
        path: the file; its folder is created if necessary.
        change: gets the profile in the file (None: no file, or a damaged one), and returns the new one.

    Raises:
        filelock.Timeout: another process has held the lock for a minute.

    Example:
        >>> update(path, lambda profile: (profile or empty).with_layers({key: layer}))    # doctest: +SKIP
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock", timeout=_LOCK_S):
        changed = change(read(path))
        changed.save(path)
    return changed


def keep(path: str | Path, change: Callable[[Profile | None], Profile]) -> bool:
    """As `update`, but warn if the file can't be written.

    Returns:
        Whether it was written.
    """
    try:
        update(path, change)
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        _warn_once(f"measurements are not kept, {path} can't be written: {type(error).__name__}: {error}")
        return False
    return True


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
