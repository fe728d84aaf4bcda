"""The demo runs as a user runs it, and its losses are the single device's."""

import re

import pytest

from tests.ranks import run_script


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_trains_and_agrees_with_one_device():
    args = ["--steps", "8", "--batch-size", "4", "--sequence-length", "64"]
    said = run_script("examples/train_text.py", 2, args, timeout_s=400)
    difference = re.search(r"Largest difference of all 8 steps: (\S+)", said)
    assert difference, said
    assert float(difference[1]) < 1e-3, said
    for words in ("step time", "peak memory", "measured / predicted"):
        assert words in said
