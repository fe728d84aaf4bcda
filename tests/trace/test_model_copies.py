"""A copy of a model is whole: none of its attributes comes back to the original."""

from __future__ import annotations

from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.objects.references import redirect, refers
from autopar.trace.module_attributes.model_copies import own_copy


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def wrap_forward(model: Any) -> None:
    """As packages put their own forward in the place of a model's."""
    original = model.forward

    @wraps(type(model).forward)
    def forward(self: Any, x: Tensor, *, doubled: bool = False) -> Tensor:
        return 2 * self.up(x) if doubled else original(x)

    model.forward = MethodType(forward, model)


def wrap_in_function(model: Any) -> None:
    original = model.forward
    model.forward = lambda x: original(x)


def wrap_twice(model: Any) -> None:
    wrap_forward(model)
    wrap_in_function(model)


def wrap_in_partial(model: Any) -> None:
    model.forward = partial(type(model).forward, model)


def wrap_in_list(model: Any) -> None:
    functions = [lambda x: model.up(x)]
    model.functions = functions
    model.forward = MethodType(lambda self, x: self.functions[0](x), model)


@pytest.mark.parametrize("wrap", [wrap_forward, wrap_in_function, wrap_twice, wrap_in_partial, wrap_in_list])
def test_a_forward_that_wraps_another_one_runs_the_copys(wrap: Any) -> None:
    model, x = Linear(), torch.ones(2, 4)
    wrap(model)
    made, expected = own_copy(model), model(x)
    with torch.no_grad():
        model.up.weight.zero_()
    assert torch.equal(made(x), expected)
    assert not torch.equal(model(x), expected)


def test_functions_that_enclose_each_other_and_what_they_share_are_copied_once() -> None:
    old, new = object(), object()
    count = 0

    def first(depth: int) -> tuple[Any, int]:
        nonlocal count
        count += 1
        return second(depth - 1) if depth else (old, count)

    def second(depth: int) -> tuple[Any, int]:
        return first(depth)

    ids = {id(old): new}
    a, b = redirect([first, second], ids)
    assert a(3) == (new, 4)
    assert b(0) == (new, 5)  # the count is one of both, and of the originals
    assert first(0) == (old, 6)
    assert not refers([wrap_forward, len, {"a": (1, [2])}], ids)
    assert redirect(wrap_forward, ids) is wrap_forward


class Tapped(Linear):
    def tap(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen = output

    def forward(self, x: Tensor) -> Tensor:
        self.up(x)
        return self.seen


@pytest.mark.parametrize("was_called", [False, True])
def test_hooks_of_the_copy_keep_values_in_the_copy(was_called: bool) -> None:
    model, x = Tapped(), torch.ones(2, 4)
    model.up.register_forward_hook(model.tap)
    if was_called:
        model(x)  # its output, which has a graph, can't be deep-copied
    copied = own_copy(model)
    copied.up.weight.data.zero_()
    before = getattr(model, "seen", None)
    assert torch.equal(copied(x), copied.up.bias.expand(2, 4))
    assert getattr(model, "seen", None) is before
    copied.up.register_forward_hook(lambda *_: None)
    hooks: Any = vars(model.up)["_forward_hooks"]
    assert len(hooks) == 1
