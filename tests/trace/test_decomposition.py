"""Decomposing one op of each kind gives the program that decomposing all of it gives."""

import pytest
import torch
from torch import fx, nn

from autopar.trace import trace
from autopar.trace.compat import torch_internals
from autopar.trace.export import decomposition
from tests import models
from tests.ops.samples import all_samples


class Shifted(nn.Module):
    """What it computes depends on the types of literals, and on strides."""

    def forward(self, x):
        """A number from [batch, width]."""
        for number in (1, 1.0, True, 2, 2.0, False, 0.0):
            x = (x + number).t().reshape(x.shape) + (x * number).reshape(-1).reshape(x.shape)
        return x.sum()


@pytest.mark.slow
def test_ops_of_one_kind_become_the_same(monkeypatch):
    models.skip_before_transformers_5("masks are made by vmap, and such programs are decomposed as a whole")
    model, inputs = models.make_gpt2(layers=4)
    sizes = []
    whole = torch_internals.run_decompositions
    monkeypatch.setattr(
        torch_internals, "run_decompositions", lambda each: sizes.append(len(each.graph.nodes)) or whole(each)
    )
    by_kind = trace(model, (), inputs).program
    assert not sizes  # its views and copies are known without torch's decompositions
    monkeypatch.setattr(decomposition, "_at_once", lambda kind: None)
    one_of_each = trace(model, (), inputs).program
    monkeypatch.setattr(decomposition, "_units", lambda exported: {})
    at_once = trace(model, (), inputs).program
    assert sizes[0] < sizes[1]
    assert by_kind == one_of_each == at_once


def test_kinds_tell_literals_and_strides_apart(monkeypatch):
    x = models.tokens(4, 4, 8).double()
    by_kind = trace(Shifted(), (x,), {}).program
    monkeypatch.setattr(decomposition, "_units", lambda exported: {})
    assert by_kind == trace(Shifted(), (x,), {}).program


class Viewed(nn.Module):
    """Views that torch keeps, and those that it makes of others."""

    def forward(self, x, y):
        """A number from [4, 6] and [4, 1, 6]."""
        first, second = x.chunk(2, -1)
        (whole,), (small, rest) = y.chunk(1), y.split_with_sizes([2, 4], -1)
        x = x.t() + x.T.narrow(0, 0, 6) + x.mT + x.swapaxes(0, 1) + torch.movedim(x, 0, 1) + whole.squeeze(1).T
        x = x[:, :1].expand_as(x) * x.unflatten(0, (2, -1)).reshape_as(x).view_as(x)
        parts = torch.view_as_real(torch.view_as_complex(rest.unflatten(-1, (2, 2)))).squeeze().squeeze(0)
        return x.sum() + (first * second).sum() + small.sum() + parts.exp().sum()


def test_views_are_what_torch_makes_of_them(monkeypatch):
    x, sizes = torch.randn(4, 6), []
    whole = torch_internals.run_decompositions
    monkeypatch.setattr(torch_internals, "run_decompositions", lambda each: sizes.append(1) or whole(each))
    by_kind = trace(Viewed(), (x, x[:, None]), {}).program
    assert not sizes
    monkeypatch.setattr(decomposition, "_units", lambda exported: {})
    assert by_kind == trace(Viewed(), (x, x[:, None]), {}).program
    assert sizes


class Filled(nn.Module):
    """Tensors that are made and written to, as they are and through views; or through one of several, or through what
    a composite op gives of another tensor's memory.
    """

    def __init__(self, writes_to):
        super().__init__()
        self.writes_to = writes_to

    def forward(self, x):
        """A number from [batch, width]."""
        for _ in range(6):
            order = x.sum(1).argsort()
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order))
            halves = x.new_zeros(x.shape)
            halves[:, : x.shape[1] // 2] = x[order, : x.shape[1] // 2].sin()
            halves[:, x.shape[1] // 2 :].mul_(2).add_(1)
            shares = x.exp()
            shares /= shares.reshape(-1).sum() + 1
            mixed = nn.functional.linear(x[None], x)[0]
            mixed += shares.sin()
            top, places = x.topk(2)  # a result among several
            top /= top.sum(-1, keepdim=True) + 1
            x = halves[inverse] + x.cos() + shares + mixed.sum() + top[places.argsort(0)].sum()
        seen = (x * 3).reshape(-1)
        before = seen.sum()
        seen.add_(1)
        first, second = (x * 2).chunk(2)
        if self.writes_to == "part":
            first.add_(1)
        doubled = x * 2
        turned = nn.functional.alpha_dropout(doubled, training=False)
        if self.writes_to == "memory of another":
            turned += 1
            return before + seen.prod() + (first * second).sum() + doubled.prod()
        return before + seen.prod() + (first * second).sum()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("writes_to", ["own", "part", "memory of another"])
def test_ops_that_write_to_a_tensor_of_their_own_are_decomposed_together(writes_to, monkeypatch):
    x, sizes = models.tokens(4, 4, 8).double(), []
    whole = torch_internals.run_decompositions
    monkeypatch.setattr(
        torch_internals, "run_decompositions", lambda each: sizes.append(len(each.graph.nodes)) or whole(each)
    )
    by_unit = trace(Filled(writes_to), (x,), {}).program
    monkeypatch.setattr(decomposition, "_units", lambda exported: {})
    at_once = trace(Filled(writes_to), (x,), {}).program
    numbers = {}
    assert computed(by_unit, numbers) == computed(at_once, numbers)
    one_of_each = len(sizes) == 2 and sizes[0] < sizes[1]
    assert one_of_each == (writes_to == "own"), "of other results only torch knows what they share"


def computed(program, numbers):
    """The number of what `program` returns; calls of one op on the same values have one number in `numbers`."""
    known = {name: name for name in (*program.inputs, *(name for layer in program.layers for name in layer.state))}
    for op in (op for layer in program.layers for op in layer.ops):
        call = (op.target, repr(op.reading(known).args), repr(op.kwargs))
        known |= {name: f"v{numbers.setdefault((call, place), len(numbers))}" for place, name in enumerate(op.results)}
    return [known[name] for name in program.outputs]


class Calls(nn.Module):
    """Every sample of an op that stays."""

    def __init__(self):
        super().__init__()
        # Ops of torch alone: those of packages are there or not by what other tests have imported.
        ops = [
            (torch_internals.overload(each.target), each) for each in all_samples() if each.target.startswith("aten.")
        ]
        self.calls = [
            (op, *torch_internals.flatten((each.args, each.kwargs)))
            for op, each in ops
            if op is not None and not torch_internals.writes(op) and torch_internals.stays(op)
        ]

    @property
    def tensors(self):
        return [x for _, leaves, _ in self.calls for x in leaves if isinstance(x, torch.Tensor)]

    def forward(self, *tensors):
        """Of `tensors`, in the order of the calls."""
        rest = iter(tensors)
        results = []
        for op, leaves, structure in self.calls:
            given = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = torch_internals.unflatten(given, structure)
            results += torch_internals.flatten(op(*args, **kwargs))[0]
        return [x for x in results if isinstance(x, torch.Tensor)]


@pytest.mark.slow
def test_ops_that_stay_are_left_as_they_are_by_torch():
    calls = Calls()
    nodes = torch.export.export(calls, tuple(calls.tensors), strict=False).graph.nodes
    kinds = {
        node.name: decomposition._Unit((node,))
        for node in nodes
        if decomposition._is_op(node) and decomposition._is_plain(node) and torch_internals.stays(node.target)
    }
    assert len({kind.nodes[0].target for kind in kinds.values()}) > 150
    bodies = decomposition._decompose_kinds(kinds)
    assert bodies is not None
    for key, kind in kinds.items():
        assert written(decomposition._as_it_is(kind)) == written(bodies[key])


def written(body):
    """A body as text: targets, arguments, and types of results."""
    numbers = {node: slice(place) for place, node in enumerate((*body.operands, *body.nodes))}
    types = [(tuple(x.meta["val"].shape), x.meta["val"].stride(), x.meta["val"].dtype) for x in body.results]
    lines = [(node.target, *fx.map_arg((node.args, node.kwargs), numbers.__getitem__)) for node in body.nodes]
    return repr((lines, types))
