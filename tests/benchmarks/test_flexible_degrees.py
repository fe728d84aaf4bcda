"""FlexSP's setting by its own prices: assignments gain at least what it measured, and baselines are in their order."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.balance import Lengths
from autopar.balance.costs import GroupCost
from benchmarks import flexible_degrees
from benchmarks.flexible_degrees import PUBLISHED, Degrees, published_degrees, speedups


def test_by_its_own_prices_the_gain_over_a_static_degree_is_at_least_the_published_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flexible_degrees, "DRAWS", 1)
    found = speedups(published_degrees("6.7B"), Lengths.lognormal(mean=1014, sigma=1.26, most=10**6), 393216)
    _, (_, gap), (_, static), (_, static_64), (_, even), (_, by_room) = found.items()
    assert static == static_64 >= PUBLISHED["6.7B", 393216][0]  # only 64 devices hold 384k tokens
    assert 1 <= even <= by_room
    assert 0 <= gap < 0.1


def test_sequences_that_fill_rooms_wait_for_the_longest_of_a_microbatch():
    degrees = Degrees([cost := GroupCost(32, 1.0, 0.0, 10.0, step_s=5.0, microbatch_s=2.0)])
    tokens = np.array([10, 6, 4, 3, 3])
    assert degrees.by_room_s(cost, tokens) == 10 + 6 + 5 + 2 * 2  # 10 beside 6 + 4, then 3 + 3 beside none
    assert degrees.alone_s(cost, tokens) == 13 + 5 + 2 * 2  # 10 + 3 beside 6 + 4 + 3, in two microbatches
    assert degrees.by_room_s(cost, np.array([11])) == np.inf
