"""Gradients that a plan has none of are refused: a script must not train without them and not know it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.errors import OutputError, PlanMismatchError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from autopar.verify.rehearsal import run_ranks
from tests.zoo import quick, quick_search


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(8)))

    def forward(self, x, y):
        logits = self.blocks(x)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}


INPUTS = {"x": torch.randn(8, 8), "y": torch.randint(0, 8, (8,))}


def train_on_ranks(model, step, *constraints):
    traced = trace_model(copy.deepcopy(model), INPUTS)
    request = SearchRequest(constraints=quick(constraints), schedules=schedule_actions)
    run_ranks(model, traced, quick_search(traced.program, 2, request), step)


@pytest.mark.parametrize(
    ("constraints", "why"), [(("pipeline=2",), "pipeline stages"), (("data=2", "microbatches=2"), "microbatches")]
)
def test_a_loss_of_an_output_whose_backward_is_over_is_refused(constraints, why):
    def step(model):
        outputs = model(**INPUTS)
        assert outputs["logits"].argmax(-1).shape == (8,)
        outputs["loss"].backward()
        outputs = model(**INPUTS)
        with pytest.raises(OutputError, match=f"with {why} the backward passes run inside the forward call"):
            (outputs["loss"] + outputs["logits"].pow(2).mean()).backward()

    train_on_ranks(WithLoss(), step, *constraints)


def test_a_stage_that_was_frozen_when_it_was_planned_is_not_trained_silently():
    model = WithLoss()
    model.blocks[:6].requires_grad_(False)

    def step(parallel):
        parallel(**INPUTS)["loss"].backward()
        name, frozen = next((n, p) for n, p in parallel.named_parameters() if not p.requires_grad)
        frozen.requires_grad_(True)
        with pytest.raises(PlanMismatchError, match=f"parameter '{name}' requires a gradient, but was frozen"):
            parallel(**INPUTS)

    train_on_ranks(model, step, "pipeline=2")
