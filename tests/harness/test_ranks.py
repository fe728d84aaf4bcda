"""The helper that starts ranks: results in order, failures told at once, hangs ended."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksError, run_ranks


def sum_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_one_rank():
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def sleep_long():
    time.sleep(60)


@pytest.mark.slow
def test_results_come_in_rank_order():
    results = run_ranks(sum_ranks, 3, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.item() == 33 for _, total in results)


@pytest.mark.slow
def test_one_failing_rank_ends_the_others_and_is_quoted():
    started_s = time.monotonic()
    with pytest.raises(RanksError, match="rank one is unwell"):
        run_ranks(fail_on_one_rank, 2, timeout_s=60)
    assert time.monotonic() - started_s < 50


@pytest.mark.slow
def test_a_hang_is_ended():
    with pytest.raises(RanksError, match="ran longer than 15 s"):
        run_ranks(sleep_long, 2, timeout_s=15)
