"""Arguments that nobody means: each is one line that says what to do, before anything is overwritten."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.__main__ import main
from autopar.explain import config_models
from autopar.planning.arguments import read_bytes
from autopar.user_text.suggestions import kind_of

ON = "--cluster 2xh100 --why-seconds 0"
FACTORY = """
import torch


def make(batch=4):
    with torch.device("meta"):
        return torch.nn.Linear(8, 8), (torch.zeros(batch, 8),)


def fails():
    raise OSError("nothing there")


def ends():
    raise SystemExit(3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("made.py").write_text(FACTORY)
    Path("plan.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"explain made.py:make {ON} --html made.py", "--html 'made.py' would overwrite what the target names"),
        (f"explain made.py:make {ON} --save a.json --trace ./a.json", "--trace './a.json' would overwrite what --save"),
        (f"explain made.py:make {ON} --lengths plan.json --save plan.json", "would overwrite what --lengths names"),
        (f"explain made.py:make {ON} --save=", "--save '' names no file: write a path, such as --save plan.json"),
        (f"explain made.py:make {ON} --save /proc/plan.json", "'/proc/plan.json' can't be written"),
        (f"explain made.py:make {ON} --sweep nodes=1,2 --save a.json", "--save changes nothing for --sweep"),
        (f"explain made.py:make {ON} --edit a.json --what-if batch=2", "--what-if changes nothing for --edit"),
        ("explain --diff plan.json plan.json --html a.html", "--html changes nothing for --diff"),
        ("explain plan.json --check plan.json", "--check changes nothing for a saved plan"),
        (f"explain made.py:make {ON} --sweep foo=1,2", "'foo' is nothing that can vary"),
        (f"explain made.py:make {ON} --sweep=", "--sweep '': write name=value"),
        (f"explain made.py:make {ON} --constraint tensor==2", "values are set by one '=': write 'tensor=2'"),
        (f"explain made.py:make {ON} --memory 1e400GiB", "is not an amount of memory"),
        (f"explain made.py:fails {ON}", r"failed at .*made.py:11 when it was called: OSError: nothing there"),
        (f"explain made.py:ends {ON}", r"'made.py:ends' ended the process \(3\)"),
        (f"explain made.py:make {ON} --check /dev/null", "'/dev/null' can't be read: it is no file"),
        (f"explain made.py:make {ON} --profile made.py", r"is not a readable profile \(.*--output profile.json$"),
        ("profile --output=", "--output '' names no file"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_is_one_line(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line), line
    assert Path("made.py").read_text() == FACTORY
    assert not Path("a.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"explain a int {ON}", "'int' is one argument too many"),
        (f"explain made.py:make {ON} --clusters 2xh100", "did you mean --cluster?"),
        ("explain made.py:make --why-seconds nan", "'nan' is no number of seconds"),
        ("plan made.py:make --seconds -1", "'-1' is no number of seconds"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_is_an_error_of_the_parser(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_what_does_not_fit_leaves_the_answer_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "made.py:make", "--cluster", " 2xh100\n", "--why-seconds", "0", "--what-if", "memory=1"]
    assert main(arguments) == 0
    assert "no plan: InfeasibleError: no plan fits into" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["what_if"]
    assert row["plan"] is None
    assert row["problem"].startswith("InfeasibleError")


@pytest.mark.slow
def test_output_that_can_not_be_written(folder: Path) -> None:
    command = [sys.executable, "-m", "autopar", "explain", "made.py:make", *ON.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert done.returncode == 1
    assert done.stderr == "python -m autopar.explain: the output can't be written: No space left on device\n"
    done = subprocess.run(command, capture_output=True, cwd=folder, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.startswith(b"fp32 ? ")


def test_a_config_of_a_billion_layers_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_models, "_MOST_PARAMETERS", 1_000)  # counting to 100,000 takes ten seconds
    config = {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 8, "n_head": 2, "vocab_size": 8, "n_positions": 8}
    Path(folder, "config.json").write_text(json.dumps(config))
    assert main(["explain", "config.json", "--cluster", "2xh100", "--batch", "2"]) == 1
    assert "has more than 1,000 weights and biases" in capsys.readouterr().err


def test_words_of_messages() -> None:
    assert [kind_of(each) for each in (3, "", [], object())] == ["an int", "a str", "a list", "an object"]
    assert read_bytes("1e3GiB") == 1e3 * 2**30


def test_a_profile_is_written_to_files_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as made:  # as /dev/full is, which would be read for ever
        made.bind("no_file")
        assert main(["profile", "--output", "no_file"]) == 1
    assert "--output no_file is no file: name one" in capsys.readouterr().err
    assert not (folder / "no_file.lock").exists()
