"""What is written in place to one of two tensors that share memory is read in the other one, or refused."""

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace
from tests.trace.interpreter import interpret

ROWS, WIDTH = 4, 8


class _Dropped(nn.Module):
    """Something is added in place to what dropout gives, or to what it was given."""

    def __init__(self, dropout, *, is_operand: bool) -> None:
        super().__init__()
        self.first, self.dropout, self.is_operand = nn.Linear(WIDTH, WIDTH), dropout, is_operand

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 2
        dropped = self.dropout(h)
        written = h if self.is_operand else dropped
        written += x
        return (h.sin() + dropped.cos()).sum()


@pytest.mark.parametrize("is_operand", [False, True])
@pytest.mark.parametrize("dropout", [
    nn.Dropout(0.0), nn.Dropout(0.5).eval(), lambda h: torch.dropout(h, 0.5, False), nn.AlphaDropout(0.5).eval(),
])  # fmt: skip
def test_dropout_that_drops_nothing_gives_its_input(dropout, is_operand):
    torch.manual_seed(0)
    model, x = _Dropped(dropout, is_operand=is_operand), torch.randn(ROWS, WIDTH)
    model.train(False)
    if isinstance(dropout, nn.Dropout) and not dropout.p:
        dropout.train()
    (found,), _ = interpret(trace(model, (x,), {}), model, [x])
    assert torch.equal(found, model(x))


class _Turned(nn.Module):
    """Something is written to a transposed view that einsum gives, or to what it is a view of."""

    def __init__(self, written: str, *, reads_both: bool) -> None:
        super().__init__()
        self.written, self.reads_both = written, reads_both

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        turned = torch.einsum("ij->ji", h)
        one, other = (h, turned) if self.written == "operand" else (turned, h)
        one += 1
        return one.sin().sum() + (other.cos().sum() if self.reads_both else 0)


@pytest.mark.parametrize("written", ["operand", "view"])
def test_views_that_an_export_does_not_know_are_refused(written):
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(TraceError, match=r"test_hidden_views.py:\d+: .*so that both change"):
        trace(_Turned(written, reads_both=True), (x,), {})
    model = _Turned(written, reads_both=False)
    (found,), _ = interpret(trace(model, (x,), {}), model, [x])
    assert torch.equal(found, model(x))
