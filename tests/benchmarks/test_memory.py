"""What plans say of memory, against every storage that a real step allocates."""

import pytest

from autopar.search import MEMORY_ERROR
from benchmarks.predictions.memory import Case, measure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", 2, ("data=2", "zero=1")),  # tied parameters
        Case("llama", 2, ("pipeline=2", "schedule=zbv", "stages=4", "microbatches=4")),
        Case(
            "llama", 4,
            ("pipeline=2", "data=2", "zero=1", "schedule=1f1b", "microbatches=4", "recompute=full"),
        ),
        Case("bert", 2, ("data=2", "zero=3", "recompute=full"), "bf16"),
        Case("t5", 2, ("data=2", "zero=3", "recompute=selective")),  # attention without a fast kernel
        Case("unet", 2, ("data=2", "zero=3", "recompute=full")),
        Case("llama", 4, ("context=4", "zero=3", "recompute=full")),  # a ring, or gathered keys and values
        Case("masked", 2, ("tensor=2", "logits=100")),
        Case("unet", 2, ("tensor=2", "recompute=none")),  # layers read slices of what is put out whole
        Case("masked", 1, ("gradients=bf16", "microbatches=2", "recompute=full")),  # sums in another dtype
        Case("perceptron", 2, ("tensor=2", "recompute=full")),  # layers gather what the one before put out in slices
    ],
    ids=lambda case: case.title,
)  # fmt: skip
def test_a_step_holds_what_the_plan_says(case: Case) -> None:
    outcome = measure(case)
    for kind in ("parameters", "optimizer state"):
        assert outcome.ratio(kind) == pytest.approx(1.0, rel=2e-3), kind
    assert outcome.ratio("saved activations") == pytest.approx(1.0, rel=0.02)
    assert outcome.predicted_peak == pytest.approx(outcome.measured_peak, rel=MEMORY_ERROR)
