"""The example of long rows runs as a user runs it, on two processes, and its losses are the single device's."""

import re

import pytest

from tests.examples.comparing import assert_trains_as_alone


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_long_rows_on_two_processes_train_as_on_one():
    said = assert_trains_as_alone("examples/train_long.py", 6, ["--sequence-length", "1024"])
    assert re.search(r"\bCP 2\b", said.splitlines()[0]), said  # the plan's first line; cells of its table are folded
