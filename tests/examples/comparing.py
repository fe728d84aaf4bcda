"""Run an example as a user does: on processes, and on one without autopar."""

import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.ranks import REPOSITORY, run_script


def assert_trains_as_alone(script: str, steps: int, arguments: Sequence[str]) -> str:
    """Losses of `steps` steps on two processes are those on one, and fall; returns what the two printed."""
    options = ["--steps", str(steps), *arguments]
    said = run_script(script, 2, options, timeout_s=300)
    alone = subprocess.run(
        [sys.executable, script, *options], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=200
    )
    single = _losses(alone.stdout, steps)
    assert single[-1] < single[0]  # it learns: the comparison below is of changing parameters
    assert _losses(said, steps) == pytest.approx(single, abs=1e-4)
    return said


def _losses(said: str, steps: int) -> list[float]:
    """The loss of each step as the script printed it."""
    found = [float(text) for text in re.findall(r"^step +\d+  loss (\d\S+)", said, re.MULTILINE)]
    assert len(found) == steps, said
    return found
