"""Recurrent modules on packed sequences train as on one device, and may split their batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from autopar.errors import ExampleInputsError, TraceError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.trace import trace
from tests.lower.runs import build
from tests.random_plans import random_plan
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone

MODULES = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


class Tagger(nn.Module):
    """Rows to a class each and to a tag for each token; tags of -1 don't count."""

    def __init__(self, kind: str, rows_at: int = 0, is_sorted: bool = False, **how: Any) -> None:
        super().__init__()
        more: dict[str, Any] = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
        self.rnn = MODULES[kind](6, 5, batch_first=rows_at == 0, bidirectional=True, **more, **how)
        self.tag, self.head = nn.Linear(self.rnn(torch.zeros(1, 1, 6))[0].shape[-1], 3), nn.LazyLinear(4)
        self.rows_at, self.is_sorted, self.kind = rows_at, is_sorted, kind

    def forward(self, x: Tensor, lengths: Tensor, tags: Tensor, classes: Tensor) -> Tensor:
        """[rows, tokens, 6], [rows], [rows, tokens], [rows] -> a scalar."""
        x = x if self.rows_at == 0 else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), self.rows_at == 0, enforce_sorted=self.is_sorted)
        given, final = self.rnn(packed)
        padded, again = pad_packed_sequence(given, batch_first=True)
        final = final[0] if self.kind == "lstm" else final
        logits = self.head(torch.cat([final[-2], final[-1]], -1))
        of_tokens = functional.cross_entropy(
            self.tag(padded).flatten(0, 1), tags[:, : padded.shape[1]].flatten(), ignore_index=-1, reduction="sum"
        )
        return of_tokens / again.sum() + functional.cross_entropy(logits, classes)


@cache
def subject_of(kind: str, rows_at: int = 0, is_sorted: bool = False, layers: int = 1, width: int = 0) -> Subject:
    torch.manual_seed(0)
    how = {"num_layers": layers} | ({"proj_size": width} if width else {})
    lengths = torch.tensor([6, 4, 3, 1] if is_sorted else [2, 6, 1, 4])
    tags = torch.randint(0, 3, (4, 7)).masked_fill(torch.arange(7) >= lengths[:, None], -1)
    inputs = {
        "x": torch.randn(4, 7, 6).double(),
        "lengths": lengths,
        "tags": tags,
        "classes": torch.tensor([0, 3, 1, 2]),
    }
    model = Tagger(kind, rows_at, is_sorted, **how)
    model.head(torch.zeros(1, 2 * (width or 5)))
    return trained_alone(model.double(), inputs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "call",
    [("lstm", 0, False, 2), ("lstm", 1, True), ("lstm", 0, False, 1, 2), ("gru", 0, True), ("tanh",), ("relu", 1)],
)
def test_it_trains_as_on_one_device(call: tuple[Any, ...]) -> None:
    who = subject_of(*call)
    ops = [op for layer in who.traced.program.layers for op in layer.ops if ".packed_" in op.target]
    assert [{option.factor for option in op.options} >= {"b"} for op in ops] == [True]
    for constraint in ("data=2", "microbatches=2"):
        assert_parity(who, forced_plan(who.traced.program, 2, constraint))
    assert_parity(who, random_plan(who.traced.program, 4, seed=1))


class Packs(nn.Module):
    """Does with a packed sequence what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gru = how, nn.GRU(3, 3, batch_first=True, num_layers=2, dropout=0.5 * (how == "dropout"))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[rows, tokens, 3], [rows] -> a scalar."""
        if self.how == "listed":
            return pad_packed_sequence(self.gru(pack_sequence([x[0], x[1, :2]]))[0])[0].sum()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        if self.how == "data":
            return functional.dropout(packed.data).sum()
        if self.how == "sizes":
            return x.sum() * packed.batch_sizes[1]
        if self.how == "filled":
            return pad_packed_sequence(packed, padding_value=-2.0, total_length=9)[0].sum()
        if self.how == "short":
            return pad_packed_sequence(packed, total_length=3)[0].sum()
        given, final = self.gru(packed, x[:2, 0].expand(2, 2, 3).contiguous())
        return pad_packed_sequence(given, total_length=5)[0].sum() + final.sum()


class Summing(nn.Module):
    """States [layers, batch, hidden] that are larger than the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True, num_layers=4)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, 3] -> a scalar."""
        given, (final, _) = self.rnn(x)
        return given.sum() + final.sum()


def test_states_do_not_hide_that_the_batch_is_split() -> None:
    program = trace(Summing(), (torch.rand(8, 2, 3),), {}).program
    plan = forced_plan(program, 2, "data=2")
    assert {label for strategy in plan.strategies for label in strategy.labels} == {"data"}


X = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("how", ["listed", "filled", "given states"])
def test_what_is_packed_and_padded_in_other_ways(how: str) -> None:
    who = trained_alone(Packs(how).double(), {"x": X.clone().requires_grad_(), "lengths": torch.tensor([2, 3])})
    assert_parity(who, forced_plan(who.traced.program, 2, "zero=3"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("data", r"forward uses a packed sequence in dropout\(\), whose size depends on lengths"),
        ("sizes", "forward reads batch_sizes of a packed sequence, whose size depends on lengths"),
        ("dropout", "dropout=0.5 between the layers .* draws numbers in an order that depends on lengths"),
    ],
)
def test_what_depends_on_lengths_is_refused(how: str, message: str) -> None:
    with pytest.raises(TraceError, match=rf"test_packed_sequences.py:\d+: {message}"):
        trace(Packs(how), (X.float(), torch.tensor([2, 3])), {})


def test_a_total_length_that_is_too_short_is_an_error_as_in_torch() -> None:
    trace(Packs("short"), (X.float(), torch.tensor([2, 3])), {})
    with pytest.raises(ExampleInputsError, match="total_length=3 is less than the longest sequence, 4"):
        trace(Packs("short"), (X.float(), torch.tensor([4, 3])), {})


def test_functions_that_pack_are_torchs_own_after_a_trace() -> None:
    trace(Packs("listed"), (X.float(), torch.tensor([2, 3])), {})
    packed = pack_padded_sequence(X, torch.tensor([4, 2]), batch_first=True)
    assert packed.batch_sizes.tolist() == [2, 2, 1, 1]
    assert pad_packed_sequence(packed, batch_first=True)[0].equal(
        X * (torch.arange(4) < torch.tensor([[4], [2]]))[..., None]
    )


class LastStep(nn.Module):
    """Rows to the final state of each; lengths are for packing alone."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.cell(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1].square().mean()


def test_lengths_may_stay_on_the_host() -> None:
    inputs = {"x": torch.randn(4, 6, 4), "lengths": torch.tensor([6, 2, 5, 3])}
    model = LastStep()
    traced = trace(model, (), inputs)
    (executor,) = simulate(1, lambda c: build(model, traced, forced_plan(traced.program, 1), c)._executor)
    assert executor.inputs_on_host == {"lengths"}
