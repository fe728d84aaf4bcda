"""Random models by random plans: the peak memory that a plan promises beside what its ranks allocate.

    python benchmarks/random_memory.py [--count 100] [--seed 0] [--seeds N,N] [--kinds]

Models are made of random blocks (products, attention, convolutions, norms, recurrent layers, custom functions, scans,
selections) with a random loss, plans by random constraints on 1 to 4 simulated ranks.  As in ``accuracy.py memory``,
every storage that an op makes is watched, on CPUs.  A ratio is measured over promised: above 1 the promise is broken.
While ops are watched, torch makes copies of what it writes in place otherwise (the gradient of a gather), so a ratio
above 1 may also be the watch's; what kernels allocate inside is not seen.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import AutoparError
from benchmarks.predictions._random_models import random_model
from benchmarks.predictions.memory import KINDS, Case, Outcome, measure_model

ABOVE, BELOW = 1.03, 0.85

ALONE = ("", "", "recompute=full", "recompute=selective", "microbatches=2", "microbatches=4 gradients=bf16",
         "microbatches=2 recompute=full")  # fmt: skip
TWO = (
    "data=2 zero=0", "data=2 zero=1", "data=2 zero=2 microbatches=2", "data=2 zero=3", "data=2 zero=3 recompute=full",
    "data=2 zero=1 recompute=selective", "tensor=2", "tensor=2 recompute=full", "tensor=2 recompute=selective",
    "data=2 microbatches=2", "pipeline=2 microbatches=2 schedule=gpipe", "pipeline=2 microbatches=4 schedule=1f1b",
    "pipeline=2 microbatches=4 schedule=1f1b recompute=full", "", "pipeline=2 microbatches=4 schedule=zbv",
)  # fmt: skip
FOUR = (
    "data=2 tensor=2 zero=1", "data=4 zero=3", "data=2 pipeline=2 microbatches=2 schedule=1f1b zero=1", "tensor=4",
)  # fmt: skip
WITH_LOGITS = ("logits=64", "logits=100 recompute=full", "logits=128 microbatches=2")


def case_of(seed: int) -> Case:
    """The devices and constraints of this seed."""
    random_ = random.Random(seed)
    world = random_.choice((1, 1, 2, 2, 2, 4))
    text = random_.choice({1: ALONE, 2: TWO, 4: FOUR}[world])
    precision = random_.choice((None, None, "bf16"))
    if world == 1 and random_.random() < 0.15:
        text = random_.choice(WITH_LOGITS)
    return Case(f"seed {seed}", world, tuple(text.split()), precision)


def run_case(seed: int) -> tuple[str, Outcome | None, str]:
    """Its title, what was predicted and measured, and else why it has no plan, or what failed."""
    case = case_of(seed)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model, inputs, description = random_model(random.Random(1000 + seed))
    title = f"{case.title}: {description}"
    try:
        return title, measure_model(case, model, inputs), ""
    except AutoparError as error:
        return title, None, f"no plan: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
    except Exception as error:  # noqa: BLE001  (whatever it is, it is listed)
        return title, None, f"FAILED: {type(error).__name__}: {str(error)[:300]}"


def _print(title: str, outcome: Outcome, seconds: float, *, shows_kinds: bool) -> None:
    ratio = outcome.measured_peak / outcome.predicted_peak
    mark = "ABOVE" if ratio > ABOVE else "below" if ratio < BELOW else ""
    sizes = f"promised {outcome.predicted_peak / 2**20:8.2f} MiB, measured {outcome.measured_peak / 2**20:8.2f}"
    print(f"{ratio:.3f} {mark:5s} {sizes} ({seconds:.1f} s) {title}", flush=True)
    for kind in KINDS if shows_kinds else ():
        measured, predicted = outcome.measured[kind], outcome.predicted[kind]
        if measured or predicted:
            print(f"      {kind:20s} predicted {predicted / 2**20:8.2f} measured {measured / 2**20:8.2f}", flush=True)


def _summary(ratios: Iterable[float], without: int) -> str:
    ordered = sorted(ratios)
    above, below = sum(ratio > ABOVE for ratio in ordered), sum(ratio < BELOW for ratio in ordered)
    counts = f"{above} above {ABOVE}, {below} below {BELOW}"
    spread = f"least {ordered[0]:.3f}, median {ordered[len(ordered) // 2]:.3f}, most {ordered[-1]:.3f}"
    return f"{len(ordered)} cases, {without} without; measured over promised: {spread}; {counts}"


def main() -> None:
    """All cases as they are measured; the spread at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", default="", help="these seeds, separated by commas")
    parser.add_argument("--kinds", action="store_true", help="also by kind of memory")
    given = parser.parse_args()
    versions = f"autopar {version('autopar')}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"# {' '.join(sys.argv)}: {versions}, {platform.machine()}, {torch.get_num_threads()} threads", flush=True)
    seeds = [int(s) for s in given.seeds.split(",")] if given.seeds else range(given.seed, given.seed + given.count)
    ratios: list[float] = []
    for seed in seeds:
        started = time.perf_counter()
        title, outcome, why = run_case(seed)
        if outcome is None:
            print(f"----- {title}: {why}", flush=True)
            continue
        ratios.append(outcome.measured_peak / outcome.predicted_peak)
        _print(title, outcome, time.perf_counter() - started, shows_kinds=given.kinds)
    if ratios:
        print(_summary(ratios, len(seeds) - len(ratios)))


if __name__ == "__main__":
    main()
