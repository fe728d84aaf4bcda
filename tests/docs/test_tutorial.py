"""The tutorial: its files run, and its commands print what it says, numbers within 2 %."""

import re
import shlex
from pathlib import Path

import pytest

from autopar.explain.cli import main
from tests.docs.printed import assert_prints, read_commands, read_files, run_forked
from tests.ranks import REPOSITORY

TUTORIAL = (REPOSITORY / "docs" / "tutorial.md").read_text()


def run(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `command` prints; `autopar.explain` runs in this process, and its search for other choices is left out.

    `test_readme` starts processes as a shell does.
    """
    words = shlex.split(command.partition(";")[0])
    if words[1:3] != ["-m", "autopar.explain"]:
        return run_forked(command, folder)
    assert main([*words[3:], "--why-seconds", "0"]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_what_the_tutorial_says_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in read_files(TUTORIAL).items():
        (tmp_path / name).write_text(text)
    commands = read_commands(TUTORIAL)
    assert len(commands) == 8
    for command, said in commands:
        assert_prints(command, said, run(command, tmp_path, capsys))


def test_the_parallel_script_trains_as_the_single_device_does() -> None:
    losses = {command: [line for line in said if re.match(r"\d+ ", line)] for command, said in read_commands(TUTORIAL)}
    single, parallel = losses["python train.py"], next(each for name, each in losses.items() if "torchrun" in name)
    assert set(single) <= set(parallel)
    assert set(read_files(TUTORIAL)) == {"model.py", "train.py", "verify.py", "train_parallel.py"}
