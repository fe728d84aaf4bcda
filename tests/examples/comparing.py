"""Run an example as a user does: on processes, and on one without autopar.

The processes are forked from one that has imported all packages; `test_train_text` starts its own by torchrun.
"""

import re
from collections.abc import Sequence

import pytest

from tests.ranks import run_program


def assert_trains_as_alone(script: str, steps: int, arguments: Sequence[str]) -> str:
    """Losses of `steps` steps on two processes are those on one, and fall; returns what the two printed."""
    options = ["--steps", str(steps), *arguments]
    said = run_program(script, 2, options, timeout_s=300)
    single = _losses(run_program(script, 0, options, timeout_s=200), steps)
    assert single[-1] < single[0]  # it learns: the comparison below is of changing parameters
    assert _losses(said, steps) == pytest.approx(single, abs=1e-4)
    return said


def _losses(said: str, steps: int) -> list[float]:
    """The loss of each step as the script printed it."""
    found = [float(text) for text in re.findall(r"^step +\d+  loss (\d\S+)", said, re.MULTILINE)]
    assert len(found) == steps, said
    return found
