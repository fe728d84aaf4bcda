"""Scripts as their authors write them, with one line changed: on ranks they give what they give on one device."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.end_to_end.harness import launch, parallelize

pytestmark = pytest.mark.slow

WAYS = {
    2: {
        "nanogpt": (("data=2",), ("tensor=2",)),
        "timm_style": (("data=2",), ("pipeline=2", "microbatches=1")),
        "transformers_style": (("tensor=2",), ("pipeline=2", "microbatches=1")),
    },
    4: {
        "nanogpt": (("data=2", "tensor=2"),),
        "timm_style": (("data=4",),),
        "transformers_style": (("data=2", "pipeline=2"),),
    },
}


def check_script(name: str, folder: Path, *constraints: str) -> None:
    """Numbers, state and samples are those of one device, which lie in the folder."""
    expected = torch.load(folder / "expected.pt", weights_only=False)
    found = script(name).main(
        lambda model, inputs: parallelize(model, inputs, constraints=constraints), folder, dist.get_rank() == 0
    )
    assert found.keys() == expected.keys()
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=1e-9)
    assert found["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        torch.testing.assert_close(found["state"][key], value, rtol=1e-7, atol=1e-9)
    for key in expected.keys() - {"losses", "state", "params" if "pipeline=2" in constraints else ""}:
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected[key])), key


def script(name: str) -> Any:
    return importlib.import_module(f"tests.scripts.{name}")


@pytest.mark.parametrize("world", WAYS)
def test_on_ranks(world: int, tmp_path: Path) -> None:
    checks: list[partial[None]] = []
    for name, ways in WAYS[world].items():
        expected = script(name).main(lambda model, _: model, tmp_path, True)
        for number, way in enumerate(ways):
            folder = tmp_path / f"{name}-{number}"
            folder.mkdir()
            torch.save(expected, folder / "expected.pt")
            checks.append(partial(check_script, name, folder, *way))
    launch(world, *checks)
