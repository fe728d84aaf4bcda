"""The helper that starts ranks: results in order, failures told at once, hangs ended."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksError, run_ranks, run_script


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
    with pytest.raises(RanksError, match=r"2 ranks: failed\n(.|\n)*rank one is unwell"):  # not: ran longer than
        run_ranks(fail_on_one_rank, 2)


@pytest.mark.slow
def test_a_hang_is_ended():
    with pytest.raises(RanksError, match="ran longer than 5 s"):
        run_ranks(sleep_long, 2, timeout_s=5)


@pytest.mark.slow
def test_a_script_runs_under_torchrun_and_its_failure_is_quoted(tmp_path: Path):
    script = tmp_path / "script.py"
    lines = [
        "import os, sys",
        "sys.stdout.write(f'rank {os.environ[\"RANK\"]}\\n')",  # at once: print() writes word by word
        "assert len(sys.argv) == 1, 'too many words'",
    ]
    script.write_text("\n".join(lines))
    assert sorted(run_script(script, 2).split("\n")) == ["", "rank 0", "rank 1"]
    with pytest.raises(RanksError, match="too many words"):
        run_script(script, 2, ["word"])


@pytest.mark.slow
def test_a_script_that_hangs_is_ended_with_its_ranks(tmp_path: Path):
    script, alive = tmp_path / "script.py", tmp_path / "alive"
    touch = f"while True: Path({str(alive)!r}).touch(); time.sleep(0.2)"
    script.write_text(f"import time\nfrom pathlib import Path\n{touch}\n")
    for timeout_s in (10, 120):  # a busy machine may not have started it after 10 s
        with pytest.raises(RanksError, match=f"ran longer than {timeout_s} s"):
            run_script(script, 1, timeout_s=timeout_s)
        if alive.exists():
            break
    last = alive.stat().st_mtime
    time.sleep(1)
    assert alive.stat().st_mtime == last
