"""Scripts as their authors write them, with one line changed: on ranks they give what they give on one device.

A script is a file of this folder with

- ``PLANS``: the constraints of each run, by the number of ranks; ``()`` is the plan that is found without any.  4 ranks
  where 2 can't show as much: of several kinds of parallelism at once, or of a kind that no run on 2 has;
- ``main(prepare, folder, master)``: the script.  ``prepare(model, example inputs, **arguments of parallelize)`` is its
  changed line, `folder` takes its files (one folder for all ranks), `master` says whether to write them.  It gives
  ``"losses"`` (numbers), ``"state"`` (whole tensors by name), and what else must be equal to the bit;
- ``REQUIRES``, if it needs packages that the tests don't: without them it is skipped;
- ``TOLERANCE``, if float64's 1e-9 is not right for it: of losses, relative (of the state 100 times that).
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.end_to_end.harness import launch, whole_mesh

pytestmark = pytest.mark.slow

SCRIPTS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith(("test_", "__")))
PER_LAUNCH = 4  # starting processes takes as long as a script, and a test is to last a minute


def script(name: str) -> Any:
    return importlib.import_module(f"tests.scripts.{name}")


def worlds_of(name: str) -> Collection[int]:
    """The keys of a script's PLANS: what it imports would take seconds to find the tests."""
    lines = ast.parse(Path(__file__).with_name(f"{name}.py").read_text()).body
    plans = next(x.value for x in lines if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "PLANS")
    return ast.literal_eval(plans)


def launches() -> Iterator[Any]:
    """The scripts that run on so many ranks, a few at a time."""
    for world in (2, 4):
        names = [name for name in SCRIPTS if world in worlds_of(name)]
        for start in range(0, len(names), PER_LAUNCH):
            some = names[start : start + PER_LAUNCH]
            yield pytest.param(world, some, id=f"{world}-{','.join(some)}")


def check_script(name: str, folder: Path, constraints: tuple[str, ...]) -> None:
    """Numbers, state and samples are those of one device, which lie in the folder."""
    expected = torch.load(folder / "expected.pt", weights_only=False)
    tolerance = getattr(script(name), "TOLERANCE", 1e-9)

    def prepare(model: Any, example: Any, **kwargs: Any) -> Any:
        return autopar.parallelize(model, whole_mesh(), example, profile=False, constraints=constraints, **kwargs)

    found = script(name).main(prepare, folder, dist.get_rank() == 0)
    assert found.keys() == expected.keys()
    losses, wanted = (torch.tensor(each["losses"], dtype=torch.float64) for each in (found, expected))
    torch.testing.assert_close(
        losses, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{text} {losses} {wanted}"
    )
    assert found["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        torch.testing.assert_close(found["state"][key], value, rtol=100 * tolerance, atol=tolerance)
    for key in expected.keys() - {"losses", "state", "params" if "pipeline=2" in constraints else ""}:
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected[key])), key


@pytest.mark.parametrize(("world", "names"), list(launches()))
def test_on_ranks(world: int, names: list[str], tmp_path: Path, subtests: pytest.Subtests) -> None:
    checks: list[partial[None]] = []
    for name in names:
        with subtests.test(name):
            for package in getattr(script(name), "REQUIRES", ()):
                pytest.importorskip(package)
            checks += one_device(name, world, tmp_path)
    launch(world, *checks)


def one_device(name: str, world: int, folder: Path) -> list[partial[None]]:
    """Run a script on one device, and keep its results for its checks on ranks."""
    (folder / name).mkdir()
    expected = script(name).main(lambda model, *_, **__: model, folder / name, True)
    checks: list[partial[None]] = []
    for number, constraints in enumerate(script(name).PLANS[world]):
        own = folder / f"{name}-{number}"
        own.mkdir()
        torch.save(expected, own / "expected.pt")
        checks.append(partial(check_script, name, own, constraints))
    return checks
