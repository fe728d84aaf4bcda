"""The example of documents runs as a user runs it, on two processes; its losses are those of each document alone."""

import re
import subprocess
import sys

import pytest

from tests.ranks import REPOSITORY, run_script

ARGUMENTS = ["--steps", "4", "--batch-size", "6", "--tokens", "128"]


def losses(said: str) -> list[float]:
    """The loss of each step as the script printed it."""
    found = [float(text) for text in re.findall(r"^step +\d+  loss (\d\S+)", said, re.MULTILINE)]
    assert len(found) == 4, said
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_documents_on_two_processes_train_as_each_alone():
    said = run_script("examples/train_documents.py", 2, ARGUMENTS, timeout_s=300)
    alone = subprocess.run(
        [sys.executable, "examples/train_documents.py", *ARGUMENTS],
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    single = losses(alone.stdout)
    assert single[-1] < single[0]  # it learns: the comparison below is of changing parameters
    assert losses(said) == pytest.approx(single, abs=1e-4)
