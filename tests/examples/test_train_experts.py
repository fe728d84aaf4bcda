"""The example of experts runs as a user runs it, on two processes, and its losses are the single device's."""

import re

import pytest

from tests.examples.comparing import assert_trains_as_alone


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_experts_on_two_processes_train_as_on_one():
    said = assert_trains_as_alone("examples/train_experts.py", 6, ["--batch-size", "4", "--sequence-length", "64"])
    assert re.search(r"\bEP 2\b", said.splitlines()[0]), said  # the plan's first line; cells of its table are folded
