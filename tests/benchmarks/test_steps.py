"""What ``accuracy.py steps`` makes of predicted and measured steps."""

import pytest

from benchmarks.predictions.steps import summary


def _row(predicted_s: float, measured_s: float, spread: float) -> dict[str, float]:
    return {"predicted_s": predicted_s, "measured_s": measured_s, "spread": spread}


def test_pairs_within_their_spread_count_in_one_tau_only():
    rows = [_row(1.0, 1.0, 0.0), _row(2.2, 2.0, 0.06), _row(2.1, 2.1, 0.01), _row(3.0, 4.0, 0.0)]
    found = summary(rows)
    assert found["median_error"] == pytest.approx(0.05)
    assert found["tau"] == pytest.approx((5 - 1) / 6)
    assert found["tau_of_different"] == 1.0
    assert summary([_row(1.0, 2.0, 0.0), _row(2.0, 1.0, 0.0)])["tau"] == -1.0
    assert summary([_row(1.0, 1.0, 0.0), _row(1.0, 2.0, 0.0)])["tau"] == 0.0, "an order that isn't predicted"
