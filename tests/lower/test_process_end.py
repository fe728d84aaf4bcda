"""How a rank's process ends: gloo's threads have let go of their tensors before Python ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.lower.communication import process_end
from autopar.lower.communication.process_end import settle_gloo

# Two threads of gloo have gathered, and wait for Python's lock to free the tensors; the script ends without having let
# go of it. What Python frees last lets go of it, so that they would be unwound then.
SCRIPT = """
import atexit
import sys
import time

import torch
import torch.distributed as dist

from autopar.lower.communication.process_groups import ProcessGroupCommunicator


class Last:
    def __del__(self):
        time.sleep(0.2)


last = Last()
atexit._clear()  # what other packages do at the end would let go of the lock
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
communicator = ProcessGroupCommunicator()
x = torch.ones(1 << 24, dtype=torch.uint8)
for _ in range(8):
    dist.all_gather([torch.empty_like(x)], x, async_op=True)
sys.setswitchinterval(1000)
until_s = time.monotonic() + 0.5
while time.monotonic() < until_s:
    pass
"""


@pytest.mark.slow
def test_a_rank_ends_while_gloo_frees_tensors(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(store=tmp_path / "store")], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr


def test_only_threads_that_run_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_end, "_THREADS", tmp_path)
    assert settle_gloo(0)  # there are none
    _write_thread(tmp_path / "12", "S (sleeping)")
    assert settle_gloo(60)
    _write_thread(tmp_path / "13", "R (running)", name="gloo_tcp_loop")  # which has no tensors of Python's
    assert settle_gloo(60)
    _write_thread(tmp_path / "14", "R (running)")
    assert not settle_gloo(0.1)


def _write_thread(folder: Path, state: str, name: str = "pt_gloo_runloop") -> None:
    folder.mkdir()
    lines = (f"Name:\t{name}", f"State:\t{state}", "voluntary_ctxt_switches:\t5", "nonvoluntary_ctxt_switches:\t1")
    (folder / "status").write_text("\n".join(lines) + "\n")
