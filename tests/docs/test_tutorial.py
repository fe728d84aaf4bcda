"""The tutorial: its code runs, and its commands print what it says, numbers within 2 %."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from autopar.explain.cli import main

TUTORIAL = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
FILES = dict(zip(("model.py", "train.py", "verify.py", "train_parallel.py"),
                 (text for kind, text in BLOCKS if kind == "python"), strict=True))  # fmt: skip


def commands() -> list[tuple[str, list[str]]]:
    """Every command of the tutorial, with the lines that it says the command prints."""
    found: list[tuple[str, list[str]]] = []
    for kind, text in BLOCKS:
        for line in text.splitlines() if not kind else ():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def run(command: str) -> None:
    """Run `command` in this process."""
    words = shlex.split(command.partition(";")[0])
    if words[1:3] != ["-m", "autopar.explain"]:
        runpy.run_path(words[1])
        return
    assert main([*words[3:], "--why-seconds", "0"]) == 0


def is_alike(said: str, printed: str) -> bool:
    """Whether two lines differ by less than 2 % in numbers, and otherwise in blanks and rules only."""
    # Which gradient is the furthest off is a matter of rounding.
    lines = [re.sub(r"\(model[\w.]+weight\)", "", line) for line in (said, printed)]
    ours, theirs = (re.sub(r"[|+\-]+(?=[|+\-\s]|$)|\|", " ", line).split() for line in lines)
    number = re.compile(r"[+-]?\d[\d.,]*(e-?\d+)?")
    words = [[number.sub("#", word) for word in line] for line in (ours, theirs)]
    if words[0] != words[1]:
        return False
    values = ([float(each.group().rstrip(".,").replace(",", "")) for each in number.finditer(" ".join(line))]
              for line in (ours, theirs))  # fmt: skip
    return all(one == pytest.approx(other, rel=0.02, abs=1e-9) for one, other in zip(*values, strict=True))


@pytest.mark.slow
def test_what_the_tutorial_says_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    ran = [(command, said) for command, said in commands() if "torchrun" not in command]
    assert len(ran) == 7
    for command, said in ran:
        run(command)
        printed = capsys.readouterr().out.splitlines()
        rest = iter(printed)
        for line in said:
            if line.strip() in ("...", "", "0") or line.startswith("planning"):
                continue
            assert any(is_alike(line, other) for other in rest), f"{command}: {line!r} is not in\n" + "\n".join(printed)


def test_the_parallel_script_trains_as_the_single_device_does() -> None:
    losses = {command: [line for line in said if re.match(r"\d+ ", line)] for command, said in commands()}
    single, parallel = losses["python train.py"], next(each for name, each in losses.items() if "torchrun" in name)
    assert set(single) <= set(parallel)
    compile(FILES["train_parallel.py"], "train_parallel.py", "exec")
