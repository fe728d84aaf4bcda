"""Copying the ops of calls that repeat gives the program that tracing all of them gives."""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.trace import Traced, trace
from autopar.trace.compat import export_shortcuts
from autopar.trace.export import capture, repeated_calls
from autopar.trace.module_attributes import attribute_reads
from tests import models


def both(model: nn.Module, args, kwargs, monkeypatch, **how) -> tuple[Traced, Traced, int]:
    """A model traced with copies and without, and how many calls were copied."""
    count = 0
    repeat = repeated_calls._repeat

    def counted(*call):
        nonlocal count
        count += 1
        return repeat(*call)

    with monkeypatch.context() as patches:
        patches.setattr(repeated_calls, "_repeat", counted)
        copied = trace(model, args, kwargs, **how)
    with monkeypatch.context() as patches:
        patches.setattr(capture, "RepeatedCalls", contextlib.nullcontext)
        whole = trace(model, args, kwargs, **how)
    return copied, whole, count


def assert_same(copied: Traced, whole: Traced) -> None:
    assert copied.program == whole.program
    assert list(copied.program.values) == list(whole.program.values)
    assert copied.constants.keys() == whole.constants.keys()
    for name, constant in copied.constants.items():
        assert torch.equal(constant, whole.constants[name])


def halved(inputs):
    return {name: x[: len(x) // 2] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


SLOW = ("deep_bert", "deep_t5", "mixtral")


@pytest.mark.parametrize(
    "name",
    ["deep_gpt2", "unet", "deep_half_frozen", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_every_model_traces_the_same(name, monkeypatch):
    model, inputs = models.make(name)
    copied, whole, count = both(model, (), inputs, monkeypatch)
    assert count > 20 or not name.startswith("deep")
    assert_same(copied, whole)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("deep_llama", True),
        ("deep_batch_normed", False),
    ],
)
def test_another_shape_and_dtype_trace_the_same(name, training, monkeypatch):
    model, inputs = models.make(name)
    copied, whole, _ = both(model, (), halved(inputs), monkeypatch, training=training, dtype=torch.bfloat16)
    assert_same(copied, whole)


SEEN: list[torch.Tensor] = []


class Block(nn.Module):
    """One of several that are alike but for `index`; `rule` is what it computes."""

    def __init__(self, rule, index):
        super().__init__()
        self.rule, self.index, self.calls = rule, index, 0
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        """[batch, 8] of [batch, 8]."""
        self.calls += 1
        return self.rule(self, self.linear(x))


class Blocks(nn.Module):
    """Three blocks, the last of which runs twice."""

    def __init__(self, rule):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rule, index) for index in range(3))

    def forward(self, x):
        """A number from [batch, 8]."""
        SEEN.clear()
        for block in self.blocks:
            block.calls = 0
        for block in (*self.blocks, self.blocks[2]):
            x = block(x)
        return x.sum() + sum(each.sum() for each in SEEN)


class Doubled(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def differs_by_attribute(block, x):
    return x * block.index + (x.relu() if block.index % 2 else x.sigmoid())


def differs_by_kind_of_number(block, x):
    return x + (1, 1.0, True, -0.0)[block.index] + torch.full((8,), (0.0, -0.0, 0, False)[block.index])


def counts_its_calls(block, x):
    return x / block.calls


def appends_to_a_list(block, x):
    y = x.tanh()
    SEEN.append(y)
    return y + (SEEN[-2] if len(SEEN) > 2 else 0)


def writes_to_results(block, x):
    y = x.relu()
    half = y[:, :4]
    y += 1
    half.mul_(2)
    y[:, 0] = half[:, 1]
    return y + half.sum()


def writes_a_gradient_into_zeros(block, x):
    y = torch.zeros(8, 8)
    y[:, :4].copy_(x[:, 2:6])
    y.transpose(0, 1)[1].add_(x[0])
    return Doubled.apply(y) if y.requires_grad else y * 0


def asks_for_gradients(block, x):
    def exp(y):
        return y.exp()

    with torch.no_grad():
        first = exp(x)
    second, third = exp(x), exp(x.detach())
    answers = first.requires_grad, second.requires_grad, third.requires_grad, second.is_leaf
    return (first + second + third) * (2 if answers == (False, True, False, False) else 3)


def has_a_gradient_of_its_own(block, x):
    return Doubled.apply(x.cos()) + Doubled.apply(x.cos())


def writes_to_buffers(block, x):
    block.seen += x.detach().mean()
    return block.norm(x) * block.seen


def draws_numbers(block, x):
    return nn.functional.dropout(x, 0.5) + torch.rand(8, 8) + torch.rand_like(x).clone()


def gives_several(block, x):
    a, b = x.chunk(2, dim=1)
    values, places = x.topk(3, dim=-1)
    _, mean = torch.var_mean(x, dim=-1, keepdim=True)
    first, *_ = x.unbind(1)
    most = x.max(dim=1)
    return torch.cat([b, a], 1) * mean + values.sum() + places.sum() + first[:, None] + most.values[:, None]


def reads_one_or_two(block, x):
    y = x.exp()
    return (x * y if block.index % 2 else x * x) + torch.stack([x, y, x] if block.index % 2 else [x, x, y]).sum(0)


def makes_constants(block, x):
    return x * torch.tensor([float(block.index)] * 8) + torch.tensor([]).sum() + x[torch.tensor(block.index)]


def strides_and_complex_numbers(block, x):
    x = x.t() if block.index % 2 else x
    turned = torch.view_as_complex(x.reshape(8, 4, 2).contiguous()) * torch.polar(torch.ones(4), torch.arange(4.0))
    return (
        torch.view_as_real(turned.conj().resolve_conj()).flatten(1)
        + turned.imag.exp().repeat(1, 2)
        + x.exp().reshape(-1).view(8, 8)
    )


def maps_over_rows(block, x):
    return torch.vmap(torch.exp)(x) + torch.exp(x)


def lower_precision(block, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(block.index % 2)):
        y = x @ x
    return y.float() + (x @ x).float()


def checkpoints(block, x):
    return torch.utils.checkpoint.checkpoint(lambda y: y.exp().sin(), x, use_reentrant=bool(block.index % 2))


@pytest.mark.slow_after(10)
@pytest.mark.parametrize(
    "rule",
    [
        differs_by_attribute, differs_by_kind_of_number, counts_its_calls, appends_to_a_list, writes_to_results,
        writes_a_gradient_into_zeros, asks_for_gradients, has_a_gradient_of_its_own, writes_to_buffers, draws_numbers,
        gives_several, reads_one_or_two, makes_constants, strides_and_complex_numbers, maps_over_rows, lower_precision,
        checkpoints,
    ],
)  # fmt: skip
def test_blocks_that_are_not_quite_alike(rule, monkeypatch):
    copied, whole, count = both(Blocks(rule), (torch.randn(8, 8, requires_grad=True),), {}, monkeypatch)
    assert count > 3
    assert_same(copied, whole)


class Regions(nn.Module):
    """Regions without gradients, one of them with a region with gradients inside, and empty tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x)
        for _ in range(3):
            with torch.no_grad():
                still = y * 2 + self.linear.weight.sum(0)
                self.count.add_(still.sum(0))
                with torch.enable_grad():
                    again = self.linear(still.sin())
                still = still + again
            y = torch.cat((torch.tensor([]), y * still + again)) + self.count
        return y


def test_regions_without_gradients_are_those_that_export_cuts_out(monkeypatch):
    model, x = Regions(), torch.randn(4, 8)
    kept, traced_all, _ = both(model, (x,), {}, monkeypatch)
    with monkeypatch.context() as patches:
        patches.setattr(export_shortcuts, "kept_regions", contextlib.nullcontext)
        patches.setattr(export_shortcuts, "known_sizes", contextlib.nullcontext)
        patches.setattr(export_shortcuts, "known_paths", contextlib.nullcontext)
        cut = trace(model, (x,), {})
    assert_same(kept, traced_all)
    assert_same(kept, cut)
    assert {op.target for layer in cut.program.layers for op in layer.ops} >= {"aten.detach.default"}


class Narrowing(nn.Module):
    """Every call has a shape of its own."""

    def forward(self, x):
        for _ in range(8):
            x = x.sin()[:, 1:].reshape(3, -1)
        return torch.nn.functional.linear(x, x)


def test_torch_keeps_nothing_of_calls_that_are_made_once(monkeypatch):
    kept = []
    keep = FakeTensorMode._make_cache_entry
    monkeypatch.setattr(FakeTensorMode, "cache", {})
    monkeypatch.setattr(FakeTensorMode, "_make_cache_entry", lambda *call: kept.append(str(call[3])) or keep(*call))
    trace(Narrowing(), (torch.randn(3, 12),), {})
    assert not kept


class Reading(nn.Module):
    """Reads an attribute over and over."""

    def __init__(self):
        super().__init__()
        self.scale = 0.5

    def forward(self, x):
        for _ in range(20):
            x = x * self.scale
        return x


def test_an_attribute_that_is_known_to_be_read_is_not_looked_at_again(monkeypatch):
    looked_at = 0
    is_plain = attribute_reads.is_plain

    def counted(value):
        nonlocal looked_at
        looked_at += value == 0.5
        return is_plain(value)

    monkeypatch.setattr(attribute_reads, "is_plain", counted)
    traced = trace(Reading(), (torch.randn(3, 12),), {})
    assert ("", "scale") in traced.reads
    assert looked_at == 1
