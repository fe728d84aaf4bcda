"""Parses the options of the command line; invalid ones raise a `ProfileError` that says what to type instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from autopar.cost.measure.collective_times import all_axes
from autopar.cost.measure.probe import Probe
from autopar.errors import ProfileError
from autopar.placement import Axis

__all__ = ["matching_keys", "read_axes", "read_budget", "read_dtypes", "read_output"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def read_dtypes(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Parse dtypes such as ``"bfloat16,float32"``.

    Raises:
        ProfileError: matrix products can't be measured in one of them.
    """
    if text is None:
        return default
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in _DTYPES:
            raise ProfileError(f"--dtypes {text}: {name!r} is not one of {', '.join(_DTYPES)}")
    return names


def read_budget(text: str | None) -> float | None:
    """Parse a positive number of seconds; None if the option is missing.

    Raises:
        ProfileError: it is not such a number.
    """
    if text is None:
        return None
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ProfileError(f"--budget {text}: pass seconds, such as --budget 60")
    return seconds


def read_axes(axes: str | None, group_sizes: str | None, world_size: int) -> tuple[Axis, ...]:
    """Parse ``--axes 2x1,2x4`` (size x stride), or ``--group-sizes 2,8`` for all strides; by default all axes.

    Raises:
        ProfileError: one can't be read, or does not fit the number of processes.
    """
    possible = all_axes(world_size)
    if axes is not None and group_sizes is not None:
        raise ProfileError("--axes and --group-sizes: pass only one of them")
    if world_size == 1 and (axes or group_sizes):
        raise ProfileError(
            "one process has no groups to measure: torchrun --nproc-per-node N -m autopar.profile, or leave out "
            "--axes and --group-sizes"
        )
    if axes is not None:
        requested = [_read_axis(part, axes) for part in axes.split(",")]
        for axis in requested:
            if axis not in possible:
                raise ProfileError(
                    f"--axes {axes}: {axis.size}x{axis.stride} does not fit {world_size} processes. These do: "
                    + ",".join(f"{fit.size}x{fit.stride}" for fit in possible)
                )
        return tuple(dict.fromkeys(requested))
    if group_sizes is None:
        return possible
    sizes = [_read_count(part, f"--group-sizes {group_sizes}") for part in group_sizes.split(",")]
    for size in sizes:
        if size not in {axis.size for axis in possible}:
            raise ProfileError(
                f"--group-sizes {group_sizes}: {world_size} processes can't form groups of {size}. Possible sizes: "
                + ",".join(str(size) for size in dict.fromkeys(axis.size for axis in possible))
            )
    return all_axes(world_size, sizes)


def _read_axis(part: str, text: str) -> Axis:
    size, _, stride = part.strip().partition("x")
    where = f"--axes {text}"
    return Axis(_read_count(size, where), _read_count(stride or "1", where))


def _read_count(text: str, where: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text) or int(text) < 1:
        raise ProfileError(
            f"{where}: {text.strip()!r} is not a positive integer. Pass group sizes such as --group-sizes 2,8, or "
            "sizes and strides such as --axes 2x1,2x4"
        )
    return int(text)


def read_output(text: str | None, default: Path) -> Path:
    """The file to write to.

    Raises:
        ProfileError: it is a folder or a device, or its folder can't be written to.
    """
    if text is None:
        return default
    if not text:
        raise ProfileError("--output '' names no file: write a path, such as --output profile.json")
    path = Path(text).expanduser()
    if path.is_dir():
        raise ProfileError(f"--output {text} is a folder: name a file in it, such as {path / 'profile.json'}")
    if path.exists() and not path.is_file():  # a device, which may never end when the earlier profile is read
        raise ProfileError(f"--output {text} is no file: name one, such as profile.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".lock").touch()
    except OSError as error:
        raise ProfileError(f"--output {text} can't be written: {error.strerror}. Name another file") from error
    return path


def matching_keys(option: str, globs: Sequence[str], probes: Iterable[Probe]) -> frozenset[str]:
    """The keys of `probes` that at least one of `globs` matches.

    Raises:
        ProfileError: one matches nothing.
    """
    keys = [key for probe in probes for key in probe.keys]
    by_pattern = {pattern: [key for key in keys if fnmatchcase(key, pattern)] for pattern in globs}
    for pattern, matches in by_pattern.items():
        if not matches:
            kinds = dict.fromkeys(key.split("/")[0] for key in keys)
            raise ProfileError(
                f"{option} {pattern!r} matches no key that is measured here. An example is {keys[0]!r}; keys begin "
                f"with {', '.join(kinds)}; --list shows all"
            )
    return frozenset(key for matches in by_pattern.values() for key in matches)
