"""Curves of a profile."""

from autopar.cost.profile import Curve, Point


def test_splitting_work_never_makes_it_cheaper() -> None:
    cached = Curve((Point(1e3, 2e-6), Point(1e6, 1e-5), Point(1e7, 4e-4)))
    assert 10 * cached.seconds(1e6) < cached.seconds(1e7)
    honest = cached.without_gains_by_splitting()
    for amount in (2e3, 1e5, 1e6, 1e7, 1e8):
        for parts in (2, 8, 64):
            assert parts * honest.seconds(amount / parts) >= honest.seconds(amount) * (1 - 1e-9)
    assert honest.seconds(1e7) == cached.seconds(1e7)
    assert honest.seconds(1e3) == cached.seconds(1e3)  # overhead stays
