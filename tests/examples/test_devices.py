"""The examples use the machine's accelerators, if there is one for each process, and else its CPU cores."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch


@pytest.fixture(scope="module")
def devices() -> Any:
    path = Path(__file__).parents[2] / "examples" / "devices.py"
    spec: Any = importlib.util.spec_from_file_location("devices", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("accelerator", "count", "processes", "expected"),
    [(None, 0, 2, "cpu"), ("cuda", 8, 8, "cuda"), ("cuda", 1, 2, "cpu"), ("xpu", 4, 2, "xpu")],
)
def test_each_process_has_an_accelerator_or_none_has(
    monkeypatch: pytest.MonkeyPatch, devices: Any, accelerator: str | None, count: int, processes: int, expected: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    found = None if accelerator is None else torch.device(accelerator)
    with (
        patch.object(torch.accelerator, "current_accelerator", lambda *, check_available: found),
        patch.object(torch.accelerator, "device_count", lambda: count),
    ):
        assert devices.device_type() == expected


def test_no_example_names_a_device() -> None:
    folder = Path(__file__).parents[2] / "examples"
    named = [
        path.name for path in folder.glob("*.py") if 'mesh("cpu"' in (text := path.read_text()) or '"gloo"' in text
    ]
    assert named == []
