"""The pipeline example runs in two stages, and its losses are the single device's."""

import re

import pytest

from tests.ranks import run_program


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_trains_in_stages_and_agrees_with_one_device():
    args = ["--steps", "6", "--batch-size", "4", "--sequence-length", "64"]
    said = run_program("examples/train_pipeline.py", 4, args, timeout_s=400)
    assert "PP 2 (" in said, said
    assert re.search(r"Plan for 4 x \S", said), said
    difference = re.search(r"Largest difference of all 6 steps: (\S+)", said)
    assert difference, said
    assert float(difference[1]) < 1e-3, said
    for words in ("step time", "peak memory", "measured / predicted", "shared parameters    transformer.wte.weight"):
        assert words in said
