"""``autopar plan``: ten lines about a model on a cluster, as a user types it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.explain.alternatives import Alternative
from autopar.explain.plan_command import main
from autopar.explain.tables import scaling
from autopar.plan import Plan
from tests.ranks import REPOSITORY

TARGET = "tests.explain.targets:make"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that a question which must succeed prints."""
    assert main([*arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_ten_lines_say_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    asked = ("--cluster", "1x2xh100", "--constraint", "pipeline=1", "--save", saved)
    headline, step, because, first, second, helps, run, mesh, made, call = ask(capsys, TARGET, *asked)
    plan = Plan.load(saved)
    assert headline == plan.headline
    assert step.startswith("step ")
    assert "8 rows on 2 x H100-80GB" in step
    assert because.startswith("because ")
    assert first.startswith("next best ")
    assert re.search(r"\(step \+[\d.]+%", second)
    # Launches bind this toy: twice the rows cost about as much time, and nothing else helps.
    gain = re.match(
        r"would help batch=16 \+([\d.]+)% rows/s · less than 1%: memory=144.3GiB, link.intra=\d+GB/s$", helps
    )
    assert gain is not None
    assert 50 < float(gain[1]) < 101
    assert "torchrun --standalone --nproc-per-node 2 train.py" in run
    assert mesh == 'dist.init_process_group(); mesh = init_device_mesh("cuda", (2,))'
    assert made == "model, inputs = make()"
    assert call == f"model = autopar.parallelize(model, mesh, inputs, plan={saved!r})"


def test_time_is_kept_and_a_sweep_says_how_it_scales(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--cluster", "1x1xh100", "--constraint", "pipeline=1", "--seconds", "0")
    lines = ask(capsys, TARGET, *asked, "--optimizer", "sgd", "--sweep", "nodes=1,2", "--weak")
    assert "would help not searched" in lines
    assert "optimizer='sgd', constraints=['pipeline=1'])" in lines[lines.index("") - 1]
    assert "Sweep over nodes=1,2: weak scaling, 8 rows per device" in lines


def test_of_which_plans_scaling_is_said() -> None:
    class Fake:
        def __init__(self, devices: int, rows: int) -> None:
            self.world_size, self.samples_per_step = devices, rows

    def said(*pairs: tuple[int, int]) -> str:
        return scaling([Alternative("", Fake(*pair)) for pair in pairs] + [Alternative("", problem="none fits")])

    assert "strong scaling, 8 rows on any number of devices" in said((1, 8), (2, 8))
    assert "weak scaling, 8 rows per device" in said((1, 8), (2, 16))
    assert said((1, 8), (2, 24)) == said((2, 8), (2, 16)) == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name a model"),
        ((TARGET,), "--cluster 8x8xh100"),
        ((TARGET, "--cluster", "4xh100", "--save", "no/such/folder/plan.json"), "there is no folder"),
        ((TARGET, "--cluster", "4xh100", "--weak"), "--sweep nodes=1,2,4,8 --weak"),
        ((TARGET, "--cluster", "4xh100", "--sweep", "batch=8,16", "--weak"), "--sweep nodes=1,2,4,8 --weak"),
        ((TARGET, "--cluster", "3x1xh100", "--sweep", "nodes=1", "--weak"), "choose another --batch"),
    ],
)
def test_wrong_questions_say_what_to_type(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert main(list(arguments)) == 1
    output = capsys.readouterr()
    assert told in output.err
    assert output.out == ""


@pytest.mark.slow
def test_what_is_printed_to_paste_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    target = "tests.explain.targets:make_real"
    *_, run, mesh, made, call = ask(capsys, target, "--cluster", "2xcpu", "--seconds", "0", "--save", saved)
    imports = (
        "import torch.distributed as dist", "from torch.distributed.device_mesh import init_device_mesh",
        "import autopar", "from tests.explain.targets import make_real",
    )  # fmt: skip
    # One text, written at once: two processes write to one pipe.
    (tmp_path / "train.py").write_text("\n".join((*imports, mesh, made, call, "print(f'ran {model.plan.headline}')")))
    command = shlex.split(run.partition("#")[0].removeprefix("run").replace("train.py", str(tmp_path / "train.py")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"ran {Plan.load(saved).headline}") == 2
