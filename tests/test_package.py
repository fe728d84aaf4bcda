"""What is installed: version, types, license, console script, and the files that pages are made of."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import autopar
from autopar.__main__ import main

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def test_the_version_is_told_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", autopar.__version__)
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "autopar.__version__"}


def test_every_file_that_is_no_python_is_in_the_package_data() -> None:
    data = {
        path
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (REPOSITORY / package.replace(".", "/")).glob(pattern)
    }
    others = {
        path
        for path in (REPOSITORY / "autopar").rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert {"py.typed", "page.html", "page.css", "page.js"} <= {path.name for path in data}
    assert others == data


def test_the_license_is_there() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (REPOSITORY / PROJECT["project"]["license-files"][0]).read_text()


def test_the_console_script_runs_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    module, _, function = PROJECT["project"]["scripts"]["autopar"].partition(":")
    assert getattr(import_module(module), function) is main
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"autopar {autopar.__version__}\n"
    assert main(["explain"]) == 1
    assert "name a model" in capsys.readouterr().err
    for command in ("plan", "explain", "profile"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert "usage:" in capsys.readouterr().out


def test_the_module_is_the_console_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["autopar", "--version"])
    monkeypatch.delitem(sys.modules, "autopar.__main__")
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("autopar", run_name="__main__")
    assert capsys.readouterr().out == f"autopar {autopar.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["explian"]])
def test_no_command_says_which_there_are(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "autopar explain" in capsys.readouterr().err
