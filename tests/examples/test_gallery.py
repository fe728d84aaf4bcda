"""The short examples run as a user runs them, on two processes; their losses are the single device's."""

import pytest

from tests.examples.comparing import assert_trains_as_alone

RUNS = {
    "translation": ["--batch-size", "16"],
    "lora": ["--batch-size", "4"],
    "gan": [],
}


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", RUNS)
def test_the_example_trains_on_two_processes_as_on_one(name: str) -> None:
    said = assert_trains_as_alone(f"examples/train_{name}.py", 5, RUNS[name])
    assert name != "lora" or "16 tensors of adapters" in said
