"""Outputs beside the loss come out of microbatches without communication, as DTensors that join to the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.planning.building import build
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from tests.models import make
from tests.ranks import run_ranks
from tests.zoo import quick_search


def outputs(constraints: tuple[str, ...]) -> tuple[Tensor, Tensor, bool]:
    """Whole logits, the loss, and whether the logits came in slices."""
    model, inputs = make("plain_gpt")
    traced = trace_model(model, inputs)
    plan = quick_search(traced.program, 4, SearchRequest(constraints=constraints))
    mesh = init_device_mesh("cpu", (4,))
    parallel = build(model, traced, plan, ProcessGroupCommunicator(), mesh)
    parallel.whole_outputs = False
    logits, loss = parallel(**inputs)
    is_cut = isinstance(logits, DTensor)
    return (logits.full_tensor() if is_cut else logits).detach(), loss.detach(), is_cut


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraints",
    [("microbatches=2", "data=4"), ("microbatches=2", "data=2", "tensor=2"), ("microbatches=4", "tensor=4")],
    ids="+".join,
)
def test_logits_of_microbatches_join_to_the_whole(constraints: tuple[str, ...]) -> None:
    model, inputs = make("plain_gpt")
    expected, loss = model(**inputs)
    for found, own_loss, is_cut in run_ranks(outputs, 4, constraints):
        assert is_cut or torch.__version__ < (2, 13)  # which has no words for slices of microbatches over several axes
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own_loss, loss.detach(), rtol=1e-12, atol=0)
