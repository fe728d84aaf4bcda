"""Cases of `benchmarks/random_memory.py` whose peaks were above, or far below, what plans promised."""

import pytest

from benchmarks.random_memory import run_case

CASES = {
    42: "inputs that are sliced along two axes are copied once",
    107: "layers keep no input that backward does not read",
    123: "the gradient of a sum is a view",
    47: "sums inside of a layer",
    128: "a clamp's backward makes masks",
    2: "what an LSTM keeps of its steps",
    54: "temporaries of a loss that runs as other ops",
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("seed", list(CASES), ids=list(map(str, CASES)))
def test_a_peak_is_as_promised(seed: int) -> None:
    _, outcome, why = run_case(seed)
    assert outcome is not None, why
    assert outcome.measured_peak / outcome.predicted_peak == pytest.approx(1.0, abs=0.02), CASES[seed]
