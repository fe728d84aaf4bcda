"""Arguments of another kind than asked for, without processes: each is an error that shows what to write, or works."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import api
from autopar.errors import (
    AutoparError,
    ConstraintError,
    ExampleInputsError,
    MeshError,
    ModelError,
    PlanFormatError,
    ProfileError,
)
from autopar.lower.compat import make_mesh
from autopar.planning.arguments import read_outputs

CLUSTER = autopar.Cluster.of("h100", devices_per_node=2)
X = torch.linspace(-1, 1, 64).view(8, 8)
MANY_DIGITS = "9" * 5000


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] -> a scalar."""
        return self.linear(x).square().mean()


def mesh_of(kind: str) -> DeviceMesh:
    return make_mesh((2,), range(2), kind, rank=0)


def plan(model: Any = None, cluster: Any = CLUSTER, inputs: Any = (X,), **arguments: Any) -> autopar.Plan:
    return autopar.plan(model or Linear(), cluster, inputs, **arguments)


@pytest.mark.parametrize("constraints", [None, (), [], "data=2", ["data=2"], iter(["data=2"])])
def test_constraints_are_none_one_or_many(constraints: Any) -> None:
    asked = ("data=2",) if constraints else ()
    assert plan(constraints=constraints).constraints == asked


@pytest.mark.parametrize(
    ("constraints", "told"),
    [
        ([2], r"constraints=\[2\]: write a list of texts"),
        (2, "constraints=2: write a list"),
        ([["data=2"]], "write a list of texts"),
        (f"data={MANY_DIGITS}", "is not a whole number below a billion"),
        (f"mesh=2x{MANY_DIGITS}", "is not sizes such as 2x4"),
        ("data=\u0b68", "is not a whole number"),
        (["pipeline=2", f"cuts={MANY_DIGITS}"], "neither a number nor one of the"),
    ],
)
def test_constraints_that_are_none_are_refused(constraints: Any, told: str) -> None:
    with pytest.raises(ConstraintError, match=told) as caught:
        plan(constraints=constraints)
    assert len(str(caught.value)) < 1000


def test_a_tensor_alone_is_the_one_argument() -> None:
    assert plan(inputs=X).fingerprint == plan(inputs=(X,)).fingerprint == plan(inputs={"x": X}).fingerprint
    lossless, arguments = nn.Linear(8, 8), {"loss_fn": nn.functional.mse_loss, "example_target": X}
    found = plan(lossless, inputs=X, **arguments)
    assert found.fingerprint == plan(lossless, inputs=(X,), **arguments).fingerprint
    assert autopar.verify(Linear(), plan(inputs=X), X).world_size == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        ({"inputs": "abc"}, ExampleInputsError, "example_inputs is a str: pass one batch"),
        ({"inputs": 5}, ExampleInputsError, "example_inputs is an int"),
        ({"inputs": {X}}, ExampleInputsError, "example_inputs is a set"),
        ({"inputs": ()}, ExampleInputsError, "missing a required argument: 'x'"),
        ({"memory": 10**400}, ConstraintError, "not an amount of memory"),
        ({"memory": [1]}, ConstraintError, r"memory=\[1\] is not an amount of memory"),
        ({"memory": math.nan}, ConstraintError, "memory=nan is not an amount of memory"),
        ({"precision": 5}, ConstraintError, "precision=5 is not a floating-point dtype"),
        ({"profile": 5}, ProfileError, "profile='5' can't be read"),
        ({"cluster": "h100"}, MeshError, "cluster is a str: pass a DeviceMesh, or a Cluster"),
        ({"cluster": None}, MeshError, "cluster is a NoneType"),
        ({"model": Linear}, ModelError, r"model is the class Linear: pass an nn\.Module"),
        ({"model": print}, ModelError, "model is a builtin_function_or_method"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any], kind: type[AutoparError], told: str) -> None:
    with pytest.raises(kind, match=told) as caught:
        plan(**arguments)
    assert caught.type is kind
    assert len(str(caught.value)) < 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")
def test_a_mesh_of_devices_that_torch_does_not_see_is_refused() -> None:
    with pytest.raises(MeshError, match=r"'cuda' devices, but torch sees none.*Cluster\.of\('h100'"):
        plan(cluster=mesh_of("cuda"))
    with pytest.raises(MeshError, match=r"'cuda' devices, but torch .* sees none here"):
        autopar.parallelize(Linear(), mesh_of("cuda"), (X,), profile=False)


def test_without_processes_there_is_an_error_and_no_traceback() -> None:
    with pytest.raises(MeshError, match="no process group: start the script with torchrun"):
        autopar.parallelize(Linear(), mesh_of("cpu"), (X,), profile=False)


def test_typos_are_found_before_the_model_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan().save(tmp_path / "plan.json")
    (tmp_path / "profile.json").write_text("{}")
    monkeypatch.setattr(api, "trace_model", None)
    for constraints, told in (
        (["tensr=2"], "did you mean 'tensor'"),
        (["tp=3"], "3 does not divide the 2 devices"),
        (["linaer: replicate"], r"'linaer' matches no parameter.*near: linear"),
    ):
        with pytest.raises(ConstraintError, match=told):
            plan(constraints=constraints)
    with pytest.raises(ProfileError, match=r"did you mean 'profile\.json'\?"):
        plan(profile=tmp_path / "profil.json")
    for path, told in (("plans.json", "plan.json"), (f"../{tmp_path.name}_/plan.json", tmp_path.name)):
        with pytest.raises(PlanFormatError, match=f"did you mean '{re.escape(told)}'"):
            autopar.Plan.load(tmp_path / path)


def test_verify_reads_a_plan_and_names_what_is_none(tmp_path: Path) -> None:
    found = plan()
    found.save(tmp_path / "plan.json")
    assert autopar.verify(Linear(), str(tmp_path / "plan.json"), (X,)).world_size == 2
    for given in ("none.json", tmp_path, 5):
        with pytest.raises(PlanFormatError, match=r"plan=.* can't be read"):
            autopar.verify(Linear(), given, (X,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="model is a str"):
        autopar.verify("model", found, (X,))  # pyright: ignore[reportArgumentType]


def test_a_word_for_outputs_that_is_none_is_refused() -> None:
    assert [read_outputs(word) for word in ("whole", "local", None)] == [True, False, None]
    with pytest.raises(ConstraintError, match="outputs='cut': write 'whole' for whole tensors"):
        read_outputs("cut")
