"""What a model's forward asks of its buffers in Python: with other answers the model is traced again.

Before each call the answers are computed from the buffers as they are then.  An answer is kept while its buffers are
the same tensors that nothing has written to, so that a flag on an accelerator costs no wait for the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.objects.buffer_questions import BufferQuestion, questions_text, small_buffers
from autopar.objects.tensor_versions import version_of

__all__ = ["BufferAnswers"]

Answer = tuple[Any, ...]
_COMPARED = 16  # entries of a buffer on the host up to which its values are compared: less work than to ask
# Numbers that forward computes with, and that are others after fewer calls than these, are planned for all the time:
# a search takes as long as many steps.
_MOST_ANSWERS = 8
_FEWEST_CALLS = 4


class BufferAnswers:
    """The answers that a module's buffers give now."""

    def __init__(self, root: nn.Module) -> None:
        """Nothing is asked yet of the buffers of `root`."""
        self._root = root
        self._first: dict[BufferQuestion, Answer] = {}
        self._kept: dict[BufferQuestion, tuple[list[_State], Answer]] = {}
        self._calls: dict[BufferQuestion, dict[Answer, int]] = defaultdict(dict)

    @property
    def values(self) -> Mapping[str, Tensor]:
        """The buffers that can be asked, as they are now."""
        return small_buffers(self._root)

    def watch(self, questions: Iterable[BufferQuestion]) -> None:
        """A program was made with the answers that these questions know."""
        for question in questions:
            self._first.setdefault(question, question.known)

    def are_known(self, questions: Iterable[BufferQuestion]) -> bool:
        """Whether the program that asks these questions is for the answers of now."""
        return all(self._answer(question) == question.known for question in questions)

    def changed(self) -> str:
        """Answers other than those of the first programs that asked, for people and for ranks to compare."""
        now = (replace(question, known=self._answer(question)) for question in self._first)
        return questions_text(question for question in now if question.known != self._first[question])

    def count(self, questions: Iterable[BufferQuestion]) -> None:
        """A call runs with these answers."""
        for question in questions:
            if not question.is_truth:
                known = self._calls[question]
                known[question.known] = known.get(question.known, 0) + 1

    def check(self) -> None:
        """Before a call is planned: refuse numbers that change all the time.

        Raises:
            TraceError: forward computes with one that is another in nearly every call.
        """
        for question, calls in self._calls.items():
            if len(calls) >= _MOST_ANSWERS and sum(calls.values()) < _FEWEST_CALLS * len(calls):
                raise TraceError(
                    f"{question.where}: forward computes in Python with the value of buffer "
                    f"{' and '.join(map(repr, question.names))}, which was {len(calls)} different numbers in "
                    f"{sum(calls.values())} calls, and a program is for one of them. Compute with the tensor itself "
                    "(x * self.buffer, not x * self.buffer.item()), or only compare it (if self.buffer < 100:), for "
                    "which a program per answer is enough"
                )

    def _answer(self, question: BufferQuestion) -> Answer:
        buffers = [self._root.get_buffer(name) for name in question.names]
        states = list(map(_State, buffers))
        kept = self._kept.get(question)
        if kept is None or kept[0] != states:
            self._kept[question] = kept = states, question.answer(buffers)
        return kept[1]


class _State:
    """A buffer at one time."""

    def __init__(self, buffer: Tensor) -> None:
        is_compared = buffer.device.type == "cpu" and buffer.numel() <= _COMPARED
        untyped: Any = buffer
        self._values = untyped.tolist() if is_compared else None  # which writes through .data change, too
        self._buffer = buffer
        self._version = version_of(buffer)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _State):
            return False
        if self._values is not None or other._values is not None:
            return self._values == other._values
        return self._buffer is other._buffer and self._version == other._version and self._version is not None

    __hash__ = None  # pyright: ignore[reportAssignmentType]
