"""`compile=True` computes what eager layers compute, and what one device computes."""

from __future__ import annotations

import shutil

import pytest
import torch

import autopar
from tests.end_to_end.harness import launch
from tests.models import make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU"),
]


def check_compiled() -> None:
    """One layer program for both blocks, with collectives between its compiled pieces."""
    model, inputs = make("plain_gpt", torch.float32)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    compiled = autopar.parallelize(model, mesh, inputs, constraints=["tensor=2"], compile=True, profile=False)
    loss = compiled(**inputs)[1]
    loss.backward()
    expected = model(**inputs)[1]
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for (name, mine), theirs in zip(compiled.named_parameters(), model.parameters(), strict=True):
        difference = (mine.grad.full_tensor() - theirs.grad).abs().max()  # type: ignore[union-attr]
        assert difference <= 1e-4 * theirs.grad.abs().max(), name


def test_two_ranks_run_compiled_layers() -> None:
    launch(2, check_compiled)
