"""What plans say of memory, against every storage that a real step allocates."""

import pytest

from benchmarks.predictions.memory import Case, measure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", 2, ("data=2", "zero=1")),
        Case("llama", 2, ("tensor=2", "zero=0", "recompute=none")),
        Case("llama", 2, ("pipeline=2", "schedule=1f1b", "microbatches=4")),
    ],
    ids=lambda case: case.title,
)
def test_a_step_holds_what_the_plan_says(case: Case) -> None:
    outcome = measure(case)
    for kind in ("parameters", "optimizer state"):
        assert outcome.ratio(kind) == pytest.approx(1.0, rel=2e-3), kind
    assert outcome.ratio("saved activations") == pytest.approx(1.0, rel=0.03)
    assert outcome.predicted_peak == pytest.approx(outcome.measured_peak, rel=0.03)
