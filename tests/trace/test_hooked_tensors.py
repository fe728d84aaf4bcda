"""What forward hooks on submodules keep outside of the model would be tensors of the trace."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.trace import trace
from tests.lower.runs import build
from tests.zoo import forced_plan

X = torch.linspace(-1, 1, 32).view(4, 8)
SEEN: dict[str, Any] = {}


class Kept:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.seen.append(output)

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.keep(module, inputs, output)


class Around(nn.Module):
    """A module outside of the model, as feature extractors are written."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Any] = {}

    def hook(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self.features[name] = output

        return keep


def put(seen: list[Any], module: nn.Module, inputs: Any, output: Any) -> None:
    seen.append({"kept": (output,)})


def put_globally(module: nn.Module, inputs: Any, output: Any) -> None:
    SEEN["h"] = output


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


COPIED = {"partial": partial(put, []), "method": Kept().keep, "object": Kept()}  # with the model that is traced
SHARED = {"closure": Around().hook("h"), "global": put_globally}


@pytest.mark.parametrize("kind", COPIED)
def test_a_hook_that_keeps_tensors_is_noted(kind: str) -> None:
    """Forward itself may read them, so it is no error; what the script has stays as it was."""
    model = make()
    model[1].register_forward_hook(COPIED[kind])
    notes = trace(model, (X.double(),), {}).program.notes
    assert any("a forward hook on '1' keeps tensors" in note for note in notes)


def test_hooks_that_keep_numbers_or_change_outputs_are_traced() -> None:
    model, shapes = make(), list[Any]()

    def look(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        shapes.append(output.shape)
        return output * 2

    model[1].register_forward_hook(look)
    assert not trace(model, (X.double(),), {}).program.notes


def test_what_a_hook_sets_on_its_module_can_be_read() -> None:
    model = make()

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        module.features = output

    model[1].register_forward_hook(keep)
    traced = trace(model, (X.double(),), {})
    plan = forced_plan(traced.program, 2, "data=2")

    def rank(talk: Communicator) -> Tensor:
        made: Any = build(model, traced, plan, talk)
        made(X.double())
        return made.get_submodule("1").features.detach()

    expected = model[1](model[0](X.double()))
    for found in simulate(2, rank):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", SHARED)
def test_a_hook_that_keeps_a_tensor_of_the_trace_is_refused(kind: str) -> None:
    model = make()
    model[1].register_forward_hook(SHARED[kind])
    with pytest.raises(
        TraceError, match=r"a forward hook on '1' keeps a tensor outside of the model.*module\.features = output"
    ):
        autopar.plan(model, autopar.Cluster.of("h100", devices_per_node=2), (X.double(),))
    SEEN.clear()
