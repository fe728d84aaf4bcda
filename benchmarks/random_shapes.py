"""Random models, plans and batches of random shapes, trained by turns on simulated ranks: is it one device's training?

    python benchmarks/random_shapes.py [--count 200] [--seed 0]

Each case is a model of the tests' zoo under random constraints, the batch that it was planned for, and two others of
random rows and lengths; it counts as two (model, shape, plan) triples.  In float64: losses within 1e-12, gradients
within 1e-9, parameters after the steps within 1e-7, all relative.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import AutoparError
from tests.shapes import random_batches, train_in_turns
from tests.zoo import plan_for, subject

MODELS = {"llama": True, "gpt2": True, "bert": True, "plain_gpt": False, "flat": False, "unet": False, "t5": True,
          "deep_gpt2": True, "deep_llama": True, "deep_vit": False}  # fmt: skip
FLAT = (
    "data=2",
    "tensor=2",
    "data=2 zero=3",
    "data=2 microbatches=2",
    "sequence=2",
    "data=2 recompute=full zero=2",
    "",
)
STAGED = ("pipeline=2 microbatches=4 schedule=1f1b", "pipeline=2 microbatches=2 schedule=zbv",
          "pipeline=2 microbatches=4 schedule=gpipe recompute=full")  # fmt: skip


def case(seed: int) -> str:
    """Run one; "" if it is as one device, else what is wrong."""
    random_ = random.Random(seed)
    name, world = random_.choice(list(MODELS)), random_.choice((2, 2, 4))
    text = random_.choice(STAGED if name.startswith("deep") and random_.random() < 0.7 else FLAT)
    what = f"seed {seed}: {name} on {world}, {text!r}"
    try:
        plan = plan_for(name, world, tuple(text.split()), stages="pipeline" in text)
    except AutoparError as error:
        return f"skipped {what}: {type(error).__name__}"
    others = random_batches(subject(name).inputs, seed, 2, has_lengths=MODELS[name])
    shapes = [next(list(x.shape) for x in batch.values()) for batch in others]
    try:
        report = train_in_turns(subject(name), plan, others)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is listed)
        return f"FAILED {what}, {shapes}: {type(error).__name__}: {str(error)[:300]}"
    is_right = report.loss_error <= 1e-12 and report.worst_gradient[1] <= 1e-9 and report.parameter_error <= 1e-7
    return "" if is_right else f"WRONG {what}, {shapes}: {report}"


def main() -> None:
    """All cases; what is wrong is printed as it is found, a summary at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="triples")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    versions = f"autopar {version('autopar')}, torch {version('torch')}, Python {platform.python_version()}"
    print(f"# {' '.join(sys.argv)}: {versions}", flush=True)
    results = [""] * 0
    for seed in range(given.seed, given.seed + given.count // 2):
        results.append(case(seed))
        if results[-1]:
            print(results[-1], flush=True)
    counts = {word: sum(text.startswith(word) for text in results) for word in ("skipped", "FAILED", "WRONG")}
    right = sum(not text for text in results)
    print(f"{2 * right} triples as one device, {', '.join(f'{2 * count} {word}' for word, count in counts.items())}")


if __name__ == "__main__":
    main()
