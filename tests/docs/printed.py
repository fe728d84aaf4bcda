"""The pages that show commands: their files are written, their commands run, and what they print is compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY, run_program

__all__ = ["assert_prints", "read_commands", "read_files", "run_as_printed", "run_forked"]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"(?:OMP_NUM_THREADS=1 )?(?:python|torchrun --standalone --nproc-per-node (\d)) (\w+\.py)")
_NUMBER = re.compile(r"[+-]?\d[\d.,]*(e-?\d+)?")


def read_files(text: str) -> dict[str, str]:
    """The files that a page shows: blocks of a language that come after a paragraph which names the file first, or
    last before a colon.
    """
    found: dict[str, str] = {}
    for block in _BLOCK.finditer(text):
        paragraph = text[: block.start()].rstrip().rpartition("\n\n")[2]
        name = re.match(r"`([\w.]+\.\w+)`", paragraph) or re.search(r"`([\w.]+\.\w+)`[^`]*:$", paragraph)
        if block[1] in ("python", "json") and name:
            assert name[1] not in found
            found[name[1]] = block[2]
    return found


def read_commands(text: str) -> list[tuple[str, list[str]]]:
    """Every command of a page that is shown after a ``$``, with the lines that it says the command prints."""
    found: list[tuple[str, list[str]]] = []
    for kind, block in _BLOCK.findall(text):
        if kind or not block.startswith("$ "):
            continue
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def run_as_printed(command: str, folder: Path) -> str:
    """What a shell prints that runs `command` in `folder`, in this environment and with this autopar."""
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PATH": paths, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert not ended.returncode, f"{command}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def run_forked(command: str, folder: Path) -> str:
    """The same of a command that runs a script, in processes that have imported all packages already."""
    script = _SCRIPT.fullmatch(command)
    assert script, f"{command} runs no script"
    return run_program(folder / script[2], int(script[1] or 0), folder=folder)


def assert_prints(command: str, said: list[str], printed: str) -> None:
    """The lines `said` are printed in this order, numbers within 2 %, whatever stands where they say ``...``."""
    lines = printed.splitlines()
    rest = iter(lines)
    for line in said:
        if line.strip() in ("...", "", "0") or line.startswith("planning"):
            continue
        assert any(_is_alike(line, other) for other in rest), f"{command}: {line!r} is not in\n{printed}"


def _is_alike(said: str, printed: str) -> bool:
    """Whether two lines differ by less than 2 % in numbers, and otherwise in blanks and rules only."""
    # Which gradient is the furthest off is a matter of rounding.
    lines = [re.sub(r"\(model[\w.]+weight\)", "", line) for line in (said, printed)]
    ours, theirs = (re.sub(r"[|+\-]+(?=[|+\-\s]|$)|\|", " ", line).split() for line in lines)
    if [_NUMBER.sub("#", word) for word in ours] != [_NUMBER.sub("#", word) for word in theirs]:
        return False
    values = ([float(each.group().rstrip(".,").replace(",", "")) for each in _NUMBER.finditer(" ".join(line))]
              for line in (ours, theirs))  # fmt: skip
    return all(one == pytest.approx(other, rel=0.02, abs=1e-9) for one, other in zip(*values, strict=True))
