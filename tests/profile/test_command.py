"""``python -m autopar.profile``, as people type it."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from autopar.cost import Curve, Point, Profile
from autopar.profile import command
from autopar.profile.command_options import read_axes
from tests.ranks import REPOSITORY, run_ranks


def _told(capsys, *arguments: str) -> str:
    """What the command says on standard error, having failed."""
    try:
        status = command.main(["--device", "cpu", *arguments])
    except SystemExit as stopped:  # argparse
        status = stopped.code
    assert status in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("--device", "tpu"), "sees no such device here"),
        (("--budget", "soon"), "--budget 60"),
        (("--budget", "-1"), "--budget 60"),
        (("--dtypes", "bf16"), "float32, bfloat16"),
        (("--axes", "2x1"), "torchrun --nproc-per-node"),
        (("--remeasure", "matmull/*"), "--list shows all"),
        (("--only", "nothing"), "--list shows all"),
        (("--output", "{tmp}"), "profile.json"),
        (("--show", "{tmp}/none.json"), "Name a profile, or measure one first"),
        (("--show", "{tmp}"), "Name the JSON file"),
        (("--show", "{tmp}/text.json"), "measure it again: python -m autopar.profile"),
        (("--frobnicate",), "--help"),
    ],
)
def test_bad_arguments_are_told_what_to_type_instead(capsys, tmp_path, arguments, remedy) -> None:
    (tmp_path / "text.json").write_text("no profile")
    output = () if "--output" in arguments else ("--output", str(tmp_path / "p.json"))
    told = _told(capsys, *output, *(text.format(tmp=tmp_path) for text in arguments))
    assert remedy in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("axes", "group_sizes", "remedy"),
    [
        ("2x1", "2", "one of them"),
        ("3x1", None, "2x1,2x2,4x1"),
        ("2x4", None, "2x1,2x2,4x1"),
        ("two", None, "--axes 2x1,2x4"),
        (None, "3", "2,4"),
        (None, "0", "--group-sizes 2,8"),
    ],
)
def test_axes_that_do_not_fit_name_those_that_do(axes, group_sizes, remedy) -> None:
    with pytest.raises(command.ProfileError, match=remedy):
        read_axes(axes, group_sizes, 4)


def test_another_machines_file_is_not_added_to(capsys, tmp_path) -> None:
    path = tmp_path / "profile.json"
    Profile("NVIDIA H200", 1, "2026", {}, {"optimizer": Curve((Point(1.0, 1.0),))}).save(path)
    before = path.read_text()
    told = _told(capsys, "--output", str(path))
    assert "device is NVIDIA H200, here cpu" in told
    assert path.read_text() == before


def _keys(path) -> set[str]:
    return set(Profile.load(path).curves) if path.exists() else set()


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(capsys, tmp_path, monkeypatch) -> None:
    path = tmp_path / "profile.json"
    arguments = ["--device", "cpu", "--quick", "--output", str(path), "--only", "op/*", "--only", "elementwise/*"]
    line = [sys.executable, "-m", "autopar.profile", *arguments]
    started = subprocess.Popen(line, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 300  # a busy machine takes a minute to start it
    while len(_keys(path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL, "it ended before it was killed"
    before = Profile.load(path)
    assert len(before.curves) >= 4

    torch.set_num_threads(1)  # as many as the other process had, or it would be another machine
    monkeypatch.setattr(command, "_QUICK_S", 0.2)
    assert command.main(arguments) == 0
    after = Profile.load(path)
    # No two measurements are alike: what is equal was not measured again.
    assert {key: after.curves[key] for key in before.curves} == before.curves
    assert len(after.curves) > len(before.curves)

    capsys.readouterr()
    assert command.main(arguments) == 0
    assert "nothing was missing" in capsys.readouterr().out
    assert Profile.load(path) == after

    assert command.main([*arguments, "--remeasure", "op/aten.gelu/*"]) == 0
    again = Profile.load(path)
    changed = {key for key in after.curves if again.curves[key] != after.curves[key]}
    assert changed == {"op/aten.gelu/forward", "op/aten.gelu/backward"}

    assert command.main(["--show", str(path)]) == 0
    assert "op/aten.gelu/forward" in capsys.readouterr().out


def _measure_links(path: str) -> tuple[int, str]:
    asked = ["--device", "cpu", "--output", path, "--quick", "--budget", "6"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = command.main([*asked, "--only", "collective/send/*", "--only", "interference/all_gather/*"])
    return status, printed.getvalue()


@pytest.mark.slow
def test_two_processes_measure_what_is_between_them(tmp_path) -> None:
    path = tmp_path / "profile.json"
    (status, printed), (other_status, other_printed) = run_ranks(_measure_links, 2, str(path))
    assert status == other_status == 0
    profile = Profile.load(path)
    assert set(profile.curves) == {"collective/send/2/1"}
    assert set(profile.readings) == {"interference/all_gather/2/1"}
    assert profile.num_ranks == 2
    assert "2/2" in printed
    assert str(path) in printed
    assert other_printed == "", "one process speaks"
