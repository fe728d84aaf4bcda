"""Tensors of any dtype are compared, buffers of masks and of rotations among them."""

import pytest
import torch
from torch import nn

import autopar
from autopar.verify.differences import relative_error


@pytest.mark.parametrize(
    ("expected", "found", "error"),
    [
        (torch.tensor([True, False]), torch.tensor([True, False]), 0.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([2 + 1j]), torch.tensor([2 + 3j]), 1.0),  # only the imaginary part differs
        (torch.tensor([2 + 1j]), torch.tensor([2.0]), float("inf")),
        (torch.tensor([4, 2]), torch.tensor([4, 3]), 0.25),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), float("inf")),
    ],
)
def test_relative_error(expected, found, error):
    assert relative_error(expected, found) == error


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(6, 8, dtype=torch.bool).tril())
        self.register_buffer("rotations", torch.polar(torch.ones(6, 4), torch.rand(6, 4)))

    def forward(self, x):
        turned = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2))) * self.rotations
        return torch.view_as_real(turned).flatten(-2).masked_fill(~self.mask, 0.0).square().mean()


def test_buffers_of_any_dtype_are_verified():
    model, inputs = Masked(), {"x": torch.randn(4, 6, 8)}
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=("data=2",))
    report = autopar.verify(model, plan, inputs)
    assert report.buffer_errors == {"mask": 0.0, "rotations": 0.0}
    assert max(report.gradient_errors.values()) < 1e-12
