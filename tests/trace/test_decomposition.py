"""Decomposing one op of each kind gives the program that decomposing all of it gives."""

import pytest
from torch import nn

from autopar.trace import decomposition, torch_internals, trace
from tests import models


class Shifted(nn.Module):
    """What it computes depends on the types of literals, and on strides."""

    def forward(self, x):
        """A number from [batch, width]."""
        for number in (1, 1.0, True, 2, 2.0, False, 0.0):
            x = (x + number).t().reshape(x.shape) + (x * number).reshape(-1).reshape(x.shape)
        return x.sum()


@pytest.mark.parametrize("name", ["llama", "deep_gpt2", "deep_vit"])
def test_ops_of_one_kind_become_the_same(name, monkeypatch):
    model, inputs = models.make(name)
    sizes = []
    whole = torch_internals.run_decompositions
    monkeypatch.setattr(
        torch_internals, "run_decompositions", lambda each: sizes.append(len(each.graph.nodes)) or whole(each)
    )
    by_kind = trace(model, (), inputs).program
    monkeypatch.setattr(decomposition, "_kinds", lambda exported: {})
    at_once = trace(model, (), inputs).program
    assert sizes[0] < sizes[1]
    assert by_kind == at_once


def test_kinds_tell_literals_and_strides_apart(monkeypatch):
    x = models.tokens(4, 4, 8).double()
    by_kind = trace(Shifted(), (x,), {}).program
    monkeypatch.setattr(decomposition, "_kinds", lambda exported: {})
    assert by_kind == trace(Shifted(), (x,), {}).program
