"""What is computed of parameters alone, as weights or distances, trains as on one device, in microbatches too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.zoo import assert_parity, forced_plan, trained_alone


class Orthogonal(nn.Module):
    """A product of reflections, which is turned by the signs of the parameter's diagonal: integers have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[batch, 8], [batch] -> a scalar."""
        return nn.functional.cross_entropy(self.head(self.body(x).tanh()), labels)


def test_signs_of_a_parameter_are_whole_in_every_microbatch() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 8).double(), "labels": torch.randint(4, (8,))}
    who = trained_alone(Orthogonal().double(), inputs)
    plan = forced_plan(who.traced.program, 2, "microbatches=2")
    assert plan.num_microbatches == 2
    assert_parity(who, plan)


class Codebook(nn.Module):
    """The codes that are nearest by distances made of products, through which no gradient flows, as in VQGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.head = nn.Linear(6, 8), nn.Embedding(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[batch, 6], [batch] -> a scalar."""
        hidden = self.encoder(x)
        codes = self.codes.weight
        distances = hidden.square().sum(1, keepdim=True) + codes.square().sum(1) - 2 * hidden @ codes.T
        nearest = self.codes(distances.argmin(1))
        pull = (nearest.detach() - hidden).square().mean() + (nearest - hidden.detach()).square().mean()
        return nn.functional.cross_entropy(self.head(hidden + (nearest - hidden).detach()), labels) + pull


@pytest.mark.parametrize("constraints", [("microbatches=2",), ("data=2", "microbatches=2"), ("tensor=2",)])
def test_distances_to_parameters_need_no_gradient(constraints: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 6).double(), "labels": torch.randint(4, (8,))}
    who = trained_alone(Codebook().double(), inputs)
    assert_parity(who, forced_plan(who.traced.program, 2, *constraints))
