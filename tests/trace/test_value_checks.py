"""Checks of values that do nothing but raise are left out, with notes; what more depends on stays an error."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from autopar.errors import ExampleInputsError, TraceError
from autopar.trace import trace

X, Y = torch.randn(6, 8), torch.randint(4, (6,))


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)


class Checking(Classes):
    def forward(self, x, labels=None):
        if labels is not None and labels.max() >= 4:
            raise ValueError(f"too large: {labels.max()}")
        assert (x > -100).all(), "too small"
        if not (x.abs().max() < 1e6 or x.isnan().any()):
            raise ValueError
        assert x.max().item() <= 5000
        torch._assert(x.min() > -1000, "too small")
        if x.ndim == 1:
            x = x[None]
        elif not torch.isfinite(x).all():
            raise ValueError
        torch._check(bool((x < 1e4).all()), lambda: "too large")
        torch._assert(bool((x < 1e4).any()), "too large")
        torch._assert_async((x < 1e4).all(), "too large")
        return F.cross_entropy(self.linear(x), labels)


def test_checks_are_left_out_with_a_note_for_each():
    traced = trace(Checking(), (X, Y), {})
    first = next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "4:" in line)
    lines = [int(note.split(":")[1]) for note in traced.program.notes if "this check of values is left out" in note]
    assert lines == [first + offset for offset in (0, 2, 3, 5, 6, 9, 11, 12, 13)]
    targets = [op.target for layer in traced.program.layers for op in layer.ops]
    assert not any("max" in target or "isfinite" in target for target in targets), targets


class Scaled(Classes):
    def forward(self, x):
        if x.max() > 4:
            x = x / x.max()
        return self.linear(x).sum()


class CheckingOneOrTheOther(Classes):
    def forward(self, x):
        if x.max() > 4:
            raise ValueError
        y = x if x.sum() > 0 else -x
        return self.linear(y).sum()


@pytest.mark.parametrize("model", [Scaled(), CheckingOneOrTheOther()])
def test_what_more_depends_on_is_refused(model):
    with pytest.raises(TraceError, match="so the model is not one graph"):
        trace(model, (X,), {})


class CheckingShapes(Classes):
    def forward(self, x):
        assert x.shape[1] == 9, "wrong width"
        return self.linear(x).sum()


def test_a_check_of_what_is_known_still_raises():
    with pytest.raises(ExampleInputsError, match="wrong width"):
        trace(CheckingShapes(), (X,), {})
