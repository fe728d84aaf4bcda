"""The short examples run as a user runs them, on two processes; their losses are the single device's."""

import re

import pytest

from tests.examples.comparing import assert_trains_as_alone

RUNS = {
    "images": [],
    "translation": ["--batch-size", "16"],
    "lora": ["--batch-size", "4"],
    "gan": [],
}


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", RUNS)
def test_the_example_trains_on_two_processes_as_on_one(name: str) -> None:
    said = assert_trains_as_alone(f"examples/train_{name}.py", 5, RUNS[name])
    assert name != "images" or re.search(r"^\d+\.\d% of 297 held-out digits are read right$", said, re.MULTILINE)
    assert name != "lora" or "16 tensors of adapters" in said
