"""What a collective makes a moment of computing longer by."""

import itertools
import os
import platform
import time
import zlib

import pytest
import torch

from autopar.cost.measure import Alone
from autopar.cost.measure.collectives import Moment, crowding_of, times_behind

_OWN_S = 1e-3


def _work(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def _behind(moment, *starts):
    return times_behind(moment, Alone(torch.device("cpu")), starts, 0.3)


def _waits() -> None:
    time.sleep(20e-3)  # nobody else is on this core: long enough that cores idle all the same, on average


def _works() -> None:
    _work(4e-3)


def test_on_shared_cores_work_counts_for_each_rank_of_a_core_and_idling_is_shared():
    waits, works = _behind(Moment(lambda times: _work(times * _OWN_S), _OWN_S, 2.0, (1, 3)), _waits, _works)
    assert waits.worked_s == pytest.approx(0.0, abs=5e-4)
    assert works.worked_s == pytest.approx(4e-3, rel=0.15)
    assert works.taken.seconds - waits.taken.seconds == pytest.approx(2.0 * (works.worked_s - waits.worked_s), abs=1e-4)


def test_on_cores_of_their_own_each_takes_what_passes():
    [waits] = _behind(Moment(lambda times: _work(times * _OWN_S), _OWN_S, 1.0), _waits)
    assert waits.taken.seconds > 19e-3, "nobody else works while it waits"


def test_moments_in_which_the_thread_itself_worked_longer_do_not_count():
    stolen_s = itertools.cycle((0.0, 0.0, 20e-3))
    [works] = _behind(Moment(lambda times: _work(times * _OWN_S + next(stolen_s)), _OWN_S, 2.0), _works)
    assert works.worked_s == pytest.approx(4e-3, rel=0.3)


@pytest.mark.parametrize(("elsewhere", "ranks_here"), [(0, 6), (2, 4)])
def test_ranks_of_other_machines_share_no_cores(elsewhere, ranks_here, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    here = float(zlib.crc32(platform.node().encode()))

    class _Six(Alone):
        def all_reduce(self, x, axis, op="sum"):
            return torch.tensor([here] * (6 - elsewhere) + [here + 1] * elsewhere, dtype=torch.float64)

    found = crowding_of(_Six(torch.device("cpu"), 0, 6))
    assert found == ranks_here * torch.get_num_threads() / 2
    assert crowding_of(Alone(torch.device("meta"), 0, 6)) == 1.0
