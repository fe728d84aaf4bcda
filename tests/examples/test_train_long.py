"""The example of long rows runs as a user runs it, on two processes, and its losses are the single device's."""

import re
import subprocess
import sys

import pytest

from tests.examples.test_train_experts import losses
from tests.ranks import REPOSITORY, run_script

ARGUMENTS = ["--steps", "6", "--sequence-length", "1024"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_long_rows_on_two_processes_train_as_on_one():
    said = run_script("examples/train_long.py", 2, ARGUMENTS, timeout_s=300)
    assert re.search(r"\bCP 2\b", said.splitlines()[0]), said  # the plan's first line; cells of its table are folded
    alone = subprocess.run(
        [sys.executable, "examples/train_long.py", *ARGUMENTS],
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    single = losses(alone.stdout)
    assert single[-1] < single[0]  # it learns: the comparison below is of changing parameters
    assert losses(said) == pytest.approx(single, abs=1e-4)
