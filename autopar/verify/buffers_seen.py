"""Flags and counters in buffers, which decide what calls do: a run on one device shows what ranks will ask.

Ranks are threads here, and tracing is for one at a time, so that their calls are planned before they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.objects.buffer_questions import small_buffers
from autopar.planning.call_plans import CallPlanner
from autopar.planning.call_traces import ExampleInputs, as_call
from autopar.trace import Traced

__all__ = ["BuffersSeen", "plan_calls_seen"]


class BuffersSeen:
    """What the calls of a model on one device found in its small buffers: flags and counters change between calls.

    Attributes:
        calls: whether each was in training mode, and the buffers by name.
    """

    def __init__(self) -> None:
        """There were no calls yet."""
        self.calls: list[tuple[bool, Mapping[str, Tensor]]] = []

    def __deepcopy__(self, memo: Any) -> BuffersSeen:
        """Itself: copies of the model, which has it as a hook, note their calls here."""
        del memo
        return self

    def __call__(self, model: nn.Module, args: Any) -> None:
        """A call begins."""
        del args
        buffers = {name: x.detach().clone() for name, x in small_buffers(model).items()}
        self.calls.append((model.training, buffers))


def plan_calls_seen(seen: BuffersSeen, planner: CallPlanner, traced: Traced, batches: Sequence[ExampleInputs]) -> None:
    """Plan calls with `batches` for what forward asked of the buffers that were `seen`; ranks can't.

    Raises:
        AutoparError: a call can't be planned.
    """
    for is_training, buffers in seen.calls:
        answers = (question.answer([buffers[name] for name in question.names]) for question in traced.questions)
        is_first = all(answer == question.known for answer, question in zip(answers, traced.questions, strict=True))
        for batch in batches[is_training and is_first :]:
            with torch.set_grad_enabled(batch is batches[0]):
                planner(*as_call(batch), is_training, buffers=buffers)
