"""What a layer reads enters its graph without the memory of the value, unless an op saves it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.lower.autograd import enter_graph, on_gradient, run_backward

SHAPE = (4, 8)


def entered() -> tuple[Tensor, Tensor, weakref.ref[Any]]:
    """What enters a graph, the leaf where its gradient arrives, and the memory of its values."""
    x = torch.randn(SHAPE)
    leaf = torch.empty(()).expand(SHAPE).requires_grad_()
    return enter_graph(x, leaf), leaf, weakref.ref(x.untyped_storage())


def test_memory_that_no_op_saves_is_freed_before_backward() -> None:
    read, leaf, memory = entered()
    loss = (2 * read).sum()
    del read
    assert memory() is None
    run_backward(loss)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.full(SHAPE, 2.0))


def test_memory_that_an_op_saves_stays() -> None:
    read, leaf, memory = entered()
    expected = read.detach().cos()
    loss = read.sin().sum()
    del read
    assert memory() is not None
    run_backward(loss)
    torch.testing.assert_close(leaf.grad, expected)


def test_a_gradient_that_is_a_slice_arrives_before_the_rest_of_the_layer_runs() -> None:
    skip, leaf, _ = entered()
    deep = torch.randn(SHAPE, requires_grad=True)
    order: list[str] = []
    untyped: Any = leaf
    untyped.register_post_accumulate_grad_hook(partial(_note, order, "skip"))
    below = deep.sin()
    on_gradient(below, partial(_note, order, "deep"))
    joined = torch.cat([below.cos(), skip], dim=1)
    del skip
    run_backward(joined.square().sum())
    assert order == ["skip", "deep"]
    assert leaf.grad is not None
    assert leaf.grad.untyped_storage().nbytes() == 4 * 8 * 4  # its own, not the gradient that it was sliced from


def _note(order: list[str], name: str, of: Tensor) -> None:
    order.append(name)
