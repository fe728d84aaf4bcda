"""The example of clips runs as a user runs it, on two processes; its losses are those of each clip alone."""

import pytest

from tests.examples.comparing import assert_trains_as_alone


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_clips_on_two_processes_train_as_each_alone():
    assert_trains_as_alone("examples/train_video.py", 4, ["--batch-size", "6"])
