"""`collected_seldom`: garbage collection while planning."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from autopar.host.garbage import collected_seldom


@pytest.fixture(autouse=True)
def _thresholds() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_larger_within_and_restored_behind_an_error():
    gc.set_threshold(700, 10, 10)

    @collected_seldom()
    def fail() -> None:
        assert all(now > old for now, old in zip(gc.get_threshold(), (700, 10, 10), strict=True))
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (10**9, 10, 10)])
def test_a_user_who_collects_less_keeps_that(own: tuple[int, int, int]):
    gc.set_threshold(*own)
    with collected_seldom(), collected_seldom():
        assert gc.get_threshold()[0] == own[0]
    assert gc.get_threshold() == own
