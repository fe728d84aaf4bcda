"""What a forward asks of its buffers in Python is answered in the trace, and noted for later calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.objects.buffer_questions import BufferQuestion
from autopar.trace import Traced, trace

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Asking(nn.Module):
    """Doubles its input where `is_doubled` says so."""

    asked: Tensor

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.most = 3
        self.register_buffer("asked", torch.as_tensor(value))

    def is_doubled(self) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(2 * x if self.is_doubled() else x)


class Flag(Asking):
    def is_doubled(self) -> bool:
        return not self.asked


class Item(Asking):
    def is_doubled(self) -> bool:
        return self.asked.item() < self.most


class Later(Asking):
    def is_doubled(self) -> bool:
        steps = int(self.asked)
        return 2 * steps + 1 < self.most


class Counter(Asking):
    """Asks what it has written itself, which follows from what was there."""

    def is_doubled(self) -> bool:
        self.asked += 1
        return bool(self.asked <= self.most)


class FloatCounter(Asking):
    def is_doubled(self) -> bool:
        self.asked.sub_(1.0)
        return self.asked.item() ** 2 > 1.5 or self.asked.item() > 100


class Replaced(Asking):
    def is_doubled(self) -> bool:
        was_set = bool(self.asked)
        self.asked = torch.ones_like(self.asked)
        return not was_set


class AnyEntry(Asking):
    def is_doubled(self) -> bool:
        return bool((self.asked < self.most).any())


class Schedule(Asking):
    def is_doubled(self) -> bool:
        return min(1.0, self.asked.item() / self.most) < 1.0


TRUTHS = [
    (Flag, False, True), (Flag, [0.0], [1.0]), (Flag, 0, 7), (Item, 0, 3), (Item, 2.5, 9.0), (Later, 0, 1),
    (Counter, 2, 3), (Replaced, False, True), (AnyEntry, [1, 5, 7], [3, 5, 7]), (Schedule, 0, 3),
    (FloatCounter, 8.0, 2.0),
]  # fmt: skip


def traced(model: nn.Module) -> Traced:
    return trace(model, (X,), {}, training=True)


def targets(made: Traced) -> list[str]:
    return [op.target for layer in made.program.layers for op in layer.ops]


@pytest.mark.parametrize(("kind", "doubled", "plain"), TRUTHS)
def test_a_program_is_for_the_answer_of_a_comparison(kind: type[Asking], doubled: Any, plain: Any) -> None:
    first, second = traced(kind(doubled)), traced(kind(plain))
    multiplies = "aten.mul.Tensor"
    assert multiplies in targets(first)
    assert multiplies not in targets(second)
    for made, own, other in ((first, doubled, plain), (second, plain, doubled)):
        assert made.questions, kind
        for question in made.questions:
            assert question.is_truth
            assert question.names == ("asked",)
            buffer = torch.as_tensor(own)
            assert question.answer([buffer]) == question.known
            assert buffer.equal(torch.as_tensor(own)), "the answer of a counter must not count"
        assert any(question.answer([torch.as_tensor(other)]) != question.known for question in made.questions)
        assert any("buffer 'asked'" in note for note in made.program.notes)


def test_questions_of_two_traces_are_equal_but_for_the_answer() -> None:
    first, second = traced(Counter(0)), traced(Counter(7))
    assert first.questions == second.questions
    assert [question.known for question in first.questions] != [question.known for question in second.questions]


class Value(Asking):
    """Computes with the number of a buffer, and compares the one of the same line elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.asked.item()


def test_a_number_that_is_computed_with_is_a_constant() -> None:
    made = traced(Value(0.25))
    (question,) = made.questions
    assert (question.known, question.is_truth) == ((0.25,), False)
    assert question.answer([torch.tensor(0.5)]) == (0.5,)
    assert "reads in Python the value of buffer 'asked'" in question.note


class Both(Asking):
    """Computes with one buffer, and compares another, which must not be a constant for that."""

    steps: Tensor

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps.item()
        gain = self.asked.item()
        return self.fc(x) * gain if steps < 5 else self.fc(x)


def test_only_the_numbers_that_are_computed_with_are_constants() -> None:
    kinds = {question.names: question.is_truth for question in traced(Both(0.25)).questions}
    assert kinds == {("asked",): False, ("steps",): True}


class Columns(Asking):
    """Half of the features, as coupling flows choose them."""

    def select(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.select(self.fc(x)) @ self.fc.weight[:4]


class Behind(Columns):
    def select(self, x: Tensor) -> Tensor:
        return x[:, self.asked]


class Inverse(Columns):
    def select(self, x: Tensor) -> Tensor:
        return x[..., ~self.asked]


class InFront(Columns):
    def select(self, x: Tensor) -> Tensor:
        return x.t()[self.asked].t()


class Places(Columns):
    def select(self, x: Tensor) -> Tensor:
        return x[:, self.asked.nonzero().squeeze(1)]


class Where(Columns):
    def select(self, x: Tensor) -> Tensor:
        return x[:, torch.where(self.asked)[0]]


@pytest.mark.parametrize("kind", [Behind, Inverse, InFront, Places, Where])
def test_the_places_of_a_mask_among_buffers_are_constants(kind: type[Asking]) -> None:
    mask = torch.arange(8) > 3
    (question,) = traced(kind(mask)).questions
    expected = (0, 1, 2, 3) if kind is Inverse else (4, 5, 6, 7)
    assert (question.names, question.known, question.is_truth) == (("asked",), expected, False)
    assert question.answer([~mask]) != question.known


class MeanOfSelected(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).t()[self.asked].square().mean()


def test_a_mean_over_a_mask_among_buffers_is_for_every_mask() -> None:
    assert traced(MeanOfSelected(torch.arange(8) > 3)).questions == ()


class OfInput(Asking):
    """The buffer was written to with what follows from the batch."""

    def forward(self, x: Tensor) -> Tensor:
        self.asked.copy_(x.mean())
        return self.fc(2 * x if self.asked > 0 else x)


class OfParameter(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(2 * x if self.fc.bias.sum() > self.asked else x)


@pytest.mark.parametrize("kind", [OfInput, OfParameter])
def test_what_follows_from_a_batch_or_parameters_stays_refused(kind: type[Asking]) -> None:
    with pytest.raises(TraceError, match="so the model is not one graph"):
        traced(kind(0.0))


def test_a_buffer_without_a_value_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match="buffer 'asked', which has no value on the meta device"):
        traced(Flag(False).to("meta"))


def test_a_part_asks_by_the_names_of_the_whole_model() -> None:
    question = BufferQuestion(("asked",), traced(Flag(False)).questions[0].computation, "here", (False,))
    assert question.under("blocks.0").names == ("blocks.0.asked",)
    assert question.under("") is question
