"""What every test shares: one thread a process, one seed a test."""

import gc
import os
import random

import hypothesis
import numpy as np
import pytest

hypothesis.settings.register_profile("autopar", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("autopar")

# Before torch is loaded by a test, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure():
    """Run torch on one thread: tests run side by side, and several ranks at a time."""
    import torch

    torch.set_num_threads(1)
    # As often as Python does it by itself, looking for garbage is a fifth of all that tests of traces and plans take.
    gc.set_threshold(50_000, 20, 10)


def pytest_collection_finish():
    """Let the garbage collector leave alone what is there before the first test: modules, hundreds of MB of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed Python, numpy and torch alike before each test."""
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0
