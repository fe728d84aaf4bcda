"""Devices that torch does not know itself, as Ascend's plug-in brings one: a stand-in, two processes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.backend.entry import compile_graph
from autopar.cost.measure.timing import elapsed_s
from autopar.errors import MeshError
from autopar.lower.communication import torch_groups
from autopar.lower.kernels.random import generator_state
from autopar.planning.mesh_cluster import Place, check_places
from tests import stand_in_device
from tests.lower.runs import loss_of, train_single
from tests.models import make_plain_gpt
from tests.ranks import run_ranks

DEVICE = "standin:0"


class Clipped(torch.optim.AdamW):
    """An optimizer's steps on gradients of norm 1 at most."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3, eps=1e-5)

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step(closure)


def parallelize(constraints: list[str], dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = make_plain_gpt(dropout=dropout)
    inputs = {key: x.to(DEVICE) for key, x in inputs.items()}
    mesh = init_device_mesh("standin", (2,))
    return autopar.parallelize(model, mesh, inputs, profile=False, constraints=constraints), inputs


def train(constraints: list[str]) -> tuple[Any, ...]:
    """Two steps of AdamW: losses, state, and where parameters and states of the optimizer are."""
    model, inputs = parallelize(constraints)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(**inputs))
        loss.backward()
        losses.append(loss.item())
        model.clip_grad_norm_(1.0)
        optimizer.step()
    types = {x.to_local().device.type for own in optimizer.state.values() for x in own.values() if x.dim()}
    return losses, {name: x.cpu() for name, x in model.full_state_dict().items()}, types, model.plan.device


def refuse_host_tensors() -> None:
    """From now on a collective of autopar on a tensor of the host fails, as it does with NCCL or HCCL."""
    for name in [name for name in vars(torch_groups) if name.startswith("start_")]:
        start = getattr(torch_groups, name)

        def strictly(*args: Any, start: Any = start) -> Any:
            assert all(x.device.type == "standin" for x in args if isinstance(x, Tensor))
            return start(*args)

        setattr(torch_groups, name, strictly)


def call_with_a_batch_of_the_host() -> list[float]:
    """The loss of a batch on the device, and of the same one on the host."""
    model, inputs = parallelize(["tensor=2"])
    losses = [loss_of(model(**{key: x.to(place) for key, x in inputs.items()})) for place in (DEVICE, "cpu")]
    losses[1].backward()
    return [loss.item() for loss in losses]


class Named(nn.Module):
    """It names the device in its forward, and reads a tensor there that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, scale = nn.Linear(4, 4), torch.arange(4.0).to(DEVICE)
        self.scaled = lambda x: x * scale

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(4, device=DEVICE) + torch.ones(4).to(DEVICE) + x.new_zeros(4, device=DEVICE)
        return (self.scaled(self.layer(x)) + places + torch.full((1,), 1.0, device="standin")).square().mean()


def name_the_device() -> tuple[float, float, float]:
    """The loss on one device, and of ranks, also by ``torch.compile``, whose graphs name the device of inputs."""
    torch.manual_seed(0)
    single, x = Named().to(DEVICE), torch.randn(4, 4).to(DEVICE)
    model = autopar.parallelize(single, init_device_mesh("standin", (2,)), (x,), profile=False, constraints=["data=2"])
    options = {"mesh": init_device_mesh("standin", (2,)), "profile": False, "constraints": ["data=2"]}
    compiled = torch.compile(single, backend=compile_graph, options=options)
    return single(x).item(), model(x).item(), compiled(x).item()


def on_stand_in(cases: list[list[str]]) -> dict[str, Any]:
    stand_in_device.register("Ascend910B4")
    refuse_host_tensors()
    found: dict[str, Any] = {"trained": [train(constraints) for constraints in cases]}
    # Dropout draws from the device's default generator, the only one that it has.
    model, inputs = parallelize(["data=2"], dropout=0.5)
    draws = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        before = generator_state(DEVICE)
        draws.append(model(**inputs)[1].item())
        assert torch.equal(before, generator_state(DEVICE))
    found["draws"] = draws
    report = model.report(lambda: model(**inputs)[1].backward())
    found["measured"] = report.measured.step_s, {event.stream for event in report.measured.events}
    found["batches"], found["named"] = call_with_a_batch_of_the_host(), name_the_device()
    x = torch.ones(64, 64, device=DEVICE)
    found["seconds"] = elapsed_s(lambda: x @ x, torch.device(DEVICE))
    with pytest.raises(MeshError, match="mesh is of 'cuda' devices, but torch"):
        autopar.parallelize(nn.Linear(8, 8), init_device_mesh("cuda", (2,)), (x,))
    return found


@pytest.mark.slow
def test_a_device_from_outside_torch_trains_as_one_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    torch.manual_seed(0)
    model, inputs = make_plain_gpt()
    expected = train_single(model, inputs, make_optimizer=Clipped)
    cases = [["zero=3"], ["tensor=2", "microbatches=2"], ["pipeline=2"], ["offload=optimizer", "offload=activations"]]
    for found in run_ranks(on_stand_in, 2, cases):
        for constraints, (losses, state, types, device) in zip(cases, found["trained"], strict=True):
            assert device == "Ascend-910B-64GB"
            assert types == {"cpu" if "offload=optimizer" in constraints else "standin"}
            torch.testing.assert_close(losses, list(expected.losses))
            torch.testing.assert_close(state, dict(expected.state))
        first, other, again = found["draws"]
        assert first == again != other
        step_s, streams = found["measured"]
        assert step_s > 0
        assert streams >= {"compute", "communication"}
        assert found["seconds"] > 0
        on_device, on_host = found["batches"]
        assert on_device == on_host
        assert found["named"][1:] == pytest.approx([found["named"][0]] * 2)


def test_unlike_nodes_are_refused_by_name() -> None:
    h100, a100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    assert check_places([Place(h100, f"host{rank // 4}") for rank in range(8)]) == 4
    with pytest.raises(
        MeshError, match=f"the mesh has unlike devices: rank 0 runs on '{h100}', rank 2 on '{a100}' .host b."
    ):
        check_places([Place(h100, "a"), Place(h100, "a"), Place(a100, "b"), Place(a100, "b")])
    with pytest.raises(MeshError, match="the mesh has unlike nodes: host b has 1 of its ranks, host a has 2"):
        check_places([Place(h100, "a"), Place(h100, "a"), Place(h100, "b")])
