"""The commands that README and docs name exist, with each of their options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.__main__ import main

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:-m autopar\.|\bautopar )(plan|explain|profile)\b([^`|#\n]*)")


@pytest.mark.parametrize("command", ["plan", "explain", "profile"])
def test_options_of_commands_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = {
        (path.name, option)
        for path in PAGES
        for name, rest in COMMAND.findall(path.read_text())
        if name == command
        for option in re.findall(r"--[a-z][a-z-]+", rest)
    }
    assert named
    assert {(page, option) for page, option in named if option not in known} == set()


def test_targets_of_make_are_there() -> None:
    known = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    pages = [*PAGES, REPOSITORY / "CONTRIBUTING.md"]
    named = {name for page in pages for name in re.findall(r"(?:^|`)make ([a-z]+)\b", page.read_text(), re.MULTILINE)}
    assert {"demo", "docs", "test"} <= named <= known
