"""What every test shares: one thread a process, one seed a test."""

import contextlib
import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Mark as slow the cases of a test that come after the first ones, as ``@pytest.mark.slow_after(count)`` says."""
    seen: Counter[str] = Counter()
    for item in items:
        for marker in item.iter_markers("slow_after"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > marker.args[0]:
                item.add_marker("slow")


def pytest_collection_finish():
    """Let the garbage collector leave alone what is there before the first test: modules, hundreds of MB of them."""
    gc.collect()
    gc.freeze()


# The tests that need traces for something else; all others are, or may be, about tracing itself.
SHARING_TRACES = (
    "balance",
    "benchmarks",
    "data",
    "docs",
    "explain",
    "laws",
    "lower",
    "lower/groups",
    "parity",
    "search",
    "step",
)


@pytest.fixture(autouse=True, scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of traces that all processes of this run share."""
    from tests.ranks import share_traces_in

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "traces"
    folder.mkdir(exist_ok=True)
    share_traces_in(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def shared_traces(request: pytest.FixtureRequest, traces: Path) -> Iterator[None]:
    """Tests that only need a trace read those that others have made."""
    from tests.shared_traces import sharing_traces

    folder = request.path.parent.relative_to(Path(__file__).parent).as_posix()
    with sharing_traces(traces) if folder in SHARING_TRACES else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="module")
def process_groups_are_closed() -> Iterator[None]:
    """One that a test leaves open would be seen by the tests that this process runs after it, in whatever order."""
    yield
    import torch.distributed as dist

    assert not dist.is_initialized(), "a test of this file left a process group open"


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed Python, numpy and torch alike before each test."""
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0
