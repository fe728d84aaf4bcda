"""Checks of values that do nothing but raise are left out, with notes; what more depends on stays an error."""

import logging
import math
import warnings
from math import isfinite
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from autopar.errors import ExampleInputsError, TraceError
from autopar.trace import trace
from tests.trace.interpreter import check_equals_model, interpret

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
        y = self.linear(x)
        if y.max() > 4:
            y = y / y.max()
        return y.sum()


class CheckingOneOrTheOther(Classes):
    def forward(self, x):
        if x.max() > 4:
            raise ValueError
        y = self.linear(x)
        return (y if y.sum() > 0 else -y).sum()


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


class CheckingNumbers(Classes):
    def forward(self, x, labels=None):
        if int(labels.max()) >= 4:
            raise ValueError(f"label {int(labels.max())}, {float(x.max()):.1f}")
        low, top = float(x.min()), int(x.max())
        if not -100 <= low <= top < 1e6:
            raise ValueError(f"{low} to {top}")
        if math.isnan(low):
            raise ValueError(f"{low} to {top}")
        assert int(labels.min()) >= 0, f"label {int(labels.min())}"
        if x.isnan().any().item():
            raise ValueError
        if not torch.allclose(x, x.flip(0)) and torch.equal(x, -x):
            raise ValueError
        if not isfinite(x.sum().item()):
            raise ValueError
        if math.isinf(x.sum()) or math.isinf(top):
            raise ValueError
        self.largest = float(x.max())
        assert isinstance(self.scale, (int, float))
        assert float("inf") == float(10**400 if self.scale > 1 else "inf")
        return F.cross_entropy(self.linear(x) * float(self.scale) * int("1"), labels)


def test_checks_of_numbers_that_python_makes_are_left_out():
    plain = (int, float, math.isnan, isfinite)
    model = CheckingNumbers()
    model.scale = 0.5
    traced = trace(model, (X, Y), {})
    notes = [note for note in traced.program.notes if "this check of values is left out" in note]
    text = Path(__file__).read_text().split("class CheckingNumbers")[1].split("return")[0]
    assert len(notes) == text.count("        if ") + 1
    ops = [op.target for layer in traced.program.layers for op in layer.ops]
    assert ops == ["aten.linear.default", "aten.mul.Tensor", "aten.mul.Tensor", *ops[3:]]
    assert not any("max" in op or "isnan" in op or "item" in op for op in ops), ops
    assert plain == (int, float, math.isnan, isfinite)
    assert not {"int", "float"} & globals().keys()
    assert not traced.read_values  # the labels are others in every batch


class ComputingNumbers(Classes):
    def forward(self, x):
        return (self.linear(x) * float(x.max())).sum()


class CountingNumbers(Classes):
    def forward(self, x):
        size = int(x.sum())
        if size > 100:
            raise ValueError
        return self.linear(x[:size]).sum()


@pytest.mark.parametrize("model", [ComputingNumbers(), CountingNumbers()])
def test_numbers_that_are_computed_with_are_refused_where_they_are_made(model):
    with pytest.raises(TraceError, match="so the model is not one graph") as error:
        trace(model, (X,), {})
    line = int(str(error.value).split(":")[1])
    assert "(x." in Path(__file__).read_text().splitlines()[line - 1]


logger = logging.getLogger(__name__)


class Logging(Classes):
    def forward(self, x):
        if not torch.isfinite(x).all():
            print("not finite:", x.max().item(), f"{x.mean():.2f}")
        if x.isnan().any() and self.training:
            logger.warning("nan in %s rows of %s", int(x.isnan().any(-1).sum()), len(x))
            warnings.warn("nan: {}".format(torch.isnan(x).sum()), stacklevel=2)  # noqa: UP032
        return self.linear(x).sum()


def test_what_is_only_logged_is_left_out():
    traced = trace(Logging(), (X,), {})
    assert len([note for note in traced.program.notes if "this check of values is left out" in note]) == 2
    assert len([op for layer in traced.program.layers for op in layer.ops]) == 2


class Otherwise(Classes):
    def forward(self, x):
        y = self.linear(x)
        if y.isnan().any():
            print("nan")
        else:
            y = y * 2
        return y.sum()


class CountingWhatIsLogged(Classes):
    def forward(self, x):
        y = self.linear(x)
        if y.isnan().any():
            print(self.names.pop())
        return y.sum()


class LoggingAndMore(Classes):
    def forward(self, x):
        y = self.linear(x)
        if y.isnan().any():
            print("nan")
            y = y.nan_to_num()
        return y.sum()


@pytest.mark.parametrize("model", [Otherwise(), CountingWhatIsLogged(), LoggingAndMore()])
def test_branches_that_do_more_than_log_are_refused(model):
    model.names = ["a", "b"]
    with pytest.raises(TraceError, match="so the model is not one graph"):
        trace(model, (X,), {})


class Masked(Classes):
    """Asks before each write whether a mask is true anywhere."""

    def forward(self, x):
        y = self.linear(x) * 1
        small, large = y < -0.5, (y > 0.5).any(-1)
        if small.any():
            y[small] = float("-1")
            y = y.masked_fill(small, -2.0)
        if torch.any(large):
            y[:, 1:][large] = 0
            y[:, 0].masked_fill_(large, 3)
        return y.sin().sum()


@pytest.mark.parametrize("scale", [0.0, 5.0])
def test_writes_where_a_mask_is_true_need_no_question(scale):
    traced = check_equals_model(Masked(), {"x": X * scale})
    assert not any("left out" in note for note in traced.program.notes)


class OtherwiseMasked(Classes):
    def forward(self, x):
        y = self.linear(x)
        small = y < -0.5
        if small.any():
            y = y.masked_fill(small, 0.0) + 1
        return y.sum()


def test_what_more_than_a_mask_decides_stays_an_error():
    with pytest.raises(TraceError, match=r"test_value_checks\.py:\d+: .*value of a tensor"):
        trace(OtherwiseMasked(), (X,), {})


class Clamped(Classes):
    """Clamps what overflowed, as detectors of transformers do in training."""

    def forward(self, x):
        y = self.linear(x)
        if not torch.isfinite(y).all():
            clamp_value = torch.finfo(y.dtype).max - 1000
            y = torch.clamp(y, min=-clamp_value, max=clamp_value)
        z = y.atan() * y.exp()
        if torch.isinf(z).any():
            z = torch.clamp(z, min=-torch.finfo(z.dtype).max, max=torch.finfo(z.dtype).max)
        return z.tanh().sum()


def test_clamps_of_what_overflowed_need_no_question():
    model = Clamped()
    traced = check_equals_model(model, {"x": X})
    assert not any("left out" in note for note in traced.program.notes)
    x = X.double()
    x[2, 3] = math.inf
    (found,), _ = interpret(traced, model, [x])
    torch.testing.assert_close(found, model(x))


def test_clamps_that_finite_numbers_notice_stay_an_error():
    class Tight(Classes):
        def forward(self, x):
            y = self.linear(x)
            if not torch.isfinite(y).all():
                y = torch.clamp(y, min=-100.0, max=torch.finfo(y.dtype).max)
            return y.sum()

    for model in (Tight(), Clamped().half()):  # the largest number of float16 less 1000 is a smaller one
        with pytest.raises(TraceError, match=r"test_value_checks\.py:\d+: .*value of a tensor"):
            trace(model, (X.to(next(model.parameters()).dtype),), {})
