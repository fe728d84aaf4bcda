"""What a forward asks of its buffers in Python, such as whether a codebook is initialized: ``if not self.initted``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["BufferQuestion", "questions_text", "small_buffers"]

_MOST_ENTRIES = 1 << 14  # of a buffer that is asked: counts of a codebook's entries, or a mask of pairs of positions


class _Computation(Protocol):
    """What gives the answer; hashable."""

    def known(self, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[Any, ...], Any] | None:
        """Shape, entries and dtype of the answer for these buffers; None where they have no values."""
        ...


@dataclass(frozen=True)
class BufferQuestion:
    """A question whose answer follows from buffers alone; a program is for one answer.

    Questions that differ in the answer only are equal.

    Args:
        names: of the buffers, in the model.
        computation: gives the answer for their values.
        where: the user's line that asks.
        known: the answer with which a program was traced, in row-major order.
        is_truth: whether it is a truth value: a comparison, or whether a number is zero.
    """

    names: tuple[str, ...]
    computation: _Computation
    where: str
    known: tuple[Any, ...] = field(compare=False)
    is_truth: bool = False

    def under(self, part: str) -> BufferQuestion:
        """The same, asked by the submodule `part` of a model."""
        return replace(self, names=tuple(f"{part}.{name}" for name in self.names)) if part else self

    def answer(self, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """The answer for these values of the buffers.  It waits for the device that they are on."""
        result = self.computation.known(values)
        assert result is not None, f"{self.names} have no values"
        return result[1]

    @property
    def subject(self) -> str:
        """The buffers and the line."""
        return f"{' and '.join(map(repr, self.names))} ({self.where})"

    @property
    def note(self) -> str:
        """What the user should know of a program."""
        what = "asks in Python for what follows from" if self.is_truth else "reads in Python the value of"
        return (
            f"{self.where}: forward {what} buffer {' and '.join(map(repr, self.names))}, so a plan is for one answer: "
            "calls with another one are planned when they first come"
        )


def small_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that forward may ask, by their first names."""
    return {name: x for name, x in nn.Module.named_buffers(model) if x.numel() <= _MOST_ENTRIES}


def questions_text(questions: Iterable[BufferQuestion]) -> str:
    """Questions and their answers for people, and for ranks to compare."""
    return ", ".join(f"buffer {question.subject} giving {_answer_text(question.known)}" for question in questions)


def _answer_text(answer: tuple[Any, ...]) -> str:
    return repr(answer[0]) if len(answer) == 1 else repr(list(answer))
