"""Programs that a buffer decides on are verified in all of the ways that calls take."""

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import VerificationError
from autopar.lower.run.buffer_answers import BufferAnswers
from autopar.verify import VerificationReport


class _Warmed(nn.Module):
    """Takes another way in its third step, and one of its own in evaluation."""

    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h / 2 if self.step.item() < 2 else h.tanh()
        if self.training:
            self.step += 1
        return (self.last(h) - x).square().mean()


def _report(constraint: str) -> VerificationReport:
    torch.manual_seed(0)
    model, x = _Warmed(), torch.randn(4, 8)
    plan = autopar.plan(model, autopar.Cluster.of("h100", devices_per_node=2), x, constraints=constraint)
    return autopar.verify(model, plan, x, steps=4)


@pytest.mark.parametrize("constraint", ["data=2", "tensor=2", "pipeline=2"])
def test_all_ways_are_those_of_one_device(constraint: str) -> None:
    report = _report(constraint)
    assert report.loss_error < 1e-14
    assert report.worst_gradient[1] < 1e-13
    assert report.parameter_error < 1e-13
    assert report.output_errors
    assert report.worst_output[1] < 1e-13


def test_a_way_that_is_not_taken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BufferAnswers, "are_known", lambda *_: True)
    with pytest.raises(VerificationError, match=r"loss within [1-9]"):
        _report("data=2")
