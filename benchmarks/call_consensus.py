"""What it costs that ranks compare their calls in every step: ``python benchmarks/call_consensus.py [--ranks 2 4]``.

The LLaMA-shaped model of `benchmarks/runtime.py` is trained over gloo, with the comparison and without it in alternate
steps.  For each number of ranks two figures: the median ratio of neighboring steps, with over without, of the slowest
rank's seconds; and the seconds that a call spends in the comparison itself (digests of the batch and of the random
generators, and one exchange with the store), as a share of the step.  The first tells no less than what steps vary by.

At the end many clients of one store exchange a record each, as the hosts of a large cluster do in every step: a step of
so many hosts can't be shorter than the server's CPU seconds for all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.runtime import make_model, train_step

_WARM_UP = 4
_ROUNDS = 20
_RECORD = json.dumps([0, {
    "call": "training step 1000", "backward": True, "random": 1 << 31,
    "inputs": ["training step 1000", {"input_ids": 1 << 31, "labels": 1 << 31}],
}])  # fmt: skip


def run_ranks(steps: int) -> None:
    """Compare steps; every rank runs this."""
    import autopar  # noqa: PLC0415  (the launching process does not need it)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model, inputs = make_model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    constraints = (f"data={world}", "zero=2", "recompute=none", "microbatches=1")
    parallel = autopar.parallelize(model, mesh, inputs, constraints=constraints)
    optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)
    communicator: Any = parallel._communicator
    calls = communicator.calls
    count = parallel._optimizer_service.count_trained
    taken: list[float] = []
    calls.enter = timed(calls.enter, taken)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * (steps + _WARM_UP)):
        # Each goes first in every other pair.
        is_with = (step % 4) in (0, 3)
        communicator.calls = calls if is_with else None
        elapsed = train_step(parallel, optimizer, inputs)
        if step >= 2 * _WARM_UP:
            seconds[is_with].append(elapsed)
    if dist.get_rank() == 0:
        ratios = sorted(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        noted_s, counted_s = once_s(lambda: calls.records.note_step([1e-3, 0.9, 0.999], "AdamW")), once_s(count)
        print(f"{world} ranks: noting an optimizer's step {noted_s * 1e6:.0f} us, counting what is trained of "
              f"{len([*parallel.parameters()])} parameters {counted_s * 1e6:.0f} us", flush=True)  # fmt: skip
        step_s, own_s = statistics.median(seconds[True]), statistics.median(taken[-steps:])
        print(
            f"{world} ranks: with / without: median {statistics.median(ratios):.4f} (quartiles {low:.3f} to "
            f"{high:.3f}, {steps} pairs of steps of {step_s:.3f} s); in the comparison {own_s * 1e6:.0f} us "
            f"(at most {max(taken[-steps:]) * 1e6:.0f}), {own_s / step_s:.3%} of a step", flush=True,
        )  # fmt: skip
    dist.destroy_process_group()


def once_s(act: Callable[[], object]) -> float:
    """Seconds of a call, of the fastest of several rounds."""
    return min(timeit.repeat(act, number=100)) / 100


def timed(enter: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    """`CallConsensus.enter` that notes its seconds, without those of what it prepares."""

    def noted(kind: str, prepare: Callable[[], Any], *others: Any, **named: Any) -> Any:
        inside = 0.0

        def timed_prepare() -> Any:
            nonlocal inside
            started_s = time.perf_counter()
            try:
                return prepare()
            finally:
                inside += time.perf_counter() - started_s

        started_s = time.perf_counter()
        try:
            return enter(kind, timed_prepare, *others, **named)
        finally:
            taken.append(time.perf_counter() - started_s - inside)

    return noted


def serve(port: int, stop: Any, found: Any) -> None:
    """Host a store until told to `stop`; gives the CPU seconds that its clients took of this process."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    before = resource.getrusage(resource.RUSAGE_SELF)
    found.put(store.port)
    stop.get()
    after = resource.getrusage(resource.RUSAGE_SELF)
    found.put(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def time_store(clients: int) -> None:
    """Exchange a record by each of many clients, round by round."""
    context = mp.get_context("spawn")
    stop, found = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(0, stop, found))
    process.start()
    port = found.get()
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(clients)]
    each: list[float] = []
    for number in range(_ROUNDS):
        started_s = time.perf_counter()
        for store in stores:
            store.compare_set(str(number), "", _RECORD)
        each.append((time.perf_counter() - started_s) / clients)
    stop.put(None)
    server_s = found.get() / _ROUNDS / clients
    process.join()
    low, middle, high = statistics.quantiles(each, n=4)
    print(f"store with {clients} clients: {middle * 1e6:.0f} us an exchange (quartiles {low * 1e6:.0f} to "
          f"{high * 1e6:.0f}), {server_s * 1e6:.0f} us of the server's CPU")  # fmt: skip
    for hosts in (128, 1024, 2048):
        print(f"    {hosts} hosts: {hosts * server_s * 1e3:.1f} ms of the server's CPU a step")


def main() -> None:
    """Launch the ranks under torchrun, then time a store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps")
    parser.add_argument("--clients", type=int, default=200, help="of the store")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_ranks(options.steps)
        return
    print(f"# {' '.join(sys.argv)}: torch {torch.__version__}, Python {platform.python_version()}, "
          f"{os.cpu_count()} cores of {platform.machine()}, 1 thread a rank, gloo", flush=True)  # fmt: skip
    for ranks in options.ranks:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        subprocess.run([*launch, __file__, "--steps", str(options.steps)], check=True)
    time_store(options.clients)


if __name__ == "__main__":
    main()
