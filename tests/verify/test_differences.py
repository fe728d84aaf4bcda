"""Tensors of any dtype are compared, buffers of masks and of rotations among them."""

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import VerificationError
from autopar.verify import compare
from autopar.verify.differences import relative_error
from autopar.verify.rehearsal import Run, join_runs


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


def run_with_loss(loss: float) -> Run:
    return Run((loss,), {}, {}, {})


def test_a_loss_that_is_nan_on_all_ranks_is_equal_on_them_and_no_other_loss():
    joined = join_runs([run_with_loss(float("nan")), run_with_loss(float("nan"))], 1)
    with pytest.raises(VerificationError, match="rank 1 has losses"):
        join_runs([run_with_loss(float("nan")), run_with_loss(1.0)], 1)
    assert compare(run_with_loss(1.0), joined, 2).loss_error == float("inf")


class LogarithmOfMean(nn.Module):
    """NaN where the mean is negative."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.scale).mean().log()


def test_a_model_whose_loss_is_nan_on_one_device_is_refused_with_its_loss():
    model, inputs = LogarithmOfMean(), {"x": -torch.ones(8, 8)}
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=("data=2",))
    with pytest.raises(VerificationError, match="on one device the loss of step 0 is nan"):
        autopar.verify(model, plan, inputs)


def test_a_part_of_the_batch_whose_loss_is_nan_is_not_the_one_to_verify_with():
    model, inputs = LogarithmOfMean(), {"x": torch.linspace(-1, 3, 8)[:, None].expand(8, 8).contiguous()}
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=("data=2",))
    assert autopar.verify(model, plan, inputs).loss_error < 1e-12


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


class WithoutEntries(nn.Module):
    """Has a parameter without entries, as models have whose number of extra tokens may be 0."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(0, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        tokens = self.tokens.expand(len(x), 0, 8)
        return self.linear(torch.cat((tokens, x), 1)).square().mean()


def test_a_parameter_without_entries_has_no_gradient_to_compare():
    model, inputs = WithoutEntries(), {"x": torch.randn(4, 6, 8)}
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=("data=2",))
    report = autopar.verify(model, plan, inputs)
    assert report.gradient_errors.keys() == {"linear.weight", "linear.bias"}
    assert max(report.gradient_errors.values()) < 1e-12


def test_masks_of_minus_infinity_hide_no_other_error() -> None:
    def run(average: float) -> Run:
        mask = torch.full((2, 2), -torch.inf).triu(1)
        return Run((1.0,), {}, {}, {"mask": mask, "average": torch.tensor([average])})

    assert compare(run(1.0), run(1.0), 2).parameter_error == 0.0
    assert compare(run(1.0), run(1.5), 2).parameter_error == 0.5
