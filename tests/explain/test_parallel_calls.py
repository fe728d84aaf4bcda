"""Functions that are called in copies of the process."""

import os
from functools import partial

import pytest

from autopar.errors import InfeasibleError
from autopar.explain import parallel_calls
from autopar.explain.parallel_calls import call_in_parallel


@pytest.fixture(params=[0, 1, 3])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cores that are left for copies."""
    monkeypatch.setattr(parallel_calls, "_spare_cores", lambda: request.param)
    return request.param


def test_results_come_in_order_from_other_processes(cores: int) -> None:
    whole, *others = call_in_parallel(
        os.getpid, [partial(pow, 2, 3), os.getpid, partial(pow, 3, 3), partial(bytes, 200_000)]
    )
    assert (others[0], others[2], len(others[3])) == (8, 27, 200_000)
    assert whole == os.getpid()
    assert (others[1] == whole) == (cores == 0)


def fail() -> None:
    raise InfeasibleError("nothing fits")


def test_what_fails_in_a_copy_is_raised_here(cores: int) -> None:
    with pytest.raises(InfeasibleError, match="nothing fits"):
        call_in_parallel(os.getpid, [os.getpid, fail])


def die() -> int:
    if os.getpid() != PID:
        os._exit(9)
    return 5


PID = os.getpid()


def test_what_dies_in_a_copy_is_done_here(cores: int) -> None:
    assert call_in_parallel(partial(pow, 2, 2), [die, partial(pow, 2, 1)]) == [4, 5, 2]
